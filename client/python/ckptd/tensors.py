# SPDX-License-Identifier: Apache-2.0
"""torch tensors as leaves. Imported only when torch is."""
from __future__ import annotations

import operator
from typing import Any, Callable, Iterable, Optional, Sequence

import torch

from . import binding
from .arrays import Leaf, elements

_NAMES = {
    "bool": "bool", "uint8": "u8", "int8": "i8", "float8_e5m2": "f8_e5m2", "float8_e4m3fn": "f8_e4m3", "int16": "i16",
    "uint16": "u16", "float16": "f16", "bfloat16": "bf16", "int32": "i32", "uint32": "u32", "float32": "f32",
    "int64": "i64", "uint64": "u64", "float64": "f64", "complex64": "c64", "complex128": "c128",
}
_CODES = {getattr(torch, name): binding.DTYPES[code] for name, code in _NAMES.items() if hasattr(torch, name)}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}


def _refuse(name: str, what: str) -> TypeError:
    return TypeError("%s: %s" % (name, what))


def describe(value: Any, name: str) -> Optional[Leaf]:
    """The leaf of a tensor; None if `value` is none. TypeError: a tensor that cannot be stored, and why."""
    if not isinstance(value, torch.Tensor):
        return None
    if _is_dtensor(value):
        return _describe_dtensor(value, name)
    lazy = getattr(torch.nn.parameter, "UninitializedTensorMixin", ())
    if isinstance(value, lazy):
        raise _refuse(name, "not initialised yet; run one forward pass before the checkpointer is made")
    if value.device.type == "meta":
        raise _refuse(name, "a meta tensor has no data; materialise it first (to_empty())")
    if value.is_quantized:
        raise _refuse(name, "quantized tensors (%s) are not supported; store int_repr() and the scales" % value.dtype)
    if value.layout is not torch.strided:
        raise _refuse(
            name, "sparse tensors (%s) are not supported; store its indices and values, or .to_dense()" % value.layout
        )
    if value.device.type not in ("cpu", "cuda"):
        raise _refuse(name, "tensors on device %s are not supported; ckptd takes those on the CPU and on CUDA devices"
                      % value.device)
    code = _CODES.get(value.dtype)
    if code is None:
        raise _refuse(name, "tensors of %s are not supported; convert or .view() them as another dtype" % value.dtype)
    if value.is_conj() or value.is_neg():
        raise _refuse(name, "a lazily conjugated or negated view; call .resolve_conj() or .resolve_neg() first")
    try:
        address = value.data_ptr()
    except RuntimeError:
        address = 0
    if address == 0 and value.numel() > 0:
        raise _refuse(
            name, "%s has no storage of its own; store the plain tensors inside it" % type(value).__qualname__
        )
    size = binding.DTYPE_SIZES[code]
    stride = [step * size for step in value.stride()]
    leaf = Leaf(name, value, value, address, code, value.shape, stride, "torch", True)
    if value.device.type == "cuda":
        leaf.device = ("torch", value.device.index)
    return leaf


def create(dtype: int, shape: Sequence[int], like: Any = None) -> Any:
    """An uninitialised CPU tensor; laid out (and sharded) like the tensor `like` where the shape is the same."""
    if dtype not in _DTYPES:
        raise ValueError("this torch has no dtype %s; a newer one is needed" % binding.DTYPE_NAMES[dtype])
    if like is not None and tuple(like.shape) == tuple(shape):
        with torch.no_grad():
            return torch.empty_like(like.detach(), dtype=_DTYPES[dtype])
    return torch.empty(tuple(shape), dtype=_DTYPES[dtype])


def convert_into(leaf: Leaf, source: Any) -> None:
    """Copies the tensor `source` into the leaf's memory, converting the element type."""
    target = leaf.value
    if not isinstance(target, torch.Tensor):
        target = torch.from_dlpack(target) if hasattr(target, "__dlpack__") else torch.as_tensor(target)
    with torch.no_grad():
        (target.to_local() if _is_dtensor(target) else target.detach()).copy_(source)


# -- noticing changes cheaply --

_data_pointer = torch.Tensor.data_ptr
_stride = torch.Tensor.stride
_shape = operator.attrgetter("shape")
_dtype = operator.attrgetter("dtype")


class Fingerprint:
    """Pointer, shape, stride and dtype of many plain tensors, compared without a Python loop and without keeping
    what is compared: thousands of short-lived tuples would wake the garbage collector."""

    def __init__(self, values: "list[Any]"):
        self._count = len(values)
        self._facts = [(take, list(map(take, values))) for take in (_data_pointer, _shape, _stride, _dtype)]

    def matches(self, values: "list[Any]") -> bool:
        return len(values) == self._count and all(
            all(map(operator.eq, map(take, values), known)) for take, known in self._facts
        )


def hold(values: "list[Any]") -> "list[Any]":
    """Owners of the tensors' storage, independent of what becomes of the tensors (``p.data = ...``)."""
    with torch.no_grad():
        return list(map(torch.Tensor.detach, values))


def are_tensors(values: "Iterable[Any]") -> bool:
    """Whether all are tensors; the common types first, because this is asked of every parameter's state."""
    return _COMMON.issuperset(map(type, values)) or all(isinstance(value, torch.Tensor) for value in values)


_COMMON = frozenset((torch.Tensor, torch.nn.Parameter))


# -- DTensor --

def _is_dtensor(value: Any) -> bool:
    return hasattr(value, "to_local") and hasattr(value, "placements") and hasattr(value, "device_mesh")


def _chunk_helper() -> Callable[..., Any]:
    try:
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    except ImportError:
        from torch.distributed._tensor._utils import compute_local_shape_and_global_offset
    return compute_local_shape_and_global_offset


def _describe_dtensor(value: Any, name: str) -> Leaf:
    replica, replicas = 0, 1
    coordinate = value.device_mesh.get_coordinate()
    for dimension, placement in enumerate(value.placements):
        kind = type(placement).__name__
        if kind == "Replicate":
            size = value.device_mesh.size(dimension)
            replica, replicas = replica * size + coordinate[dimension], replicas * size
        elif kind != "Shard":
            raise _refuse(
                name, "DTensors with placement %s are not supported; redistribute() to Shard or Replicate" % placement
            )
    shape, offset = _chunk_helper()(value.shape, value.device_mesh, value.placements)
    local = value.to_local()
    leaf = describe(local, name)
    assert leaf is not None
    if leaf.shape != tuple(shape):
        raise _refuse(name, "the DTensor's local shard is %r where %r was expected" % (leaf.shape, tuple(shape)))
    leaf.value, leaf.keep = value, local
    leaf.whole = tuple(value.shape)
    leaf.offset = tuple(offset) if elements(shape) else (0,) * len(shape)
    leaf.replica = (replica, replicas)
    return leaf
