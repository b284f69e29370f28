# SPDX-License-Identifier: Apache-2.0
"""torch with a CUDA device, for a torch that was built without: the device is the stand-in driver's.

A tensor there has its bytes in the stand-in's memory, out of 2 MiB segments as torch's own allocator makes them, and says
`device`, `is_cuda` and `data_ptr()` like a real one. Operations are the CPU's: each copies its arguments out of the
device, and queues the copies of what it wrote on torch's current stream, for which nobody waits, so that order matters
as it does on a GPU. Autograd, modules and optimizers are torch's. What `installed` replaces is what a program or ckptd
asks of `torch.cuda`, `Module.cuda()` and `randn(device="cuda")`; a view is a copy, unless it has all the elements in
the same order.
"""
import contextlib
import ctypes
import gc
from unittest import mock

import torch
from torch.utils._pytree import tree_map

from cuda_driver import Driver

SEGMENT = 2 << 20
ALIGNMENT = 512
NON_BLOCKING = 1
CUDA = torch.device("cuda", 0)


class Block:
    """Bytes of a segment, for as long as a tensor has them."""

    def __init__(self, device, nbytes):
        self.segment, self.size = None, max(-(-nbytes // ALIGNMENT), 1) * ALIGNMENT
        self.segment, self.offset = device.take(self.size)
        self.pointer = self.segment.pointer.value + self.offset

    def __del__(self):
        if self.segment is not None:
            self.segment.free.append((self.offset, self.size))


class Segment:
    def __init__(self, driver, size):
        self.size, self.free = size, [(0, size)]
        self.pointer = ctypes.c_uint64()
        driver.call("cuMemAlloc_v2", ctypes.byref(self.pointer), ctypes.c_size_t(size))

    def take(self, size):
        merged = []
        for start, length in sorted(self.free):
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((start, length))
        self.free = merged
        for at, (start, length) in enumerate(merged):
            if length >= size:
                merged[at] = (start + size, length - size)
                return start
        return None

    def unused(self):
        return sum(length for _, length in self.free) == self.size


class Device:
    def __init__(self):
        self.driver = Driver()
        self.segments, self.observers = [], []
        self.queued, self.pinned = [], []  # (size, pinned memory): from which copies are queued, and what is free of it
        self.stream = ctypes.c_void_p()
        self.driver.call("cuStreamCreate", ctypes.byref(self.stream), NON_BLOCKING)
        self.cuda_stream = self.stream.value  # what torch.cuda.current_stream() gives has this
        self.generator_state = torch.arange(16, dtype=torch.uint8)

    def end(self):
        gc.collect()
        torch.cuda.empty_cache()
        assert not self.segments, "tensors are left on the device"
        for _, pinned in self.pinned:
            self.driver.call("cuMemFreeHost", pinned)
        self.driver.call("cuStreamDestroy_v2", self.stream)
        self.driver.end()

    # -- memory, as torch's caching allocator has it --

    def take(self, size):
        for segment in self.segments:
            offset = segment.take(size)
            if offset is not None:
                return segment, offset
        try:
            segment = Segment(self.driver, -(-size // SEGMENT) * SEGMENT)
        except RuntimeError:
            self.empty_cache_itself()
            for observer in self.observers:
                observer(0, size, 0, 0)
            raise
        self.segments.append(segment)
        return segment, segment.take(size)

    def empty_cache_itself(self):
        self.synchronize()
        for segment in [each for each in self.segments if each.unused()]:
            self.driver.call("cuMemFree_v2", segment.pointer)
            self.segments.remove(segment)

    def free_bytes(self):
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.driver.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    # -- copies --

    def synchronize(self):
        self.driver.call("cuStreamSynchronize", self.stream)
        self.pinned += self.queued
        self.queued = []

    def write(self, block, host):
        """Queued: out of pinned memory, since the driver waits for a copy out of any other."""
        size = host.numel() * host.element_size()
        if not size:
            return
        fitting = [each for each in self.pinned if each[0] == size]
        if fitting:
            self.pinned.remove(fitting[0])
            pinned = fitting[0][1]
        else:
            pinned = ctypes.c_void_p()
            self.driver.call("cuMemHostAlloc", ctypes.byref(pinned), ctypes.c_size_t(size), 0)
        self.queued.append((size, pinned))
        ctypes.memmove(pinned, host.data_ptr(), size)
        self.driver.call("cuMemcpyHtoDAsync_v2", ctypes.c_uint64(block.pointer), pinned, ctypes.c_size_t(size), self.stream)

    def read(self, tensor):
        host = torch.empty(tensor.shape, dtype=tensor.dtype)
        if host.numel():
            self.driver.call("cuMemcpyDtoHAsync_v2", ctypes.c_void_p(host.data_ptr()), ctypes.c_uint64(tensor.block.pointer),
                             ctypes.c_size_t(host.numel() * host.element_size()), self.stream)
        self.synchronize()
        return host

    def tensor(self, host, block=None):
        host = host.detach().contiguous()
        made = Tensor(self, block or Block(self, host.numel() * host.element_size()), host)
        if block is None:
            self.write(made.block, host)
        return made


class Tensor(torch.Tensor):
    @staticmethod
    def __new__(cls, device, block, like):
        return torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype)

    def __init__(self, device, block, like):
        self.on, self.block = device, block

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), keywords=None):
        if function is torch.Tensor.data_ptr:
            return arguments[0].block.pointer
        if function == torch.Tensor.device.__get__:
            return CUDA
        if function == torch.Tensor.is_cuda.__get__:
            return True
        with torch._C.DisableTorchFunction():
            return function(*arguments, **(keywords or {}))

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), keywords=None):
        if function is torch.ops.aten.detach.default:  # which is asked for in a save, and waits for nothing
            return Tensor(arguments[0].on, arguments[0].block, arguments[0])
        read = []  # pairs of a tensor on the device, and its bytes here

        def out_of(value):
            if not isinstance(value, Tensor):
                return value
            known = [host for tensor, host in read if tensor is value]
            read.append((value, known[0] if known else value.on.read(value)))
            return read[-1][1]

        given = (arguments, keywords or {})
        (local, local_keywords) = tree_map(out_of, given)
        result = function(*local, **local_keywords)
        device = read[0][0].on
        for number, argument in enumerate(function._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = arguments[number] if number < len(arguments) else keywords.get(argument.name)
                for tensor, host in read:
                    if tensor is written or isinstance(written, (list, tuple)) and any(tensor is each for each in written):
                        device.write(tensor.block, host.contiguous())

        def onto(value):
            if not isinstance(value, torch.Tensor):
                return value
            for tensor, host in read:
                if value is host:
                    return tensor
                same = value.data_ptr() == host.data_ptr() and value.numel() == host.numel() and value.is_contiguous()
                if same and value.numel():
                    return device.tensor(value, tensor.block)
            return device.tensor(value)

        return tree_map(onto, result)


def _module_to_device(device):
    def cuda(self, which=None):
        for module in self.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = torch.nn.Parameter(device.tensor(parameter), parameter.requires_grad)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = device.tensor(buffer)
        return self

    return cuda


@contextlib.contextmanager
def installed():
    """In this process, torch has a CUDA device. Gives it."""
    device = Device()
    randn = torch.randn

    def device_randn(*shape, device=None, **keywords):
        made = randn(*shape, **keywords)
        return made if device is None else the_device.tensor(made)

    the_device = device
    with contextlib.ExitStack() as stack:
        def replace(owner, name, value):
            stack.enter_context(mock.patch.object(owner, name, value, create=True))

        replace(torch, "randn", device_randn)
        replace(torch.nn.Module, "cuda", _module_to_device(device))
        replace(torch.cuda, "is_available", lambda: True)
        replace(torch.cuda, "is_initialized", lambda: True)
        replace(torch.cuda, "device_count", lambda: 1)
        replace(torch.cuda, "current_stream", lambda which=None: device)
        replace(torch.cuda, "get_rng_state_all", lambda: [device.generator_state.clone()])
        replace(torch.cuda, "set_rng_state_all", lambda states: setattr(device, "generator_state", states[0].clone()))
        replace(torch.cuda, "empty_cache", device.empty_cache_itself)
        replace(torch.cuda.memory, "empty_cache", device.empty_cache_itself)
        replace(torch._C, "_cuda_attachOutOfMemoryObserver", device.observers.append)
        yield device
        device.end()


@contextlib.contextmanager
def pretended():
    """In this process, what a program asks for on a CUDA device it gets on the CPU."""
    randn = torch.randn
    with mock.patch.object(torch, "randn", lambda *shape, device=None: randn(*shape)), mock.patch.object(
        torch.nn.Module, "cuda", lambda self: self
    ), mock.patch.object(torch.cuda, "is_available", lambda: True):
        yield
