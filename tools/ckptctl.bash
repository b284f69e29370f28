# SPDX-License-Identifier: Apache-2.0
# Completion for ckptctl: verbs, their options, jobs and versions (as `ckptctl ls --json` has them).

_ckptctl_names() {
    # $1: the key; the rest: arguments of ckptctl that give JSON with it.
    local key=$1
    shift
    ckptctl "$@" --json 2>/dev/null | sed -n 's/^ *"'"$key"'": "\{0,1\}\([^",]*\)"\{0,1\},\{0,1\}$/\1/p' | sort -u
}

_ckptctl() {
    local word=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD - 1]} verb='' i positional=0
    local -a roots=() words=()
    COMPREPLY=()
    case $previous in
    --root)
        mapfile -t COMPREPLY < <(compgen -d -- "$word")
        return
        ;;
    --socket | --config | -o | --output)
        mapfile -t COMPREPLY < <(compgen -f -- "$word")
        return
        ;;
    --part | --tensors | --prefix | --name | --timeout) return ;;
    esac
    for ((i = 1; i < COMP_CWORD; i++)); do
        case ${COMP_WORDS[i]} in
        --root)
            roots+=(--root "${COMP_WORDS[i + 1]}")
            i=$((i + 1))
            ;;
        --socket | --config | -o | --output | --part | --tensors | --prefix | --name | --timeout) i=$((i + 1)) ;;
        -*) ;;
        *)
            words+=("${COMP_WORDS[i]}")
            ;;
        esac
    done
    verb=${words[0]:-}
    positional=${#words[@]}
    if [[ $word == -* ]]; then
        local options='--json --socket --config --help'
        case $verb in
        ls | show | pin | unpin | rm | doctor | drain | verify | export) options+=' --root' ;;
        esac
        case $verb in
        verify) options+=' --all --repair' ;;
        export) options+=' --output --part --tensors --split --hf --prefix' ;;
        pin | unpin) options+=' --name' ;;
        rm) options+=' --force' ;;
        drain) options+=' --wait --timeout' ;;
        stop) options+=' --now' ;;
        config) options+=' --example' ;;
        '') options+=' --root --version' ;;
        esac
        mapfile -t COMPREPLY < <(compgen -W "$options" -- "$word")
        return
    fi
    local verbs='status trace ls show verify export pin unpin rm drain doctor stop config help'
    case $verb:$positional in
    :0 | help:1) mapfile -t COMPREPLY < <(compgen -W "$verbs" -- "$word") ;;
    trace:1 | ls:1 | show:1 | verify:1 | export:1 | pin:1 | unpin:1 | rm:1 | drain:1)
        mapfile -t COMPREPLY < <(compgen -W "$(_ckptctl_names job ls "${roots[@]}")" -- "$word")
        ;;
    show:2 | verify:2 | export:2 | pin:2 | unpin:2 | rm:2)
        mapfile -t COMPREPLY < <(compgen -W "latest $(_ckptctl_names step ls "${words[1]}" "${roots[@]}")" -- "$word")
        ;;
    esac
}

complete -F _ckptctl ckptctl
