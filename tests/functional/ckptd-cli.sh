#!/usr/bin/bash
# SPDX-License-Identifier: Apache-2.0
# ckptd's command line and what it says of a configuration that cannot be: one sentence with file and line, exit 2.
set -euo pipefail
: "${CKPTD:?}"
work=$(mktemp -d "${TMPDIR:-/tmp}/ckptd-cli.XXXXXX")
trap 'rm -rf "$work"' EXIT
cd "$work"
unset CKPTD_CONFIG CKPTD_LOOP CKPT_SOCKET XDG_CONFIG_HOME
mkdir socket

fail() {
    printf 'FAILED in line %s: %s\n' "${BASH_LINENO[0]}" "$*"
    cat out
    exit 1
}

# refuses STATUS SENTENCE ARGUMENT...: it ends with the status and says one line with the sentence in it.
refuses() {
    local wanted=$1 sentence=$2 got=0
    shift 2
    timeout 20 "$CKPTD" --socket "$work/socket/ckptd" "$@" >out 2>&1 || got=$?
    ((got == wanted)) || fail "ckptd $* gave $got instead of $wanted"
    grep -qF -- "$sentence" out || fail "not said: $sentence"
    [[ -z $sentence || $(wc -l <out) == 1 ]] || fail 'more than one line'
    [[ ! -e socket/ckptd ]] || fail 'a socket is left'
}

# wrong SENTENCE: the configuration on standard input is refused so.
wrong() {
    cat >ckptd.conf
    refuses 2 "$1" --config ckptd.conf
}

refuses 2 'nowhere.conf: no such file' --config nowhere.conf
wrong 'ckptd.conf:2: no such key as "frobnicate"' <<<$'[daemon]\nfrobnicate = 1'
wrong 'ckptd.conf:2: loop' <<<$'[daemon]\nloop = round'
wrong 'ckptd.conf:3: tier near: cannot make the root' <<END
[tier near]
role = local
path = $work/absent/near
END
touch file
wrong 'ckptd.conf:3: tier near: cannot open the root' <<END
[tier near]
role = local
path = $work/file
END
refuses 2 'cannot make a loop of kind square' --loop square

"$CKPTD" --help >out
grep -q '^Usage: ckptd' out || fail 'no usage'
"$CKPTD" --version | grep -q '^ckptd [0-9]' || fail 'no version'
"$CKPTD" --example >example.conf
grep -q '^\[pool\]' example.conf || fail 'no example'
got=0
"$CKPTD" --frobnicate >out 2>&1 || got=$?
((got == 2)) || fail "an unknown option gave $got"

# All threads keep to the processors of the configuration, and to its nice value.
processor=$(sed -nE 's/^Cpus_allowed_list:[[:space:]]*([0-9]+).*/\1/p' /proc/self/status)
cat >ckptd.conf <<END
[daemon]
processors = $processor
nice = 19
capture_threads = 3
[pool]
size = 8M
[tier near]
role = local
path = $work/near
END
"$CKPTD" --config ckptd.conf --socket "$work/socket/ckptd" 2>out &
daemon=$!
trap 'kill -9 "$daemon" 2>/dev/null || true; wait; rm -rf "$work"' EXIT
until grep -q ' serves ' out; do
    kill -0 "$daemon" || fail 'the daemon has ended'
    read -rt 0.05 <> <(:) || true
done
until (($(find "/proc/$daemon/task" -mindepth 1 -maxdepth 1 | wc -l) > 1)); do # the pool is being touched
    kill -0 "$daemon" || fail 'the daemon has ended'
    read -rt 0.05 <> <(:) || true
done
for thread in "/proc/$daemon/task"/*; do
    grep -qE "^Cpus_allowed_list:[[:space:]]*$processor\$" "$thread/status" || fail "$(cat "$thread/status")"
    [[ $(sed 's/.*) //' "$thread/stat" | cut -d ' ' -f 17) == 19 ]] || fail "nice: $(cat "$thread/stat")"
done
if grep -q 'cannot keep to' out; then fail 'it does not keep to them'; fi
kill "$daemon"
wait "$daemon" || fail 'it failed'
