# SPDX-License-Identifier: Apache-2.0
"""Arrays in GPU memory: on which streams work on them is queued, and giving memory back to the driver.

A leaf in device memory has a `device`: ``("torch", index)``, whose stream is torch's current one on that device,
or ``("stream", pointer)``, the stream that the array itself names (None: it names none, the default stream counts).
Nothing here calls the driver.
"""
from __future__ import annotations

import ctypes
import sys
import weakref
from typing import Any, Callable, Iterable, Optional

#: DLPack's numbers of device types.
DLPACK_HOST, DLPACK_CUDA, DLPACK_CUDA_MANAGED = 1, 2, 13

Device = "tuple[str, Any]"


def stream_of(device: "Device") -> Optional[int]:
    """The CUDA stream (as a number) behind which the device's memory is to be read or written; None: none is known."""
    kind, which = device
    if kind == "torch":
        return int(sys.modules["torch"].cuda.current_stream(which).cuda_stream)
    return None if which is None else int(which)


def streams_of(devices: "Iterable[Device]") -> "list[int]":
    """The distinct streams of several, in a fixed order."""
    found = {stream_of(device) for device in set(devices)}
    return sorted(stream for stream in found if stream is not None)


# -- DLPack without numpy or torch: the structures of dlpack.h, version 0.8 --


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32), ("dims", ctypes.c_int32),
        ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_DLPACK_NAMES = {0: "i", 1: "u", 2: "f", 4: "bf", 5: "c", 6: "bool"}


def open_dlpack(value: Any) -> "tuple[Any, int, str, tuple[int, ...], Optional[tuple[int, ...]]]":
    """(what keeps the memory, address, dtype's name, shape, strides in elements or None) of a DLPack producer.
    ValueError: an element type that DLPack has and ckptd has not."""
    capsule = value.__dlpack__(stream=-1)
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    tensor = _Tensor.from_address(get(capsule, b"dltensor"))
    name = _DLPACK_NAMES.get(tensor.code)
    if name is None or tensor.lanes != 1:
        raise ValueError("elements of DLPack's type code %d, %d lanes" % (tensor.code, tensor.lanes))
    dtype = name if name == "bool" else "%s%d" % (name, tensor.bits)
    shape = tuple(tensor.shape[: tensor.dims])
    strides = tuple(tensor.strides[: tensor.dims]) if tensor.strides else None
    return (value, capsule), (tensor.data or 0) + tensor.byte_offset, dtype, shape, strides


# -- giving memory back --

_watchers: "weakref.WeakSet[Any]" = weakref.WeakSet()
_hooked = False


def watch(release: "Callable[[], Any]") -> "Callable[[], None]":
    """From now on `release` (a bound method, held weakly) is called before torch gives cached memory back to the driver
    (``torch.cuda.empty_cache()``) and when it runs out of memory, if this torch tells of that. Returns what undoes it."""
    watcher = _Watcher(release)
    _watchers.add(watcher)
    setattr(release.__self__, "_device_watcher", watcher)  # which lives as long as its owner
    _hook()
    return lambda: _watchers.discard(watcher)


class _Watcher:
    def __init__(self, release: "Callable[[], Any]"):
        self.release = weakref.WeakMethod(release)


def _release_all(*_: Any) -> None:
    for watcher in list(_watchers):
        release = watcher.release()
        if release is not None:
            release()


def _hook() -> None:
    global _hooked
    if _hooked:
        return
    _hooked = True
    torch = sys.modules["torch"]
    original = torch.cuda.empty_cache

    def empty_cache() -> None:
        _release_all()
        original()

    empty_cache.__doc__ = original.__doc__
    torch.cuda.empty_cache = empty_cache
    if hasattr(torch.cuda, "memory"):
        torch.cuda.memory.empty_cache = empty_cache
    attach = getattr(torch._C, "_cuda_attachOutOfMemoryObserver", None)
    if attach is not None:
        attach(_release_all)
