#!/usr/bin/bash
# SPDX-License-Identifier: Apache-2.0
# ckptctl with the real daemon and a real job. $CKPTD and $CKPTCTL_CLIENT are the programs.
. "$CKPTCTL_TESTS/ckptctl-lib.sh"
: "${CKPTD:?}" "${CKPTCTL_CLIENT:?}"

cat >conf <<END
[pool]
size = 64M
[tier nvme]
role = local
path = $work/near
[tier scratch]
role = parallel
path = $work/deep
rate_mib_s = 4
END
export CKPTD_CONFIG=$work/conf CKPT_SOCKET=$work/run/sock CKPT_RUN_ID=live-1
mkdir -m 700 run
"$CKPTD" 2>log &
daemon=$!
trap 'kill "$daemon" 2>/dev/null || true; wait; rm -rf "$work"' EXIT
for ((i = 0; i < 200; i++)); do
    if "$CKPTCTL" status >out 2>err; then break; fi
    read -rt 0.05 <> <(:) || true
done
expect 0 status
says "pid $daemon"
expect 0 doctor --json
json 'any(c["check"] == "daemon" and c["verdict"] == "ok" for c in it["checks"])'

coproc "$CKPTCTL_CLIENT"
job=$COPROC_PID # bash forgets it as soon as the job ends
read -rt 60 line <&"${COPROC[0]}" || fail 'the job did not save'
[[ $line == saved ]] || fail "the job said $line"
expect 0 status --json
json 'it["pid"] == '"$daemon"' and [t["name"] for t in it["tiers"]] == ["nvme", "scratch"]'
json 'it["sessions"][0]["job"] == "live" and it["sessions"][0]["saves"] == 3 and it["sessions"][0]["last_step"] == 3'
expect 0 status
says 'live'
expect 0 ls live
silent
grep -qE '^ +1/3 +1 +1 +4\.0 MiB .*nvme' out || fail 'the newest version'
expect 0 show live
says 'model/weights'

expect 0 drain --wait --timeout 60
expect 0 drain
expect 0 trace
silent
python3 "$CKPTCTL_TESTS/ckptctl-trace.py" out live 3 nvme scratch || fail 'the trace'
expect 0 trace nobody
json 'it["traceEvents"] == []'
expect 0 verify live --all
says ' 0 bad, 0 repaired'
expect 0 pin live 1/3
expect 6 rm live 1/3
expect 0 unpin live 1/3
expect 0 export live -o model.safetensors --hf
silent
python3 - <<'END' || fail 'the exported values'
import array, json
data = open("model.safetensors", "rb").read()
length = int.from_bytes(data[:8], "little")
entry = json.loads(data[8 : 8 + length])["weights"]
values = array.array("f", data[8 + length :])
assert entry["dtype"] == "F32" and len(values) == 1 << 20 and values[0] == 3 and values[-1] == (1 << 20) + 2
END

eval "exec ${COPROC[1]}>&-"
wait "$job" || fail 'the job failed'
expect 0 stop
wait "$daemon" || fail 'the daemon failed'
expect 4 status
# The same versions without it, from the configuration.
expect 0 ls live
grep -qE '^ +1/3 .*nvme,scratch$' out || fail 'what is left'
