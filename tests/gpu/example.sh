#!/usr/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# example.sh PROGRAM: examples/gpu/gpu is killed twice, and ends as if nothing had happened. CKPTD: the daemon.
set -euo pipefail

directory=$(mktemp -d "${TMPDIR:-/tmp}/ckptd-example.XXXXXX")
daemon= program=
end() {
    [[ -z $program ]] || kill -KILL "$program" 2>/dev/null || true
    [[ -z $daemon ]] || { kill "$daemon" && wait "$daemon"; } || true
    rm -rf "$directory"
}
trap end EXIT
mkdir "$directory/cuda"
export CUDA_STANDIN_DIR=$directory/cuda CKPT_SOCKET=$directory/sock

fail() {
    echo "example.sh: $*" >&2
    cat "$directory"/out.* "$directory/log" >&2
    exit 1
}

printf '[tier local]\nrole = local\npath = %s\nkeep = 1000\nbacklog = 1000\n' "$directory/local" >"$directory/ckptd.conf"
"$CKPTD" --config "$directory/ckptd.conf" --socket "$CKPT_SOCKET" 2>"$directory/log" &
daemon=$!

complete() { (compgen -G "$directory/local/example/*/*/complete.json" || true) | wc -l; }

for round in 1 2; do
    "$1" example 30 >"$directory/out.$round" 2>&1 &
    program=$!
    until [[ -s $directory/out.$round ]] && (($(complete) >= round * 10)); do
        kill -0 "$program" 2>/dev/null || fail 'it ended by itself'
        sleep 0.01
    done
    kill -KILL "$program"
    wait "$program" 2>/dev/null || true
    program=
done
"$1" example 0 >"$directory/out.3" 2>&1 || fail "status $?"
[[ $(tail -n 1 "$directory/out.3") == 'done, weights[0] = 100' ]] || fail 'it did not come to the end'
head -qn 1 "$directory"/out.*
for round in 2 3; do # the first step, and what stood in the restored memory
    read -r step weight < <(sed -nE 's/^first step ([0-9]+), weights\[0\] = ([0-9]+)$/\1 \2/p' "$directory/out.$round")
    ((step >= (round - 1) * 10 && step == weight)) || fail "round $round resumed wrongly"
done
[[ ! -e $directory/cuda/mistakes ]] || fail "$(cat "$directory/cuda/mistakes")"
