# SPDX-License-Identifier: Apache-2.0
"""ckptctl against a daemon that is none: it answers HELLO, STATUS and STOP with what a test wants,
so that also a status with missing fields, a silent and a hostile peer are tried.

usage: ckptctl-daemon.py CKPTCTL CKPTCTL_MAKE"""
import fcntl
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading

CKPTCTL, MAKE = sys.argv[1:3]
SEALS = 0x1 | 0x2 | 0x4 | 0x8
HELLO, HELLO_OK, ERROR, OK, STATUS, STATUS_IS, STOP, TRACE, TRACE_IS = 1, 2, 3, 4, 60, 61, 62, 63, 64


def sealed(name, text, seals):
    memory = os.memfd_create(name, os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.write(memory, text)
    if seals:
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, seals)
    return memory


class Daemon:
    """Serves one thread's worth of connections on `path` until closed."""

    def __init__(self, path, statuses, raw=None, error=None, seals=SEALS, trace=(0, 0, 0, b"")):
        self.statuses, self.raw, self.error, self.seals, self.trace = list(statuses), raw, error, seals, trace
        self.stopped = None
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(path)
        self.listener.listen()
        self.path = path
        self.thread = threading.Thread(target=self.serve)
        self.thread.start()

    def close(self):
        self.listener.shutdown(socket.SHUT_RDWR)
        self.thread.join()
        self.listener.close()
        os.unlink(self.path)

    def serve(self):
        while True:
            try:
                peer, _ = self.listener.accept()
            except OSError:
                return
            with peer:
                while packet := peer.recv(8192):
                    self.answer(peer, packet)

    def answer(self, peer, packet):
        opcode, _, size, serial, _ = struct.unpack_from("<HHIII", packet)
        assert size == len(packet)

        def send(number, body, fds=()):
            head = struct.pack("<HHIII", number, 0, 16 + len(body), serial, 0)
            socket.send_fds(peer, [head + body], fds)

        if opcode == HELLO:
            send(HELLO_OK, struct.pack("<IIII", 1, os.getpid(), 4 << 20, 0))
        elif self.error:
            send(ERROR, struct.pack("<iI", -18, 0) + self.error.encode())
        elif opcode == STATUS:
            text = self.raw
            if text is None:
                status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
                text = json.dumps(status).encode()
            memory = sealed("status", text, self.seals)
            send(STATUS_IS, struct.pack("<Q", len(text)), [memory])
            os.close(memory)
        elif opcode == TRACE:
            size, records, names, text = self.trace
            memory = sealed("trace", text, self.seals)
            send(TRACE_IS, struct.pack("<QQQII", size, 0, 0, records, names), [memory])
            os.close(memory)
        elif opcode == STOP:
            self.stopped = struct.unpack_from("<I", packet, 16)[0]
            send(OK, bytes(8))


def run(wanted, *arguments, says=(), errors=()):
    done = subprocess.run([CKPTCTL, *arguments], capture_output=True, text=True, timeout=60)
    for text in says:
        assert text in done.stdout, f"{arguments}: stdout lacks {text!r}:\n{done.stdout}{done.stderr}"
    for text in errors:
        assert text in done.stderr, f"{arguments}: stderr lacks {text!r}:\n{done.stderr}"
    assert done.returncode == wanted, f"{arguments} gave {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


def status(work, **changes):
    tier = dict(name="local", level="LOCAL", kind="posix", root=work + "/near", job=None, codec="raw", bytes_written=5 << 20,
                bytes_read=0, pending_bytes=0, pending_parts=0, errors=1, last_error="tier local: \x1b[31mred", stuck_workers=0,
                capabilities=["DIRECT"], free=1 << 30, total=2 << 30)
    deep = dict(tier, name="parallel", level="GLOBAL", root=work + "/deep", job="job", last_error="", errors=0)
    session = dict(session=1, pid=77, job="job", rank=0, world=2, generation=2, resumes="1/10", set_bytes=3 << 20, shards=9,
                   last_step=20, saves=4, skipped=1, capturing=False,
                   source=dict(shared=0, private=0, push=True, push_reason="Yama forbids it"))
    return dict(version="0.1.0", pid=42, uid=os.getuid(), socket="/x/\x1b[2Jsock", config="", loop="uring", uptime_s=3700,
                pool=dict(limit=1 << 30, allocated=256 << 20, used=8 << 20, cached=0, segments=1), tiers=[tier, deep],
                sessions=[session],
                versions=[dict(job="job", generation=2, step=20, parts_captured=1, world=2,
                               levels={"CAPTURED": 1, "LOCAL": None})],
                counters=dict(saves=4, zero=0)) | changes


def pending(work, amount):
    changed = status(work, sessions=[])
    changed["tiers"][1]["pending_bytes"] = amount
    changed["tiers"][1]["pending_parts"] = amount > 0
    return changed


def main(work):
    path = work + "/sock"
    os.environ.update(CKPT_SOCKET=path, HOME=work)
    for name in ("CKPTD_CONFIG", "CKPT_DIR", "XDG_CONFIG_HOME"):
        os.environ.pop(name, None)
    os.mkdir(work + "/near")
    os.mkdir(work + "/deep")
    subprocess.run([MAKE, work + "/near", "job", "1", "10"], check=True)
    subprocess.run([MAKE, work + "/deep", "job", "2", "20"], check=True)
    subprocess.run([MAKE, work + "/deep", "other", "2", "20"], check=True)

    daemon = Daemon(path, [status(work)])
    run(0, "status", says=["ckptd 0.1.0, pid 42", "up 61 min, loop uring", "socket /x/\\x1b[2Jsock", "8.0 MiB used",
                           "\\x1b[31mred", "1/10", "rank 0 of job pushes: Yama forbids it", "2/20", "CAPTURED", "saves"])
    assert json.loads(run(0, "status", "--json"))["pool"]["segments"] == 1
    run(0, "ls", says=["job", "2/20", "local,parallel"])
    run(0, "show", "job", "1/10")
    run(3, "ls", "other", errors=['no root has a job "other"'])  # the parallel root is another job's
    run(6, "rm", "job", "2/20", errors=["still draining 2/20"])
    run(0, "rm", "job", "1/10")
    run(0, "doctor", "--root", work + "/near", says=["ckptd 0.1.0, pid 42"])
    run(0, "stop", says=["is ending, as soon as all is drained"])
    assert daemon.stopped == 0
    run(0, "stop", "--now")
    assert daemon.stopped == 1
    daemon.close()

    # What is missing in a status is empty.
    daemon = Daemon(path, [{}])
    run(0, "status", says=["ckptd ?"])
    run(3, "ls", errors=["no tier with files"])
    run(0, "drain", "--wait")
    daemon.close()
    daemon = Daemon(path, [dict(tiers=[{}, 3, None], sessions=[{}, "x"], versions=[[], {}], pool=[], counters=7)])
    run(0, "status")
    daemon.close()

    # Draining is waited for.
    daemon = Daemon(path, [pending(work, 9 << 20), pending(work, 4 << 20), pending(work, 0)])
    run(0, "drain", "--wait", says=["drained"])
    daemon.close()
    daemon = Daemon(path, [pending(work, 9 << 20)])
    run(6, "drain", says=["9.0 MiB to go"])
    run(6, "drain", "job", "--wait", "--timeout", "0.5", says=["9.0 MiB to go"])
    assert json.loads(run(6, "drain", "--json"))["pending_bytes"] == 9 << 20
    run(0, "drain", "nobody")  # nothing of that job is pending
    daemon.close()

    # Peers that answer wrongly.
    for wrong, sentence in ((dict(raw=b"[1, 2]"), "no JSON object"), (dict(raw=b'{"a":'), "no JSON object"),
                            (dict(error="stopping\x1b"), "the daemon says: stopping"), (dict(seals=0), "")):
        daemon = Daemon(path, [{}], **wrong)
        run(5, "status", errors=["ckptctl: ", sentence])
        daemon.close()
    # Traces: empty, of names that nobody uses, of sizes that do not agree, of less memory than they say.
    for trace, wanted in (((0, 0, 0, b""), 0), ((72 + 256, 1, 1, bytes(72) + b"x" * 256), 0), ((71, 1, 0, bytes(72)), 5),
                          ((72 << 30, 1 << 30, 0, bytes(72)), 5), ((512 * 256, 0, 512, bytes(512 * 256)), 5)):
        daemon = Daemon(path, [{}], trace=trace)
        text = run(wanted, "trace")
        assert wanted or json.loads(text)["traceEvents"] == []
        daemon.close()
    run(4, "trace", errors=["no daemon listens on " + path])
    run(4, "status", errors=["no daemon listens on " + path])


directory = tempfile.mkdtemp(prefix="ckptd-ckptctl.", dir=os.environ.get("TMPDIR"))
try:
    main(directory)
finally:
    shutil.rmtree(directory)
