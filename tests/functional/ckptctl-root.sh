#!/usr/bin/bash
# SPDX-License-Identifier: Apache-2.0
# ckptctl on tiers without a daemon: ls, show, pin, unpin, rm.
. "$CKPTCTL_TESTS/ckptctl-lib.sh"

make_version "$work/near" 'job/ä' 1 10
make_version "$work/near" 'job/ä' 1 20 lz4
make_version "$work/deep" 'job/ä' 1 10
make_version "$work/near" 'job/ä' 2 20 only=1 resumes=1/20
make_version "$work/deep" other 7 3
mkdir deep/empty-job

expect 0 ls --root near --root deep
silent
grep -qE '^job/ä +2 +1/20 .*near,.*deep$' out || fail 'the job'
grep -qE '^other +1 +7/3 .*deep$' out || fail 'the other job'
expect 0 --json ls --root near --root deep
json '[j["job"] for j in it["jobs"]] == ["job/ä", "other"]'
json 'it["jobs"][0]["latest"]["step"] == 20 and it["jobs"][0]["complete"] == 2'

expect 0 ls 'job/ä' --root near --root deep
grep -qE '^ +2/20 .*INCOMPLETE: 1 of 2 parts$' out || fail 'the incomplete version'
grep -qE '^ +1/10 +2 +7 .*near,.*deep$' out || fail 'the version in both'
grep -qE '^ +2 +1/20 .*testhost' out || fail 'the generation that resumed'
says 'a fresh start'
expect 0 ls 'job/ä' --root near --root deep --json
json '[(v["generation"], v["step"], v["complete"]) for v in it["versions"]] == [(2, 20, False), (1, 20, True), (1, 10, True)]'
json 'len(it["versions"][2]["complete_in"]) == 2 and it["versions"][0]["parts"] == 1'
json 'it["generations"][0]["resumes"] == {"generation": 1, "step": 20} and it["generations"][1]["resumes"] is None'
if grep -q ' $' out; then fail 'spaces at the end of a line'; fi

expect 0 show 'job/ä' --root near
says 'version 1/20'
says 'alias of model/rows'
expect 0 show 'job/ä' 1/10 --root near --json
json 'it["step"] == 10 and it["world"] == 2 and len(it["parts"]) == 2'
json '{t["name"]: t["dtype"] for t in it["tensors"]}["phase"] == "C64"'
json '[t for t in it["tensors"] if t["name"] == "model/columns"][0]["pieces"][1]["offset"] == [0, 20]'
json '[t for t in it["tensors"] if t["name"] == "optimizer/flat"][0]["pieces"][1]["start"] == 50001'
json '[t["rank"] for t in it["tensors"] if t["name"] == "random"] == [0, 1]'

# Versions: GENERATION/STEP, the newest generation that has STEP, latest.
expect 0 show 'job/ä' 10 --root near
says 'version 1/10'
expect 3 show 'job/ä' 20 --root near
says_error 'version 2/20 of job job/ä is not complete anywhere'
expect 3 show 'job/ä' 30 --root near
says_error 'has no version 30'
expect 3 show 'job/ä' 9/10 --root near
for wrong in x 1/ /1 1/2/3 01 1/x ''; do
    expect 2 show 'job/ä' "$wrong" --root near
    says_error 'is no version; write GENERATION/STEP, STEP, or latest'
done
expect 3 show nobody --root near
says_error 'no root has a job "nobody"'
expect 3 ls --root nowhere
says_error '--root nowhere: no such directory'
expect 2 ls '' --root near

# Pins.
expect 0 pin 'job/ä' 1/10 --root near --root deep
says 'pinned 1/10 in 2 roots'
[[ -e near/job%2F%C3%A4/1/10/pin-operator ]] || fail 'no pin'
expect 0 ls 'job/ä' --root near
grep -qE '^ +1/10 .*pinned$' out || fail 'the pin is not shown'
expect 6 rm 'job/ä' 1/10 --root near --root deep
says_error 'is pinned'
expect 0 pin 'job/ä' 1/10 --name paper --root near
expect 0 unpin 'job/ä' 1/10 --root near --root deep
expect 6 rm 'job/ä' 1/10 --root near
expect 3 unpin 'job/ä' 1/10 --root near
says_error 'has no pin "operator"'
expect 0 unpin 'job/ä' 1/10 --name paper --root near --json
json 'it["done"] == "unpinned" and it["roots"] == 1'
expect 2 pin 'job/ä' 1/10 --name a/b --root near
says_error 'no name for a pin'

# Generation 2 resumed from 1/20 and has nothing of its own.
expect 6 rm 'job/ä' 1/20 --root near
says_error 'generation 2 resumed from 1/20'
expect 0 rm 'job/ä' 1/10 --root near --root deep
says 'removed 1/10 in 2 roots'
expect 3 show 'job/ä' 1/10 --root near --root deep
expect 0 rm 'job/ä' 1/20 --force --root near
expect 3 show 'job/ä' --root near --root deep
says_error 'has no complete version'

# Foreign things are named and passed over.
echo hello >near/job%2F%C3%A4/2/20/complete.json
expect 0 ls 'job/ä' --root near
says_error 'cannot be read; the first:'
