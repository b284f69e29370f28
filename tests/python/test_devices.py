# SPDX-License-Identifier: Apache-2.0
"""Arrays in device memory, on the stand-in driver: whatever says ``__cuda_array_interface__`` or DLPack."""
import ctypes
import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
import unittest

import paths
import support
import ckptd
from ckptd import devices
from cuda_driver import Driver

if paths.HAVE_NUMPY:
    import numpy


LEGACY, PER_THREAD = 1, 2  # CU_STREAM_...


class Array:
    """What CuPy has: a shape, a type, memory on the device, and the stream on which work on it is queued."""

    def __init__(self, driver, host, stream=LEGACY):
        self.stream, self.driver, self.shape, self.dtype, self.nbytes = stream, driver, host.shape, host.dtype, host.nbytes
        self.pointer = ctypes.c_uint64()
        driver.call("cuMemAlloc_v2", ctypes.byref(self.pointer), ctypes.c_size_t(self.nbytes))
        self.set(host)

    @property
    def __cuda_array_interface__(self):
        return {"shape": self.shape, "typestr": self.dtype.str, "data": (self.pointer.value, False), "version": 3,
                "strides": None, "stream": self.stream}

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


def save_behind_the_threads_stream():
    """The stream of each thread: calls that may take long are not made in another one then."""
    driver = Driver()
    array = Array(driver, numpy.zeros(1000, dtype="f4"), PER_THREAD)
    pinned = ctypes.c_void_p()
    driver.call("cuMemHostAlloc", ctypes.byref(pinned), ctypes.c_size_t(array.nbytes), 0)
    ckpt = ckptd.Checkpointer("job", values=ckptd.fenced({"x": array}))
    assert ckpt.save(0) and ckpt.fence()

    def queue(value):
        host = numpy.full(1000, value, "f4")
        ctypes.memmove(pinned, host.ctypes.data, array.nbytes)
        for _ in range(10):
            driver.call("cuMemcpyHtoDAsync_v2", array.pointer, pinned, ctypes.c_size_t(array.nbytes),
                        ctypes.c_void_p(PER_THREAD))

    queue(7)
    assert ckpt.save(1, urgent=True)
    assert ckpt.fence()
    queue(8)
    assert ckpt.wait("local", 1, timeout=support.PATIENCE)
    assert ckpt.restore() == 1
    assert (array.get() == 7).all(), array.get()
    ckpt.close()
    driver.call("cuMemFreeHost", pinned)
    array.free()
    driver.end()


# -- torch --


def example(where, job, steps):
    """examples/gpu/gpu.py, as it is."""
    import cuda_torch

    sys.argv = ["gpu.py", job, str(steps)]
    with getattr(cuda_torch, where)():
        runpy.run_path(str(paths.ROOT / "examples" / "gpu" / "gpu.py"), run_name="__main__")


def on_device(scene):
    import cuda_torch

    with cuda_torch.installed() as device:
        scene(device)


def save_behind_what_is_queued(device):
    """The driver is slow: what is queued on torch's current stream comes long after the calls of save and restore."""
    import torch

    x = device.tensor(torch.zeros(1000))
    values = {"x": x}
    ckpt = ckptd.Checkpointer("job", values=ckptd.fenced(values))
    assert ckpt.save(0) and ckpt.fence()  # everything is known; the next save has only to be ordered

    def queue(value):
        for _ in range(10):
            device.write(x.block, torch.full((1000,), value))
        device.generator_state.fill_(value)

    queue(7.0)
    assert ckpt.save(1)
    assert ckpt.fence()
    assert not ckpt.info.push
    queue(8.0)
    assert ckpt.wait("local", 1, timeout=support.PATIENCE)
    assert ckpt.restore() == 1
    assert values["x"] is x and (device.read(x) == 7).all(), device.read(x)
    assert (device.generator_state == 7).all()
    ckpt.close()


def empty_the_cache(device):
    """What the daemon has open is closed before torch gives it back to the driver, which would take it for a mistake."""
    import torch

    x, y = device.tensor(torch.full((1 << 19,), 1.0)), device.tensor(torch.full((1000,), 1.0))
    ckpt = ckptd.Checkpointer("job", values=ckptd.fenced({"x": x, "y": y}))
    for step, empty_cache in enumerate((torch.cuda.empty_cache, torch.cuda.memory.empty_cache), 1):
        x.fill_(step)
        assert ckpt.save(step) and ckpt.fence()
        assert ckpt.device_usage().imports == 2
        x.block = device.tensor(torch.full((1 << 19,), 9.0)).block  # as x.data = ... does: the old one is in the cache
        assert len(device.segments) == 3
        empty_cache()
        assert len(device.segments) == 2
    assert ckpt.save(3) and ckpt.fence()
    x.fill_(8)
    for step, value in (2, 2), (3, 9):
        assert ckpt.wait("local", step, timeout=support.PATIENCE)
        assert ckpt.restore(step) == step
        assert (device.read(x) == value).all() and (device.read(y) == 1).all()
    ckpt.close()


def run_out_of_memory(device):
    """When torch says that there is no memory, the daemon gives back what it takes, and opens it again for the next save."""
    import torch

    x = device.tensor(torch.full((1 << 19,), 1.0))
    ckpt = ckptd.Checkpointer("job", values=ckptd.fenced({"x": x}))
    assert ckpt.save(1) and ckpt.fence()
    free = device.free_bytes()
    try:
        device.tensor(torch.empty(1 << 30, dtype=torch.uint8))
    except RuntimeError as error:
        assert "CUDA error 2" in str(error), error
    else:
        raise AssertionError("there is room for a GiB")
    assert device.free_bytes() == free + (16 << 20), (free, device.free_bytes())  # its context
    x.fill_(2)
    assert ckpt.save(2) and ckpt.fence()
    assert device.free_bytes() == free
    assert ckpt.wait("local", 2, timeout=support.PATIENCE)
    x.fill_(3)
    assert ckpt.restore() == 2
    assert (device.read(x) == 2).all()
    ckpt.close()


class WithDriver(support.WithDaemon):
    def setUp(self):
        directory = tempfile.TemporaryDirectory(prefix="ckptd-python-")
        self.addCleanup(directory.cleanup)
        self.mistakes = os.path.join(directory.name, "mistakes")
        os.environ["CUDA_STANDIN_DIR"] = directory.name  # the daemon's too
        self.addCleanup(os.environ.pop, "CUDA_STANDIN_DIR")
        super().setUp()

    def play(self, scene, **settings):
        """In a process of its own, which the driver looks at when it ends. Gives what it printed."""
        for name, value in settings.items():
            settings[name] = str(value)
        ended = subprocess.run(
            [sys.executable, "-c", "import test_devices; test_devices." + scene],
            env=dict(self.daemon.environment(), **settings), capture_output=True, text=True, timeout=120,
        )
        self.assertEqual(ended.returncode, 0, ended.stderr + self.daemon.said())
        self.assertFalse(os.path.exists(self.mistakes))
        return ended.stdout


@paths.needs_numpy
class Arrays(WithDriver):
    def test_cuda_array_interface(self):
        self.play("train('interface')")

    def test_dlpack(self):
        self.play("train('dlpack')")

    def test_stream_of_the_thread(self):
        self.play("save_behind_the_threads_stream()", CUDA_STANDIN_DELAY_US=50000)


@paths.needs_torch
class Torch(WithDriver):
    def test_stream(self):
        self.play("on_device(test_devices.save_behind_what_is_queued)", CUDA_STANDIN_DELAY_US=50000)

    def test_empty_cache(self):
        self.play("on_device(test_devices.empty_the_cache)")

    def test_out_of_memory(self):
        self.play("on_device(test_devices.run_out_of_memory)")


@paths.needs_torch
class Example(WithDriver):
    # Captures last long enough for a step that does not wait for them to spoil them; and every version is kept.
    options = {"pool": "256M\nchunk_size = 256K", "local": "keep = 100\nbacklog = 100",
               "parallel": "[device]\npiece = 256K\nrate_mib_s = 1"}

    def tensors(self, job, generation, step):
        """Of the file, once it is committed: the bytes by name."""
        version = self.daemon.directory / "local" / job / str(generation) / str(step)
        end = time.monotonic() + support.PATIENCE
        while not (version / "rank-00000.json").exists() and time.monotonic() < end:
            time.sleep(0.01)
        data = (version / "rank-00000.safetensors").read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:start])
        return {
            name: data[start + tensor["data_offsets"][0] : start + tensor["data_offsets"][1]]
            for name, tensor in header.items() if name != "__metadata__" and name.startswith(("model/", "optimizer/"))
        }

    def test_example(self):
        """It trains to the same bytes as on the CPU, and goes on where it was."""
        expected = self.play("example('pretended', 'host', 7)")
        begun = self.play("example('installed', 'device', 4)")
        resumed = self.play("example('installed', 'device', 7)")
        self.assertIn("a fresh start", begun)
        self.assertIn("resumed from step 3", resumed)
        self.assertIn("the daemon takes 16 MiB of device memory", resumed)
        self.assertEqual(expected.splitlines()[-1], resumed.splitlines()[-1])
        self.assertNotIn("must push", self.daemon.said())
        for step in range(7):
            host, device = self.tensors("host", 1, step), self.tensors("device", 1 if step < 4 else 2, step)
            self.assertEqual(set(host), set(device))
            self.assertGreater(len(host), 8)
            for name in host:
                self.assertEqual(host[name], device[name], "%s of step %d" % (name, step))


class Streams(unittest.TestCase):
    def test_each_once_and_none_left_out(self):
        self.assertEqual(devices.streams_of([("stream", 7), ("stream", 1), ("stream", None), ("stream", 7)]), [1, 7])


if __name__ == "__main__":
    unittest.main()
