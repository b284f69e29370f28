#!/usr/bin/bash
# SPDX-License-Identifier: Apache-2.0
# ckptctl's command line: usage, help, config, doctor, and what it says where no daemon is.
. "$CKPTCTL_TESTS/ckptctl-lib.sh"

expect 0 help
says 'usage: ckptctl VERB'
verbs=$(sed -n 's/^  \([a-z]*\) .*/\1/p' out)
for verb in $verbs; do
    expect 0 help "$verb"
    says "usage: ckptctl $verb"
    expect 0 "$verb" --help
    says "usage: ckptctl $verb"
done

# The manual has every verb, and every option; that of the library every function.
source=$CKPTCTL_TESTS/../..
for verb in $verbs; do
    grep -qE "^\\*$verb\\*( |\$)" "$source/man/ckptctl.1.scd" || fail "ckptctl(1) lacks $verb"
    expect 0 help "$verb"
    for option in $(sed -n 's/^  .*\(--[a-z]*\).*/\1/p' out); do
        [[ $option == --help || $option == --version || $option == --output ]] ||
            grep -qF "*$option*" "$source/man/ckptctl.1.scd" || fail "ckptctl(1) lacks $option"
    done
done
for function in $(sed -n 's/^CKPT_PUBLIC .*[ *]\(ckpt_[a-z_]*\)(.*/\1/p' "$source/client/ckpt.h"); do
    grep -qF "*$function*(" "$source/man/ckpt.3.scd" || fail "ckpt(3) lacks $function"
done
expect 0 --version
says 'ckptctl 0.'
got=0
"$CKPTCTL" >out 2>err || got=$?
[[ $got == 2 ]] || fail 'no verb'
expect 2 frobnicate
says_error 'there is no verb "frobnicate"'
expect 2 help frobnicate
expect 2 ls --frobnicate
says_error 'no such option as --frobnicate'
expect 2 ls --root
says_error '--root needs an argument'
expect 2 ls --repair
says_error 'ls does not take --repair'
expect 2 status --root near
says_error 'status does not take --root'
expect 2 show
says_error 'usage: ckptctl show JOB [VERSION]'
expect 2 ls a b
expect 2 rm job
expect 2 drain --wait --timeout never

# No daemon.
expect 4 status
says_error "no daemon listens on $work/no-daemon"
expect 4 stop
expect 4 status --socket "$work/elsewhere"
printf '[tier local]\nrole = local\npath = %s\n' "$work/absent/local" >absent.conf
expect 3 ls --config absent.conf
expect 2 ls --config nowhere.conf
says_error 'nowhere.conf: no such file'
cat >bad.conf <<'END'
[tier local]
role = local
path = relative
END
expect 2 ls --config bad.conf
says_error 'bad.conf:3: path must be an absolute path'
expect 2 config --config bad.conf

# The configuration and its example.
expect 0 config
says 'none, these are the defaults'
expect 0 config --example
cp out example.conf
expect 0 config --config example.conf
says 'example.conf'
expect 0 config --config example.conf --json
json 'it["tiers"][0]["role"] == "local" and it["chunk_size"] == 4 << 20'

# The parallel root that jobs name is looked at too.
make_version "$work/deep" job 1 10
CKPT_DIR=$work/deep expect 0 ls --config /dev/null
says 'parallel'

# doctor: one line per fact; a missing root is a failure.
got=0
"$CKPTCTL" doctor --root near --root deep >out 2>err || got=$?
((got <= 1)) || fail 'doctor'
silent
if grep -vE '^(ok  |warn|fail)  ' out | grep -q .; then fail 'a line without a verdict'; fi
for check in kernel io_uring ptrace memfd /dev/shm memlock config pool 'tier root1' 'tier root2' socket daemon; do
    grep -qE "^(ok  |warn|fail)  $check " out || fail "no line about $check"
done
expect 1 doctor --root nowhere
grep -qE '^fail  .*nowhere: no such directory' out || fail 'the missing root'
expect 1 doctor --root nowhere --json
json 'it["failures"] >= 1 and all(c["verdict"] in ("ok", "warn", "fail") for c in it["checks"])'
expect 1 doctor --config bad.conf
grep -qE '^fail +config +bad.conf:3' out || fail 'the bad configuration'

# A stdout that is full.
if [[ -w /dev/full ]]; then
    got=0
    "$CKPTCTL" help >/dev/full 2>err || got=$?
    [[ $got == 5 ]] || fail "a full stdout gave $got"
fi

# Completion.
bash -c '. "$1/../../tools/ckptctl.bash"
PATH=$(dirname "$CKPTCTL"):$PATH
COMP_WORDS=(ckptctl ver) COMP_CWORD=1; _ckptctl; [[ ${COMPREPLY[*]} == verify ]] || exit 1
COMP_WORDS=(ckptctl verify --rep) COMP_CWORD=2; _ckptctl; [[ ${COMPREPLY[*]} == --repair ]] || exit 2
COMP_WORDS=(ckptctl --root "$2" show j) COMP_CWORD=4; _ckptctl; [[ ${COMPREPLY[*]} == job ]] || exit 3
COMP_WORDS=(ckptctl --root "$2" show job "") COMP_CWORD=5; _ckptctl; [[ " ${COMPREPLY[*]} " == *" latest "* && " ${COMPREPLY[*]} " == *" 10 "* ]] || exit 4
' _ "$CKPTCTL_TESTS" "$work/deep" >out 2>err || fail "completion $?"
