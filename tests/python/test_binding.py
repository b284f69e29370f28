# SPDX-License-Identifier: Apache-2.0
"""The structures and constants of ckptd.binding against ckpt.h, by asking the C compiler."""
import ctypes
import os
import pathlib
import shutil
import subprocess
import tempfile
import threading
import time
import unittest
from unittest import mock

import paths
import ckptd
from ckptd import binding

STRUCTURES = {
    "ckpt_open_options": binding.OpenOptions, "ckpt_info": binding.Info, "ckpt_shard": binding.Shard,
    "ckpt_save_options": binding.SaveOptions, "ckpt_durable": binding.Durable, "ckpt_version_entry": binding.VersionEntry,
    "ckpt_restore_options": binding.RestoreOptions, "ckpt_restore_info": binding.RestoreInfo,
    "ckpt_tensor": binding.TensorEntry, "ckpt_read": binding.Read,
}
CONSTANTS = {
    "CKPT_" + name: getattr(binding, name)
    for name in """OK SKIPPED ALREADY NONE PENDING E_INVALID E_MEMORY E_UNREACHABLE E_TIMEOUT E_PROTOCOL E_VERSION E_LIMIT
    E_DENIED E_HELD E_IO E_DAMAGED E_NOT_FOUND E_EXISTS E_BUG E_FORKED E_LOST E_CONFLICT E_STOPPING E_MISMATCH CAPTURED
    LOCAL PARTNER GLOBAL RANK_LOCAL EAGER PART VERSION RESTORE_LATEST RESTORE_STEP RESTORE_EXACT""".split()
}
CONSTANTS.update({"CKPT_" + name.upper(): code for name, code in binding.DTYPES.items()})


class Header(unittest.TestCase):
    @unittest.skipUnless(shutil.which("cc"), "no C compiler")
    def test_layouts_and_constants(self):
        lines, expected = [], []
        for name, structure in STRUCTURES.items():
            lines.append('printf("%%zu\\n", sizeof(struct %s));' % name)
            expected.append(ctypes.sizeof(structure))
            for field, _ in structure._fields_:
                lines.append('printf("%%zu\\n", offsetof(struct %s, %s));' % (name, field))
                expected.append(getattr(structure, field).offset)
        for name, value in CONSTANTS.items():
            lines.append('printf("%%d\\n", (int)%s);' % name)
            expected.append(value)
        with tempfile.TemporaryDirectory() as directory:
            source = pathlib.Path(directory, "layout.c")
            source.write_text('#include "ckpt.h"\n#include <stdio.h>\nint main(void) {\n%s\n}\n' % "\n".join(lines))
            program = source.with_suffix("")
            subprocess.run(["cc", "-I", paths.ROOT / "client", "-o", program, source], check=True)
            printed = subprocess.run([program], check=True, capture_output=True, text=True).stdout.split()
        for line, found, wanted in zip(lines, printed, expected):
            self.assertEqual(int(found), wanted, line)
        self.assertEqual(len(printed), len(expected))


class Finding(unittest.TestCase):
    def test_a_missing_library_is_one_sentence(self):
        with mock.patch.dict(os.environ, {"CKPT_LIBRARY": "/nowhere/libckpt.so.0"}):
            with self.assertRaisesRegex(ImportError, "CKPT_LIBRARY.*Tried: /nowhere/libckpt.so.0"):
                ckptd.Checkpointer("job", a=1)

    def test_search_order(self):
        with mock.patch.dict(os.environ):
            os.environ.pop("CKPT_LIBRARY", None)
            self.assertEqual(binding.candidates()[-1], "libckpt.so.0")
        with tempfile.TemporaryDirectory() as prefix:
            package = pathlib.Path(prefix, "lib", "python3", "site-packages", "ckptd", "binding.py")
            library = pathlib.Path(prefix, "lib", "x86_64-linux-gnu", "libckpt.so.0")
            for path in (package, library):
                path.parent.mkdir(parents=True)
                path.touch()
            with mock.patch.dict(os.environ), mock.patch.object(binding, "__file__", str(package)):
                os.environ.pop("CKPT_LIBRARY", None)
                self.assertEqual(binding.candidates()[0], str(library.resolve()))


class Interrupts(unittest.TestCase):
    """`Handle._slowly` with something else than the library behind it."""

    def test_an_interrupted_call_is_waited_for_by_the_next(self):
        handle = object.__new__(binding.Handle)
        handle._left, handle._pointer = None, ctypes.c_void_p(1)
        go, order = threading.Event(), []

        def call():
            go.wait(10)
            order.append("call")

        with mock.patch.object(binding._Call, "wait", side_effect=KeyboardInterrupt):
            with self.assertRaises(KeyboardInterrupt):
                handle._slowly(call)
        threading.Timer(0.05, go.set).start()
        handle._ready()
        order.append("next")
        self.assertEqual(order, ["call", "next"])

    def test_a_call_that_found_no_thread_is_not_waited_for(self):
        handle = object.__new__(binding.Handle)
        handle._left, handle._pointer = None, ctypes.c_void_p(1)
        with mock.patch("threading._start_new_thread", side_effect=RuntimeError("can't start new thread")):
            with self.assertRaisesRegex(RuntimeError, "new thread"):
                handle._slowly(lambda: None)
        self.assertIsNone(handle._left)
        self.assertEqual(handle._slowly(lambda: 7), 7)

    def test_errors_and_values_come_through(self):
        handle = object.__new__(binding.Handle)
        handle._left = None
        self.assertEqual(handle._slowly(lambda: 5), 5)
        with self.assertRaises(ZeroDivisionError):
            handle._slowly(lambda: 1 / 0)

    def test_a_signal_ends_the_waiting_at_once(self):
        """And only the waiting: the call goes on, and the next one comes after it."""
        import signal

        handle = object.__new__(binding.Handle)
        handle._left, handle._pointer = None, ctypes.c_void_p(1)
        release, order = threading.Event(), []
        self.addCleanup(release.set)

        def call():
            release.wait(30)
            order.append("call")

        main = threading.main_thread().ident
        threading.Timer(0.05, lambda: signal.pthread_kill(main, signal.SIGINT)).start()
        begin = time.monotonic()
        with self.assertRaises(KeyboardInterrupt):
            handle._slowly(call)
        self.assertLess(time.monotonic() - begin, 5)
        threading.Timer(0.2, release.set).start()
        handle._ready()
        order.append("next")
        self.assertEqual(order, ["call", "next"])


if __name__ == "__main__":
    unittest.main()
