#!/usr/bin/bash
# SPDX-License-Identifier: Apache-2.0
# ckptctl verify: every flipped bit is found and named, and --repair takes another root's good copy.
. "$CKPTCTL_TESTS/ckptctl-lib.sh"

make_version "$work/near" job 1 10
make_version "$work/near" job 1 20 lz4
make_version "$work/deep" job 1 10
make_version "$work/deep" job 1 20

expect 0 verify job --all --root near --root deep
silent
says '2 versions, 8 parts, 44 chunks'
says ' 0 bad, 0 repaired'
[[ -z $(find . -name 'pin-*') ]] || fail 'a pin is left'
expect 0 verify job --json --root near
json 'it["versions"] == 1 and it["parts"] == 2 and it["bad"] == 0 and it["findings"] == []'

# One bit, in the second and third chunk of a raw part.
flip near/job/1/10/rank-00001.safetensors 300000
flip near/job/1/10/rank-00001.safetensors 600000
expect 1 verify job 1/10 --root near --root deep
grep -qE '^BAD  .*near  1/10  rank 1  chunk 1  ' out || fail 'chunk 1'
grep -qE '^BAD  .*near  1/10  rank 1  chunk 2  ' out || fail 'chunk 2'
[[ $(grep -c ^BAD out) == 2 ]] || fail 'more than that'
says ' 1 bad, 0 repaired'
says "$work/near/job/1/10/rank-00001.safetensors, chunk 1: the bytes are damaged"
says_error '--repair replaces bad copies by good ones of other roots'
expect 1 verify job 10 --root near --json
json '[(f["rank"], f["chunk"]) for f in it["findings"]] == [(1, 1), (1, 2)] and it["bad"] == 1'
json 'it["newer"] == 0 and it["repairs"] == []'

# Nothing to repair from; then there is.
expect 1 verify job 1/10 --repair --root near
says_error 'cannot be repaired: no other root has a good one; name more with --root, or ckptctl rm it'
expect 0 verify job 1/10 --repair --root near --root deep
grep -qE '^REPAIRED  .*near  1/10  rank 1  from .*deep$' out || fail 'not repaired'
expect 0 verify job --all --root near --root deep
cmp near/job/1/10/rank-00001.safetensors deep/job/1/10/rank-00001.safetensors

# An encoded part; a short one; one whose data is gone; a manifest that lies.
size=$(stat -c %s near/job/1/20/rank-00000.chunks)
flip near/job/1/20/rank-00000.chunks $((size / 2))
expect 1 verify job latest --root near
says 'rank 0  chunk'
truncate -s -1 near/job/1/20/rank-00001.chunks
expect 1 verify job latest --root near
says 'rank 1  '
expect 0 verify job latest --repair --root near --root deep
expect 0 verify job latest --root near
rm near/job/1/20/rank-00000.*[!d]
expect 1 verify job latest --root near
expect 0 verify job latest --repair --root near --root deep
expect 0 verify job --all --root near --root deep
flip near/job/1/10/rank-00000.json 700
expect 1 verify job 1/10 --root near
expect 0 verify job 1/10 --repair --root near --root deep --json
json '[(r["root"], r["rank"], r["from"]) for r in it["repairs"]] == [("'"$work"'/near", 0, "'"$work"'/deep")]'
json 'it["bad"] == 1 and it["repaired"] == 1'
expect 0 verify job 1/10 --root near

# The index, and one without the parts it would be made from.
flip deep/job/1/10/complete.json 100
expect 1 verify job 1/10 --root deep
mv deep/job/1/10/rank-00001.json aside
expect 1 verify job 1/10 --repair --root deep
says_error 'the index of 1/10 cannot be made anew: parts are missing or bad'
mv aside deep/job/1/10/rank-00001.json
expect 0 verify job 1/10 --repair --root near --root deep
says 'the index'
expect 0 verify job 1/10 --root deep

# Both copies bad in one chunk: nothing is made worse.
flip near/job/1/10/rank-00000.safetensors 5000
flip deep/job/1/10/rank-00000.safetensors 5000
expect 1 verify job 1/10 --repair --root near --root deep
says ' 2 bad, 0 repaired'
[[ -e near/job/1/10/complete.json && -e deep/job/1/10/complete.json ]] || fail 'a bad copy was taken away without a good one'

expect 2 verify job 1/10 --all --root near
expect 3 verify job 5/5 --root near
expect 3 verify nobody --root near
