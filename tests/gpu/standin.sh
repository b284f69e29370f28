#!/usr/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# standin.sh RUN.SH: the probe of run.sh on the stand-in driver, where every question has an answer and no time has a
# meaning, which each line with one says.
set -euo pipefail

MIB=32
output=$("$1" --probe $MIB) || {
    code=$?
    printf '%s\n' "$output"
    exit $code
}
printf '%s\n' "$output"

fail() {
    echo "standin.sh: $*" >&2
    exit 1
}
said() { grep -qF -- "$1" <<<"$output" || fail "not in the output: $1"; }

said 'device 0: stand-in GPU'
said 'second open of a legacy handle in one process:'
said 'mapping imported memory for reading only:'
said 'exporter killed in the middle of a copy:'
said 'who copies: the daemon'
said 'capture, from save to the fence'
said 'blocked:'
said '== passed'
times=$(grep -E '[0-9] (GiB/s|us|ms|s)\b' <<<"$output") || fail 'no time was measured'
if grep -vF '(meaningless: the stand-in driver)' <<<"$times"; then
    fail 'these lines do not say that their times mean nothing'
fi
