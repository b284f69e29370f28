#!/usr/bin/bash
# SPDX-License-Identifier: Apache-2.0
# ckptctl drain without a daemon: what the deepest root lacks is brought there, verified.
. "$CKPTCTL_TESTS/ckptctl-lib.sh"

make_version "$work/near" job 1 10
make_version "$work/near" job 1 20 lz4
make_version "$work/deep" job 1 10
make_version "$work/near" job 2 20 only=0 resumes=1/20
make_version "$work/near" other 1 1

expect 6 drain --root near --root deep
grep -qE '^4\.[0-9] MiB to go \(2 versions\)$' out || fail 'what is to be drained'
expect 6 drain job --root near --root deep --json
json 'it["pending"] == 1 and not it["drained"] and it["pending_bytes"] > 1000000'
expect 0 drain job --wait --root near --root deep
says 'drained job 1/20'
expect 0 verify job --all --root deep
says '2 versions, 4 parts'
expect 0 drain --wait --root near --root deep --json
json 'it["drained"]'
expect 0 drain --root near --root deep
says drained
expect 0 verify other --root deep
[[ -z $(find . -name 'pin-*' -o -name '*.tmp') ]] || fail 'something is left'
[[ ! -e deep/job/2/20/complete.json ]] || fail 'an incomplete version was drained'

# A part that is there already is not written again; a damaged source is refused.
make_version "$work/near" job 1 30
flip near/job/1/30/rank-00001.safetensors 5000
expect 1 drain job --wait --root near --root deep
says_error 'rank 1 of 1/30'
[[ -e deep/job/1/30/rank-00000.json && ! -e deep/job/1/30/complete.json ]] || fail 'not what should be'
before=$(stat -c %i deep/job/1/30/rank-00000.safetensors)
flip near/job/1/30/rank-00001.safetensors 5000
expect 0 drain job --wait --root near --root deep
[[ $(stat -c %i deep/job/1/30/rank-00000.safetensors) == "$before" ]] || fail 'rank 0 was written again'
expect 0 verify job 1/30 --root deep

expect 2 drain --root near
says_error 'there is one root only'
expect 2 drain --root near --root deep --timeout 5
expect 3 drain nobody --root near --root deep

# From the configuration, no daemon.
mkdir -p .config/ckptd
printf '[tier local]\nrole = local\npath = %s\n[tier parallel]\nrole = parallel\npath = %s\n' "$work/near" "$work/deep" \
    >.config/ckptd/ckptd.conf
make_version "$work/near" job 1 40
expect 6 drain
expect 0 drain --wait
expect 0 ls job
grep -qE '^ +1/40 .*local,parallel$' out || fail 'labels'
