# SPDX-License-Identifier: Apache-2.0
# What the tests of ckptctl share. Sourced; $CKPTCTL and $CKPTCTL_MAKE are the programs, $CKPTCTL_TESTS this directory.
# shellcheck shell=bash disable=SC2034
set -euo pipefail
: "${CKPTCTL:?}" "${CKPTCTL_MAKE:?}" "${CKPTCTL_TESTS:?}"
export PYTHONDONTWRITEBYTECODE=1

work=$(mktemp -d "${TMPDIR:-/tmp}/ckptd-ckptctl.XXXXXX")
trap 'rm -rf "$work"' EXIT
cd "$work"
unset CKPTD_CONFIG CKPT_DIR XDG_CONFIG_HOME
export HOME=$work CKPT_SOCKET=$work/no-daemon
mkdir near deep

fail() {
    printf 'FAILED in line %s: %s\n' "${BASH_LINENO[1]}" "$*"
    printf -- '--- stdout\n%s\n--- stderr\n%s\n' "$(cat out)" "$(cat err)"
    exit 1
}

# expect STATUS ARGUMENT...: runs ckptctl, its output in the files out and err.
expect() {
    local wanted=$1 got=0
    shift
    "$CKPTCTL" "$@" >out 2>err || got=$?
    ((got == wanted)) || fail "ckptctl $* gave $got instead of $wanted"
    if ((wanted > 1 && wanted < 6)) && ! grep -q '^ckptctl: ' err; then fail "ckptctl $* says no sentence"; fi
}

# says TEXT / says_error TEXT: the last command printed it, on stdout or stderr.
says() { grep -qF -- "$1" out || fail "stdout lacks: $1"; }
says_error() { grep -qF -- "$1" err || fail "stderr lacks: $1"; }
silent() { [[ ! -s err ]] || fail 'stderr is not empty'; }

# json EXPRESSION: a Python expression over `it`, the JSON on stdout, is true.
json() { python3 -c 'import json, sys; it = json.load(open("out")); sys.exit(not eval(sys.argv[1]))' "$1" || fail "not so: $1"; }

make_version() { "$CKPTCTL_MAKE" "$@"; }

# flip FILE OFFSET: one bit.
flip() {
    python3 - "$1" "$2" <<'END'
import sys
with open(sys.argv[1], "r+b") as file:
    file.seek(int(sys.argv[2]))
    byte = file.read(1)[0]
    file.seek(int(sys.argv[2]))
    file.write(bytes([byte ^ 4]))
END
}
