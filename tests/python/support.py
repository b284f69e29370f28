# SPDX-License-Identifier: Apache-2.0
"""A real daemon of one test's own: private socket, tiers and log in a temporary directory.

CKPTD_PROGRAM and CKPT_LIBRARY name the built daemon and library; without them the tests skip.
"""
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest

import paths  # noqa: F401  (finds the package)

# Taken out of the environment, because the library would start a daemon of its own with it.
PROGRAM = os.environ.pop("CKPTD_PROGRAM", None)
LIBRARY = os.environ.get("CKPT_LIBRARY")
PATIENCE = 30.0

CONFIGURATION = """\
[daemon]
log_level = debug
[pool]
size = {pool}
[tier local]
role = local
path = {directory}/local
{local}
[tier parallel]
role = parallel
path = {directory}/parallel
keep = 100
{parallel}
"""


class Daemon:
    """Started at once; `stop` asserts that it ends by itself and leaves nothing behind."""

    def __init__(self, pool="256M", local="keep = 100", parallel=""):
        self.directory = pathlib.Path(tempfile.mkdtemp(prefix="ckptd-python-"))
        self.socket = self.directory / "sock"
        self.log = self.directory / "log"
        self.configuration = self.directory / "ckptd.conf"
        for name in ("local", "parallel"):
            (self.directory / name).mkdir()
        self.configuration.write_text(
            CONFIGURATION.format(directory=self.directory, pool=pool, local=local, parallel=parallel)
        )
        self.process = None
        self.start()

    def start(self):
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [PROGRAM, "--config", self.configuration, "--socket", self.socket], stdin=subprocess.DEVNULL,
                stdout=log, stderr=log, start_new_session=True,
            )
        end = time.monotonic() + PATIENCE
        while True:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
                try:
                    probe.connect(str(self.socket))
                    return
                except OSError:
                    pass
            if self.process.poll() is not None or time.monotonic() > end:
                raise AssertionError("the daemon did not start:\n" + self.said())
            time.sleep(0.005)

    def kill(self):
        self.process.kill()
        self.process.wait(PATIENCE)

    def said(self):
        return self.log.read_text(errors="replace")

    def stop(self):
        try:
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGTERM)
                code = self.process.wait(PATIENCE)
                assert code == 0, "the daemon ended with %d:\n%s" % (code, self.said())
                left = {path.name for path in self.directory.iterdir()} - {"log", "ckptd.conf", "local", "parallel"}
                assert left <= {"sock.lock"}, "left behind: %s" % sorted(left)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError("the daemon did not stop:\n" + self.said()[-4000:]) from None
        finally:
            shutil.rmtree(self.directory, ignore_errors=True)

    def environment(self):
        """For programs that are to use it."""
        return dict(os.environ, CKPT_SOCKET=str(self.socket), PYTHONPATH=os.pathsep.join(sys.path[:1] + [here()]))


def here():
    return str(pathlib.Path(__file__).resolve().parent)


@unittest.skipUnless(PROGRAM and LIBRARY, "CKPTD_PROGRAM and CKPT_LIBRARY name no built daemon and library")
class WithDaemon(unittest.TestCase):
    """Each test has its own daemon, `self.daemon`, and jobs of its own."""

    options = {}

    def setUp(self):
        self.daemon = Daemon(**self.options)
        self.addCleanup(self.daemon.stop)

    def open(self, job="job", **objects):
        import ckptd

        ckpt = ckptd.Checkpointer(job, socket=self.daemon.socket, **objects)
        self.addCleanup(ckpt.close)
        return ckpt
