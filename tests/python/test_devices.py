# SPDX-License-Identifier: Apache-2.0
"""Arrays in device memory, on the stand-in driver: whatever says ``__cuda_array_interface__`` or DLPack."""
import ctypes
import os
import subprocess
import sys
import tempfile
import unittest

import paths
import support
import ckptd
from ckptd import devices

if paths.HAVE_NUMPY:
    import numpy


class Driver:
    """A few calls of libcuda.so.1; device 0's primary context is current."""

    def __init__(self):
        self.library = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        self.context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), 0)
        self.call("cuCtxSetCurrent", self.context)

    def call(self, name, *arguments):
        result = getattr(self.library, name)(*arguments)
        if result:
            raise RuntimeError("%s: CUDA error %d" % (name, result))

    def end(self):
        self.call("cuDevicePrimaryCtxRelease_v2", 0)


class Array:
    """What CuPy has: a shape, a type, and memory on the device."""

    def __init__(self, driver, host):
        self.driver, self.shape, self.dtype, self.nbytes = driver, host.shape, host.dtype, host.nbytes
        self.pointer = ctypes.c_uint64()
        driver.call("cuMemAlloc_v2", ctypes.byref(self.pointer), ctypes.c_size_t(self.nbytes))
        self.set(host)

    @property
    def __cuda_array_interface__(self):
        return {"shape": self.shape, "typestr": self.dtype.str, "data": (self.pointer.value, False), "version": 3,
                "strides": None, "stream": 1}

    def set(self, host):
        host = numpy.ascontiguousarray(host)
        self.driver.call("cuMemcpyHtoD_v2", self.pointer, host.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(self.nbytes))

    def get(self):
        host = numpy.empty(self.shape, self.dtype)
        self.driver.call("cuMemcpyDtoH_v2", host.ctypes.data_as(ctypes.c_void_p), self.pointer, ctypes.c_size_t(self.nbytes))
        return host

    def free(self):
        self.driver.call("cuMemFree_v2", self.pointer)


class Exporter:
    """A DLPack producer: the bytes of an `Array` as a capsule."""

    def __init__(self, array):
        self.array = array
        self.shape = (ctypes.c_int64 * len(array.shape))(*array.shape)
        self.tensor = devices._Tensor(
            data=array.pointer.value, device_type=devices.DLPACK_CUDA, dims=len(array.shape), code=2, bits=32, lanes=1,
            shape=ctypes.cast(self.shape, ctypes.POINTER(ctypes.c_int64)),
        )

    def __dlpack_device__(self):
        return devices.DLPACK_CUDA, 0

    def __dlpack__(self, stream=None):
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self.tensor), b"dltensor", None)


def train(kind):
    """Saves arrays that change right after each fence, and restores an older and the newest version."""
    driver = Driver()
    first = Array(driver, numpy.arange(3000, dtype="f4").reshape(30, 100))
    second = Array(driver, numpy.zeros(7, dtype="f4"))
    values = {"first": first if kind == "interface" else Exporter(first), "second": second, "host": numpy.zeros(5)}
    ckpt = ckptd.Checkpointer("job", values=ckptd.fenced(values))
    for step in range(5):
        assert ckpt.fence()
        first.set(numpy.full((30, 100), step, "f4"))
        second.set(numpy.full(7, -step, "f4"))
        values["host"][:] = step
        assert ckpt.save(step)
    assert ckpt.wait("local", 4, timeout=support.PATIENCE)
    usage = ckpt.device_usage()
    assert ckpt.info.push or usage.imports == 2 and usage.contexts == 1 and usage.context_bytes > 0, usage
    with ckpt.quiet():
        pass
    ckpt.release_imports()
    for array in first, second:
        array.set(numpy.full(array.shape, 99, "f4"))
    assert ckpt.restore() == 4
    assert (first.get() == 4).all() and (second.get() == -4).all() and (values["host"] == 4).all()
    assert ckpt.restore(2) == 2
    assert (first.get() == 2).all() and (second.get() == -2).all()
    ckpt.close()
    first.free()
    second.free()
    driver.end()


@unittest.skipUnless(paths.HAVE_NUMPY, "numpy is not installed")
class OnTheDevice(support.WithDaemon):
    def setUp(self):
        directory = tempfile.TemporaryDirectory(prefix="ckptd-python-")
        self.addCleanup(directory.cleanup)
        self.mistakes = os.path.join(directory.name, "mistakes")
        os.environ["CUDA_STANDIN_DIR"] = directory.name  # the daemon's too
        self.addCleanup(os.environ.pop, "CUDA_STANDIN_DIR")
        super().setUp()

    def play(self, scene):
        """In a process of its own, which the driver looks at when it ends."""
        ended = subprocess.run(
            [sys.executable, "-c", "import test_devices; test_devices." + scene], env=self.daemon.environment(),
            capture_output=True, text=True, timeout=120,
        )
        self.assertEqual(ended.returncode, 0, ended.stderr + self.daemon.said())
        self.assertFalse(os.path.exists(self.mistakes))

    def test_cuda_array_interface(self):
        self.play("train('interface')")

    def test_dlpack(self):
        self.play("train('dlpack')")


class Streams(unittest.TestCase):
    def test_each_once_and_none_left_out(self):
        self.assertEqual(devices.streams_of([("stream", 7), ("stream", 1), ("stream", None), ("stream", 7)]), [1, 7])


if __name__ == "__main__":
    unittest.main()
