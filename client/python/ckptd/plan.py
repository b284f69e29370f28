# SPDX-License-Identifier: Apache-2.0
"""A restore before it happens: everything is checked here, then read, then applied.

The objects' sources fill a `Plan`: which stored tensor goes into which memory, and what is to be done when
the bytes are there. Problems are collected, so that one error names all of them; the first byte is written to
live objects only if there are none.
"""
from __future__ import annotations

import fnmatch
from typing import Any, Callable, Iterable, Optional, Sequence

from . import arrays, binding, devices, tree
from .arrays import Leaf

#: At most this many bytes per call, so that Ctrl-C is served soon and the helper thread's work stays bounded.
BATCH = 256 << 20


class Stored:
    """One tensor of the version."""

    __slots__ = ("name", "dtype", "shape", "rank_local", "rank")

    def __init__(self, name: str, dtype: int, shape: "tuple[int, ...]", rank_local: bool, rank: int):
        self.name = name
        self.dtype = dtype
        self.shape = shape
        self.rank_local = rank_local
        self.rank = rank


class Plan:
    """What one restore will do. `rank` is whose rank-local tensors are taken; `newcomer`: that rank wrote nothing."""

    def __init__(self, stored: "Iterable[Stored]", rank: int, newcomer: bool, convert: bool,
                 only: "Optional[Sequence[str]]", allow_pickle: bool):
        self.rank = rank
        self.newcomer = newcomer
        self.convert = convert
        self.only = only
        self.allow_pickle = allow_pickle
        self.missing: "list[str]" = []
        self.unexpected: "list[str]" = []
        self.mismatched: "list[str]" = []
        self.index: "dict[str, Stored]" = {}
        for entry in stored:
            if entry.rank_local and entry.rank != rank:
                continue
            self.index.setdefault(entry.name, entry)
        self._used: "set[str]" = set()
        self._reads: "list[tuple[Stored, Leaf]]" = []
        self._converted: "list[tuple[Leaf, Any]]" = []
        self._apply: "list[Callable[[], None]]" = []

    # -- what is wanted --

    def wants_object(self, name: str) -> bool:
        return self.only is None or any(fnmatch.fnmatchcase(name, pattern) for pattern in self.only)

    def wants(self, tensor: str) -> bool:
        return self.wants_object(tensor.partition("/")[0]) or self.wants_object(tensor)

    def names_under(self, prefix: str) -> "list[str]":
        """Stored names that begin with `prefix`, which ends in ``/``."""
        return [name for name in self.index if name.startswith(prefix)]

    # -- planning --

    def then(self, action: "Callable[[], None]") -> None:
        """To be done after all reads, in this order."""
        self._apply.append(action)

    def skip(self, names: "Iterable[str]") -> None:
        """Stored tensors that are left alone on purpose."""
        self._used.update(names)

    def find(self, name: str) -> Optional[Stored]:
        found = self.index.get(name)
        if found is not None:
            self._used.add(name)
        return found

    def read(self, leaf: Leaf) -> None:
        """The stored tensor of the leaf's name goes into the leaf's memory."""
        stored = self.find(leaf.name)
        if stored is None:
            self.missing.append(leaf.name)
        else:
            self.read_into(stored, leaf)

    def read_into(self, stored: Stored, leaf: Leaf) -> None:
        if stored.shape != leaf.whole:
            self.mismatched.append("%s: stored with shape %s, here %s" % (leaf.name, list(stored.shape), list(leaf.whole)))
        elif not leaf.writable:
            self.mismatched.append("%s: the array here is read-only" % leaf.name)
        elif stored.dtype == leaf.dtype:
            self._reads.append((stored, leaf))
        elif not self.convert:
            self.mismatched.append(
                "%s: stored as %s, here %s (convert=True converts)"
                % (leaf.name, binding.DTYPE_NAMES[stored.dtype], binding.DTYPE_NAMES[leaf.dtype])
            )
        else:
            form = "torch" if tree.is_torch(leaf.value) else "numpy"
            temporary = self.new(stored, form, shape=leaf.shape)
            temporary.whole, temporary.offset = leaf.whole, leaf.offset
            self._reads.append((stored, temporary))
            self._converted.append((leaf, temporary.value))

    def new(self, stored: Stored, form: str, like: Any = None, shape: "Optional[tuple[int, ...]]" = None) -> Leaf:
        """A leaf over new memory of the stored dtype and shape (or `shape`, of a piece)."""
        wanted = stored.shape if shape is None else shape
        if form == "torch":
            from . import tensors

            value = tensors.create(stored.dtype, wanted, like)
        else:
            value = arrays.create(form, stored.dtype, wanted, stored.name)
        leaf = arrays.describe(value, stored.name)
        assert leaf is not None
        if form.startswith("array") or form == "bytearray":
            leaf.dtype, leaf.whole, leaf.shape = stored.dtype, stored.shape, tuple(wanted)
            leaf.stride = arrays.row_major(wanted, binding.DTYPE_SIZES[stored.dtype])
        return leaf

    def tree_leaf(self, live: "dict[str, Leaf]") -> "Callable[[dict, str], Any]":
        """`typed.decode`'s leaf function: answers with the live array if it fits, else with a new one."""

        def leaf(data: dict, name: str) -> Any:
            if data.get("$") != "tensor":
                raise ValueError("%s: unknown stored type %r; written by a newer version?" % (name, data.get("$")))
            stored = self.find(name)
            if stored is None:
                self.missing.append(name)
                return None
            here = live.get(name)
            resizable = data["as"] == "bytearray" or data["as"].startswith("array:")
            if here is None or (resizable and here.whole != stored.shape):
                made = self.new(stored, data["as"])
                self._reads.append((stored, made))
                return made.value
            self.read_into(stored, here)
            return here.value

        return leaf

    # -- checking --

    def finish(self, prefixes: "Iterable[str]") -> None:
        """Notes what is stored but was asked for by nobody. `prefixes`: the objects' names that are known here."""
        known = set(prefixes)
        for name in self.index:
            if name not in self._used and self.wants(name):
                first = name.partition("/")[0]
                self.unexpected.append(name if first in known else "%s (no such object here)" % name)

    def patterns_without_match(self, objects: "Iterable[str]") -> "list[str]":
        candidates = list(objects) + list(self.index)
        return [
            pattern for pattern in self.only or () if not any(fnmatch.fnmatchcase(name, pattern) for name in candidates)
        ]

    # -- doing --

    def execute(self, restore: binding.Restore) -> None:
        batch: "list[binding.Read]" = []
        total = 0
        for stored, leaf in self._reads:
            if leaf.offset is not None and leaf.nbytes == 0:
                continue
            batch.append(_read(stored, leaf))
            total += leaf.nbytes
            if total >= BATCH:
                restore.read_many(batch)
                batch, total = [], 0
        if batch:
            restore.read_many(batch)
        for leaf, source in self._converted:
            _convert(leaf, source)

    def apply(self) -> None:
        for action in self._apply:
            action()


def _convert(leaf: Leaf, source: Any) -> None:
    if tree.is_torch(source):
        from . import tensors

        tensors.convert_into(leaf, source)
        return
    import numpy

    target = leaf.value.array if isinstance(leaf.value, arrays.shard) else leaf.value
    numpy.copyto(numpy.asarray(target), source, casting="unsafe")


def _read(stored: Stored, leaf: Leaf) -> binding.Read:
    read = binding._sized(
        binding.Read, dtype=stored.dtype, name=stored.name.encode(), data=leaf.address, dimensions=len(stored.shape),
        flags=binding.RANK_LOCAL if stored.rank_local else 0, rank=stored.rank, shape=binding.array_u64(stored.shape),
    )
    if leaf.offset is not None:
        read.offset, read.extent = binding.array_u64(leaf.offset), binding.array_u64(leaf.shape)
    if leaf.shape:
        read.stride = binding.array_i64(leaf.stride)
    stream = None if leaf.device is None or leaf.nbytes == 0 else devices.stream_of(leaf.device)
    if stream is not None:
        read.stream, read.on_stream = stream, 1
    return read
