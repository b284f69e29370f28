#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The systemd units: units.py UNITS CKPTD CKPTCTL CLIENT

systemd itself reads them (where its tools are): they are valid, and their exposure stays what
docs/security.md says. And the daemon works under what is most likely to break it: as a user without
any privilege and under the unit's filter of system calls, with both event loops, reading the memory
of a client.
"""

import ctypes
import json
import os
import pathlib
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unittest

UNITS, CKPTD, CKPTCTL, CLIENT = (os.path.abspath(argument) for argument in sys.argv[1:5])
SYSTEM, USER = ("ckptd@.service", 12), ("ckptd.service", 60)  # and the exposure, in tenths, that they may have
PATIENCE_S = 60
OTHER_UID = 12345

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
SECCOMP_RET_ALLOW, SECCOMP_RET_EPERM = 0x7FFF0000, 0x00050001
BPF_LOAD, BPF_JUMP_EQUAL, BPF_RETURN = 0x20, 0x15, 0x06


def needs_systemd(test):
    return unittest.skipUnless(shutil.which("systemd-analyze"), "systemd-analyze is not there")(test)


def lines_of(unit, key):
    text = pathlib.Path(UNITS, unit).read_text()
    return re.findall(rf"^{key}=(.*)$", text, re.MULTILINE)


def expand(name):
    """The system calls of a group, as this systemd knows them."""
    if not name.startswith("@"):
        return {name}
    run = subprocess.run(["systemd-analyze", "syscall-filter", "--no-pager", name], capture_output=True, text=True, check=True)
    words = [line.strip() for line in run.stdout.splitlines()[1:]]
    return set().union(*(expand(word) for word in words if word and not word.startswith("#")))


def allowed_calls(unit):
    allowed = set()
    for line in lines_of(unit, "SystemCallFilter"):
        denies, words = line.startswith("~"), line.lstrip("~").split()
        calls = set().union(*map(expand, words))
        allowed = allowed - calls if denies else allowed | calls
    return allowed


def numbers():
    """{system call: number} of this machine, as its C headers say."""
    text = subprocess.run(["cc", "-E", "-dM", "-include", "sys/syscall.h", "-x", "c", "/dev/null"], capture_output=True, text=True, check=True)
    return {name: int(number) for name, number in re.findall(r"^#define __NR_(\w+) (\d+)$", text.stdout, re.MULTILINE)}


def filter_program(allowed):
    program = [(BPF_LOAD, 0, 0, 0)]  # offset 0 of struct seccomp_data: the number
    for number in sorted(allowed):
        program += [(BPF_JUMP_EQUAL, 0, 1, number), (BPF_RETURN, 0, 0, SECCOMP_RET_ALLOW)]
    program.append((BPF_RETURN, 0, 0, SECCOMP_RET_EPERM))
    return b"".join(struct.pack("HBBI", *instruction) for instruction in program)


class Units(unittest.TestCase):
    @needs_systemd
    def test_systemd_understands_them(self):
        with tempfile.TemporaryDirectory() as directory:
            for unit in pathlib.Path(UNITS).glob("*.service"):
                text = re.sub("^ExecStart=.*$", f"ExecStart={CKPTD}", unit.read_text(), flags=re.MULTILINE)
                pathlib.Path(directory, unit.name).write_text(text)
            source = pathlib.Path(__file__).resolve().parents[2] / "systemd"
            for socket in [*source.glob("*.socket"), *source.glob("user/*.socket")]:
                shutil.copy(socket, directory)
            for unit in ("ckptd@root.service", "ckptd@root.socket", "ckptd.service", "ckptd.socket"):
                run = subprocess.run(["systemd-analyze", "verify", "--man=no", f"{directory}/{unit}"], capture_output=True, text=True)
                self.assertEqual([line for line in run.stderr.splitlines() if "ckptd" in line], [])

    @needs_systemd
    def test_exposure_is_as_documented(self):
        for unit, tenths in (SYSTEM, USER):
            run = subprocess.run(["systemd-analyze", "security", "--offline=true", "--no-pager", f"--threshold={tenths}", f"{UNITS}/{unit}"],
                                 capture_output=True, text=True)
            if "unrecognized option" in run.stderr:
                self.skipTest("this systemd cannot look at units offline")
            self.assertEqual(run.returncode, 0, run.stdout[-200:] + run.stderr)

    def test_every_hardening_line_has_its_reason(self):
        for unit, _ in (SYSTEM, USER):
            explained = False
            service = pathlib.Path(UNITS, unit).read_text().split("[Service]")[1].split("[Install]")[0]
            for line in service.splitlines():
                hardens = re.match("(Capability|Ambient|NoNew|Restrict|IPAddress|Protect|Private|Lock|SystemCall|UMask|RemoveIPC|ProcSubset|Limit|OOM)", line)
                explained = line.startswith("#") or (explained and bool(line))
                self.assertTrue(explained or not hardens, f"{unit}: {line} has no comment above it")


@needs_systemd
@unittest.skipIf({"ASAN_OPTIONS", "TSAN_OPTIONS"} & set(os.environ), "sanitizers make system calls of their own")
class Hardened(unittest.TestCase):
    def setUp(self):
        self.directory = tempfile.mkdtemp(prefix="ckptd-units-")
        self.addCleanup(shutil.rmtree, self.directory)
        path = pathlib.Path(self.directory)
        (path / "conf").write_text(f"[pool]\nsize = 64M\n[tier near]\nrole = local\npath = {path}/near\n")
        (path / "run").mkdir(mode=0o700)
        self.environment = {"PATH": os.environ["PATH"], "CKPT_SOCKET": f"{path}/run/sock", "CKPT_RUN_ID": "units"}
        self.environment.update({key: value for key, value in os.environ.items() if key.startswith(("LD_", "GCOV_"))})
        if os.geteuid() == 0:
            for file in (path, path / "run", path / "conf"):
                os.chown(file, OTHER_UID, OTHER_UID)

    def start(self, arguments, program=None, **options):
        library = ctypes.CDLL(None, use_errno=True)

        def prepare():
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(OTHER_UID)
                os.setuid(OTHER_UID)
            if program is None:
                return
            buffer = ctypes.create_string_buffer(program, len(program))
            fprog = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
            if library.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or library.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, fprog, 0, 0):
                raise OSError(ctypes.get_errno(), "prctl")

        return subprocess.Popen(arguments, env=self.environment, preexec_fn=prepare, text=True, **options)

    def answers(self, daemon):
        deadline = time.monotonic() + PATIENCE_S
        while daemon.poll() is None and time.monotonic() < deadline:
            run = self.start([CKPTCTL, "status", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            text, _ = run.communicate(timeout=PATIENCE_S)
            if run.returncode == 0:
                return json.loads(text)
        return None

    def work(self, loop, program):
        """What the status says after a client has saved, or None: the daemon does not start."""
        with open(f"{self.directory}/log", "w") as log:
            daemon = self.start([CKPTD, "--config", f"{self.directory}/conf", "--loop", loop], program, stderr=log)
        try:
            if not self.answers(daemon):
                return None
            client = self.start([CLIENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self.assertEqual(client.stdout.readline(), "saved\n")
            status = self.answers(daemon)
            client.communicate(timeout=PATIENCE_S)
            self.assertEqual(client.returncode, 0)
            return status
        finally:
            daemon.send_signal(signal.SIGTERM)
            daemon.wait(timeout=PATIENCE_S)

    def test_it_works_under_the_filter_of_system_calls(self):
        known, allowed = numbers(), allowed_calls(SYSTEM[0])
        self.assertIn("process_vm_readv", allowed)
        program = filter_program({known[name] for name in allowed if name in known})
        for loop in ("uring", "posix"):
            with self.subTest(loop):
                free = self.work(loop, None)
                if free is None:
                    self.skipTest(f"there is no loop {loop} here: " + pathlib.Path(self.directory, "log").read_text())
                shutil.rmtree(f"{self.directory}/near")
                filtered = self.work(loop, program)
                log = pathlib.Path(self.directory, "log").read_text()
                self.assertIsNotNone(filtered, log)
                shutil.rmtree(f"{self.directory}/near")
                self.assertEqual(filtered["counters"]["saves_accepted"], 3)
                for key in ("private", "push"):
                    self.assertEqual(filtered["sessions"][0]["source"][key], free["sessions"][0]["source"][key])
                self.assertNotIn("not permitted", log)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
