# SPDX-License-Identifier: Apache-2.0
"""Trees of plain containers with arrays as leaves: gathering the leaves, and putting a stored tree back."""
from __future__ import annotations

import collections
import ctypes
import operator
import sys
from typing import Any, Iterable, Optional

from . import arrays, typed
from .arrays import Leaf

#: Fresh arrays up to this many bytes are copied to a place that stays, so that nothing has to be registered anew.
STAGE_MAX = 1 << 20


def is_torch(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_ndarray(value: Any) -> bool:
    """Of numpy itself: subclasses may have another idea of their memory."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray


def same_objects(left: "Iterable[Any]", right: "Iterable[Any]") -> bool:
    """Both have the same objects in the same order; the lengths are known to be equal."""
    return all(map(operator.is_, left, right))


class LeafCache:
    """The leaves of one object from one save to the next. `current` is the same list as long as nothing changed:
    same names, same values, same pointers, shapes, strides and dtypes."""

    def __init__(self) -> None:
        self.current: "list[Leaf]" = []
        self._torch: "list[Any]" = []
        self._numpy: "list[Any]" = []
        self._other: "list[Leaf]" = []
        self._fingerprint: Any = None
        self._numpy_fingerprint: "Optional[arrays.NumpyFingerprint]" = None

    def reuse(self) -> bool:
        """True if the memory of `current` is still what it was."""
        if self._torch and not self._fingerprint.matches(self._torch):
            return False
        if self._numpy_fingerprint is not None and not self._numpy_fingerprint.matches(self._numpy):
            return False
        for leaf in self._other:
            again = arrays.describe(leaf.value, leaf.name)
            if again is None or again.identity()[:5] != leaf.identity()[:5]:
                return False
            leaf.device = again.device
        return True

    def replace(self, leaves: "list[Leaf]") -> None:
        self.current = leaves
        self._torch = [leaf.value for leaf in leaves if leaf.form == "torch" and is_torch(leaf.value)
                       and leaf.keep is leaf.value]
        self._watch_numpy([leaf for leaf in leaves if is_ndarray(leaf.value)])
        known = set(map(id, self._torch + self._numpy))
        self._other = [leaf for leaf in leaves if id(leaf.value) not in known and leaf.value is not None]
        if self._torch:
            from . import tensors

            self._fingerprint = tensors.Fingerprint(self._torch)

    def _watch_numpy(self, leaves: "list[Leaf]") -> None:
        values = [leaf.value for leaf in leaves]
        self._numpy_fingerprint = arrays.NumpyFingerprint.create(values, [leaf.address for leaf in leaves])
        self._numpy = [] if self._numpy_fingerprint is None else values


#: Values that stay what they are, so that the same object is the same value.
_IMMUTABLE = frozenset((type(None), bool, int, float, complex, str, bytes))


class Watch:
    """A tree of dicts, lists and tuples as it was. That it is still the same is seen from the identities of what is in
    it, far faster than by encoding it again. `complete` is False if something in it could change unseen."""

    def __init__(self, value: Any, leaves: "list[Leaf]"):
        self._root = value
        self._known = {id(leaf.value) for leaf in leaves}
        self._dicts: "list[tuple[Any, list[Any], list[Any]]]" = []
        self._sequences: "list[tuple[Any, list[Any]]]" = []
        self.complete = self._add(value)

    def _add(self, value: Any) -> bool:
        kind = type(value)
        if kind in _IMMUTABLE or id(value) in self._known:
            return True
        if kind is dict or kind is collections.OrderedDict:
            keys, items = list(value), list(value.values())
            self._dicts.append((value, keys, items))
            return all(type(key) in _IMMUTABLE for key in keys) and all(map(self._add, items))
        if kind is list or kind is tuple:
            items = list(value)
            self._sequences.append((value, items))
            return all(map(self._add, items))
        return False

    def unchanged(self, value: Any) -> bool:
        return (
            self.complete
            and value is self._root
            and all(
                len(table) == len(keys) and same_objects(table, keys) and same_objects(table.values(), items)
                for table, keys, items in self._dicts
            )
            and all(len(table) == len(items) and same_objects(table, items) for table, items in self._sequences)
        )


class Gatherer:
    """`typed.encode`'s leaf function: makes leaves of arrays, in order."""

    def __init__(self, known: "Optional[dict[str, Leaf]]" = None):
        self.leaves: "list[Leaf]" = []
        self.known = known or {}

    def __call__(self, value: Any, name: str) -> Any:
        leaf = self.known.get(name)
        if leaf is None or leaf.value is not value:
            leaf = arrays.describe(value, name)
            if leaf is None:
                return typed.NOT_A_LEAF
        self.leaves.append(leaf)
        return {"$": "tensor", "as": leaf.form}


class Stages:
    """Buffers that stay where they are, for arrays that are made anew at every save."""

    def __init__(self) -> None:
        self._buffers: "dict[str, Any]" = {}

    def put(self, leaf: Leaf) -> Leaf:
        """A leaf with the same bytes in a buffer that stays; `leaf` itself if it is large, has holes, or is on a device."""
        size = leaf.nbytes
        if leaf.device is not None or size == 0 or size > STAGE_MAX or leaf.stride != _packed(leaf) or leaf.offset is not None:
            return leaf
        buffer = self._buffers.get(leaf.name)
        if buffer is None or len(buffer) != size:
            buffer = self._buffers[leaf.name] = (ctypes.c_char * size)()
        ctypes.memmove(buffer, leaf.address, size)
        return Leaf(leaf.name, None, buffer, ctypes.addressof(buffer), leaf.dtype, leaf.shape, leaf.stride, leaf.form, True)


def _packed(leaf: Leaf) -> "tuple[int, ...]":
    return arrays.row_major(leaf.shape, arrays.binding.DTYPE_SIZES[leaf.dtype])


_IN_PLACE_DICTS = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)


def is_mutable(value: Any) -> bool:
    """Whether `merge` changes the value itself."""
    return isinstance(value, (*_IN_PLACE_DICTS, list, set, collections.deque, bytearray)) or type(value).__module__ == "array"


def merge(live: Any, stored: Any) -> Any:
    """Makes `live` equal to `stored`, changing containers in place where both have the same type; returns what
    belongs there. Arrays in `stored` are the live ones already, where there were any."""
    if live is stored or type(live) is not type(stored):
        return stored
    if isinstance(live, _IN_PLACE_DICTS):
        items = [(key, merge(live.get(key), item)) for key, item in stored.items()]
        live.clear()
        for key, item in items:
            live[key] = item
    elif isinstance(live, list):
        live[:] = [merge(live[position] if position < len(live) else None, item) for position, item in enumerate(stored)]
    elif isinstance(live, (set, bytearray)) or type(live).__module__ == "array":
        _refill(live, stored)
    elif isinstance(live, collections.deque) and live.maxlen == stored.maxlen:
        live.clear()
        live.extend(stored)
    else:
        return stored
    return live


def _refill(live: Any, stored: Any) -> None:
    if isinstance(live, set):
        live.clear()
        live.update(stored)
    else:
        live[:] = stored
