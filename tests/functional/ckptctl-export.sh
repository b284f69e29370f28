#!/usr/bin/bash
# SPDX-License-Identifier: Apache-2.0
# ckptctl export: merged, selected, split, model files; from damaged roots; nothing left behind.
. "$CKPTCTL_TESTS/ckptctl-lib.sh"

check() { python3 "$CKPTCTL_TESTS/ckptctl-check.py" "$@" || fail "$1 is not right"; }

make_version "$work/near" job 1 10
make_version "$work/near" job 1 20 lz4
make_version "$work/deep" job 1 20

all=(model/rows model/columns optimizer/flat model/tied model/scalar phase model/big
    %rank-0/random %rank-1/random %rank-0/%state %rank-1/%state)
expect 0 export job -o whole --root near
silent
check whole 20 merged "${all[@]}"
expect 0 export job 1/10 -o whole --root near --json
json 'it["step"] == 10 and it["files"] == 1'
check whole 10 merged "${all[@]}"
[[ $(ls) == "$(printf '%s\n' deep err near out whole)" ]] || fail 'something is left'
[[ -z $(find . -name 'pin-*') ]] || fail 'a pin is left'

expect 0 export job -o some --root near --tensors 'optim*' --tensors 'model/s?alar'
check some 20 merged optimizer/flat model/scalar
expect 3 export job -o none --root near --tensors 'nothing*'
[[ ! -e none ]] || fail 'an empty file'

expect 0 export job -o model --root near --hf
check model 20 model rows columns scalar big
expect 0 export job -o model --root near --hf --prefix optimizer/
check model 20 model flat
expect 3 export job -o model --root near --hf --prefix transformer.
says_error 'no global tensor'
expect 0 export job -o model --root near --hf --prefix ''
check model 20 model model/rows model/columns model/scalar model/big optimizer/flat phase

# The images themselves: encoded or not, they are the same file.
expect 0 export job -o parts --split --root near
says 'parts: '
for rank in 0 1; do cmp parts/rank-0000$rank.safetensors deep/job/1/20/rank-0000$rank.safetensors; done
expect 0 export job -o part --part 1 --root near
cmp part parts/rank-00001.safetensors
check part 20 part 'model/rows@32+32,0+3000' 'model/columns@0+17,20+30' 'optimizer/flat@r50001+50232' \
    %rank/random model/big %state
expect 3 export job -o part --part 2 --root near
says_error 'there is no rank 2: the version has 2'

# A damaged chunk is read from the other root; without one, no file.
flip near/job/1/20/rank-00001.chunks 5000
expect 0 export job -o whole --root near --root deep
says_error 'damaged'
check whole 20 merged "${all[@]}"
rm whole
expect 1 export job -o whole --root near
says_error 'no root has an undamaged chunk 0 of rank 1'
[[ ! -e whole && -z $(find . -name '*.tmp') ]] || fail 'something is left'
flip deep/job/1/20/complete.json 60
expect 0 export job -o whole --root near --root deep
rm near/job/1/20/rank-00001.json
expect 0 export job -o whole --root near --root deep
check whole 20 merged "${all[@]}"

expect 2 export job --root near
says_error 'export needs -o OUT'
expect 2 export job -o x --split --hf --root near
expect 2 export job -o x --prefix p --root near
expect 2 export job -o x --part -1 --root near
expect 2 export job -o x --part 1x --root near
expect 5 export job -o no/such/directory --root deep --root near
says_error 'cannot create no/such/directory'
expect 3 export job 9/9 -o x --root near

# No room: an error at the start, and no file. Needs the right to mount.
if unshare -m true 2>/dev/null; then
    mkdir small
    got=0
    unshare -m bash -c 'mount -t tmpfs -o size=256k none small && "$CKPTCTL" export job 1/10 -o small/x --root near; r=$?; ls small; exit $r' >out 2>err || got=$?
    [[ $got == 5 && ! -s out ]] || fail "a full file system gave $got"
    says_error 'No space left'
fi
