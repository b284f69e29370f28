# SPDX-License-Identifier: Apache-2.0
"""What memory an array-like value has: `Leaf`, made by `describe`.

Understood, in this order: torch tensors (and DTensors: their local shard), numpy arrays, whatever has
``__array_interface__`` or ``__cuda_array_interface__`` (CuPy, Numba, JAX), DLPack producers on the CPU (through
numpy or torch) and on CUDA devices, and writable buffers (``bytearray``, ``array.array``, ``memoryview``, ctypes arrays,
``mmap``). torch and numpy are used only where the program has imported them already.

A leaf holds its value strongly and nothing else: no buffer is exported in between, so a bytearray can still
grow.
"""
from __future__ import annotations

import ctypes
import operator
import sys
from typing import Any, Optional, Sequence

from . import binding, devices


class Leaf:
    """One array: where its elements are, and what the library is told.

    `name`; `value` (the live object); `keep` (what owns the memory); `address` of element 0; `dtype` (a code of
    `binding.DTYPES`); `shape`, and `stride` in bytes, of what is here; `form` (what to build when it is absent:
    ``torch``, ``numpy``, ``bytearray``, ``array``); `writable`; `whole` (the global tensor's shape) and `offset`
    (of this piece in it); `replica` (index, count). `fenced`: may not change from save to fence, else it is copied
    inside save; `held`: that, or the same memory is fenced under another name. `rank_local`: belongs to this rank, not to
    a tensor that all ranks share. `device`: None in host memory, else see `devices`.
    """

    __slots__ = ("name", "value", "keep", "address", "dtype", "shape", "stride", "form", "writable", "whole", "offset",
                 "replica", "fenced", "held", "rank_local", "device")

    def __init__(self, name: str, value: Any, keep: Any, address: int, dtype: int, shape: Sequence[int],
                 stride: Sequence[int], form: str, writable: bool):
        self.name = name
        self.value = value
        self.keep = keep
        self.address = address
        self.dtype = dtype
        self.shape = tuple(shape)
        self.stride = tuple(stride)
        self.form = form
        self.writable = writable
        self.whole = self.shape
        self.offset: "Optional[tuple[int, ...]]" = None
        self.replica: "Optional[tuple[int, int]]" = None
        self.fenced = False
        self.held = False
        self.rank_local = False
        self.device: "Optional[tuple[str, Any]]" = None

    def identity(self) -> "tuple[Any, ...]":
        """Equal for two leaves that are the same view of the same memory."""
        return (self.address, self.dtype, self.shape, self.stride, self.whole, self.offset, self.rank_local)

    def registration(self) -> "tuple[Any, ...]":
        """Everything that the library was told: if it is equal, nothing has to be told again."""
        return (self.name, self.identity(), self.held, self.replica)

    @property
    def nbytes(self) -> int:
        return elements(self.shape) * binding.DTYPE_SIZES[self.dtype]


def elements(shape: Sequence[int]) -> int:
    count = 1
    for extent in shape:
        count *= extent
    return count


def row_major(shape: Sequence[int], size: int) -> "tuple[int, ...]":
    """Byte strides of a row-major array without holes."""
    strides = []
    for extent in reversed(shape):
        strides.append(size)
        size *= max(1, extent)
    return tuple(reversed(strides))


class shard:
    """A piece of a global array that this rank holds: the box that begins at `offset` (one number per dimension)
    in an array of `shape`; its extent is ``array.shape``. Give it wherever an array may stand."""

    def __init__(self, array: Any, shape: Sequence[int], offset: Sequence[int]):
        self.array = array
        self.shape = tuple(int(extent) for extent in shape)
        self.offset = tuple(int(start) for start in offset)
        local = tuple(array.shape)
        if not len(local) == len(self.shape) == len(self.offset) or any(
            start < 0 or start + extent > whole for start, extent, whole in zip(self.offset, local, self.shape)
        ):
            raise ValueError("the box %r at %r does not lie in the shape %r" % (local, self.offset, self.shape))


class fenced:
    """Marks an object: its arrays do not change from save to fence, so they are not copied inside save."""

    def __init__(self, value: Any):
        self.value = value


class rank_local:
    """Marks an object: its arrays and values belong to this rank and are stored under it."""

    def __init__(self, value: Any):
        self.value = value


_NUMPY_DTYPES = {
    "b1": "bool", "u1": "u8", "i1": "i8", "i2": "i16", "u2": "u16", "f2": "f16", "i4": "i32", "u4": "u32", "f4": "f32",
    "i8": "i64", "u8": "u64", "f8": "f64", "c8": "c64", "c16": "c128",
}
NUMPY_NAMES = {name: text for text, name in _NUMPY_DTYPES.items()}
_STRUCT_DTYPES = {
    "?": "bool", "B": "u8", "c": "u8", "b": "i8", "h": "i16", "H": "u16", "e": "f16", "f": "f32", "d": "f64",
}
_STRUCT_INTEGERS = frozenset("iIlLqQnN")


def _refuse(name: str, what: str) -> "TypeError":
    return TypeError("%s: %s" % (name, what))


def describe(value: Any, name: str) -> Optional[Leaf]:
    """The leaf of an array-like value; None if it is none. TypeError: an array that cannot be stored."""
    if isinstance(value, shard):
        leaf = describe(value.array, name)
        if leaf is None:
            raise _refuse(name, "ckptd.shard() needs an array or a tensor")
        leaf.value, leaf.whole, leaf.offset = value, value.shape, value.offset
        return leaf
    if sys.modules.get("torch") is not None:
        from . import tensors

        leaf = tensors.describe(value, name)
        if leaf is not None:
            return leaf
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        return _from_interface(value, value.__array_interface__, name, "numpy")
    if isinstance(value, (bytearray, memoryview)) or type(value).__module__ in ("array", "mmap") or isinstance(
        value, ctypes.Array
    ):
        return _from_buffer(value, name)
    if numpy is not None and isinstance(value, numpy.generic):
        return None
    interface = getattr(type(value), "__array_interface__", None) and value.__array_interface__
    if isinstance(interface, dict):
        return _from_interface(value, interface, name, "numpy")
    interface = getattr(type(value), "__cuda_array_interface__", None) and value.__cuda_array_interface__
    if isinstance(interface, dict):
        leaf = _from_interface(value, interface, name, "numpy")
        leaf.device = ("stream", interface.get("stream"))
        return leaf
    if hasattr(type(value), "__dlpack__"):
        return _from_dlpack(value, name)
    return None


def _from_interface(value: Any, interface: dict, name: str, form: str) -> Leaf:
    text = interface["typestr"]
    dtype = _NUMPY_DTYPES.get(text[1:])
    if dtype is None or (text[0] == (">" if sys.byteorder == "little" else "<") and text[2:] != "1"):
        raise _refuse(
            name, "arrays of type %r cannot be stored; convert to a native number type with .astype()" % text
        )
    if hasattr(value, "filled") or interface.get("mask") is not None:
        raise _refuse(name, "masked arrays cannot be stored; give .data and .mask as two arrays")
    shape, size = interface["shape"], binding.DTYPE_SIZES[binding.DTYPES[dtype]]
    address, read_only = interface["data"]
    return Leaf(name, value, value, address, binding.DTYPES[dtype], shape,
                interface.get("strides") or row_major(shape, size), form, not read_only)


def _from_buffer(value: Any, name: str) -> Leaf:
    with memoryview(value) as view:
        if view.readonly:
            raise _refuse(name, "a read-only buffer could not be restored; give a bytearray, or bytes as a plain value")
        code = view.format.lstrip("@=<")
        if code in _STRUCT_INTEGERS:
            dtype = "%s%d" % ("i" if code.islower() else "u", view.itemsize * 8)
        else:
            dtype = _STRUCT_DTYPES.get(code, "")
        if not dtype:
            raise _refuse(name, "buffers of format %r cannot be stored; cast to a number type" % view.format)
        if not view.c_contiguous:
            raise _refuse(name, "a buffer with holes cannot be stored; use a numpy array for strided data")
        shape = view.shape or ()
        address = ctypes.addressof((ctypes.c_char * view.nbytes).from_buffer(value)) if view.nbytes else 0
        form = "array:" + code if type(value).__module__ == "array" else "bytearray"
        return Leaf(name, value, value, address, binding.DTYPES[dtype], shape, row_major(shape, view.itemsize), form, True)


def _from_dlpack(value: Any, name: str) -> Leaf:
    device = getattr(value, "__dlpack_device__", lambda: (devices.DLPACK_HOST, 0))()
    if device[0] in (devices.DLPACK_CUDA, devices.DLPACK_CUDA_MANAGED):
        return _from_device_dlpack(value, name)
    if device[0] != devices.DLPACK_HOST:
        raise _refuse(name, "memory on device %r is not supported; copy it to the CPU first" % (device,))
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None:
        view = torch.from_dlpack(value)
    elif numpy is not None:
        view = numpy.from_dlpack(value)
    else:
        raise _refuse(name, "DLPack objects need numpy or torch; import one before the checkpointer is made")
    leaf = describe(view, name)
    assert leaf is not None
    leaf.value = value
    return leaf


def _from_device_dlpack(value: Any, name: str) -> Leaf:
    try:
        keep, address, dtype, shape, strides = devices.open_dlpack(value)
    except ValueError as error:
        raise _refuse(name, "%s cannot be stored; convert it to a number type" % error) from None
    if dtype not in binding.DTYPES:
        raise _refuse(name, "elements of type %s cannot be stored; convert them to another number type" % dtype)
    size = binding.DTYPE_SIZES[binding.DTYPES[dtype]]
    stride = row_major(shape, size) if strides is None else tuple(step * size for step in strides)
    leaf = Leaf(name, value, keep, address, binding.DTYPES[dtype], shape, stride, "numpy", True)
    leaf.device = ("stream", None)
    return leaf


_value = operator.attrgetter("value")
_facts = tuple(map(operator.attrgetter, ("shape", "strides", "dtype")))


class NumpyFingerprint:
    """Pointer, shape, strides and dtype of many numpy arrays, compared without a Python loop.

    ``__array_interface__`` takes longer than all of that, so the pointer is looked at where it lies: first in the
    array's C structure, behind the object's head, as numpy's ABI has it. That this is so here, `create` makes sure of
    for each array. Whoever has a fingerprint keeps the arrays alive.
    """

    def __init__(self, values: "list[Any]", pointers: "list[Any]", addresses: "list[Optional[int]]"):
        self._pointers = pointers
        self._addresses = addresses
        self._known = [list(map(take, values)) for take in _facts]

    @classmethod
    def create(cls, values: "list[Any]", addresses: "list[int]") -> "Optional[NumpyFingerprint]":
        """None if this numpy lays its arrays out in another way."""
        if sys.implementation.name != "cpython":
            return None
        head = object.__basicsize__
        pointers = [ctypes.c_void_p.from_address(id(value) + head) for value in values]
        found = list(map(_value, pointers))
        return cls(values, pointers, found) if found == addresses else None

    def matches(self, values: "list[Any]") -> bool:
        return list(map(_value, self._pointers)) == self._addresses and all(
            all(map(operator.eq, map(take, values), known)) for take, known in zip(_facts, self._known)
        )


def create(form: str, dtype: int, shape: Sequence[int], name: str) -> Any:
    """A new, uninitialised value for a stored leaf that has no live counterpart."""
    if form == "torch":
        from . import tensors

        return tensors.create(dtype, shape)
    if form == "numpy":
        try:
            import numpy
        except ImportError:
            raise ValueError("%s: stored from a numpy array, and numpy is not installed here" % name) from None
        text = NUMPY_NAMES.get(binding.DTYPE_NAMES[dtype])
        if text is None:
            raise ValueError("%s: numpy has no dtype %s" % (name, binding.DTYPE_NAMES[dtype]))
        return numpy.empty(shape, dtype=text)
    if form.startswith("array:"):
        import array

        return array.array(form.partition(":")[2], bytes(elements(shape) * binding.DTYPE_SIZES[dtype]))
    return bytearray(elements(shape) * binding.DTYPE_SIZES[dtype])
