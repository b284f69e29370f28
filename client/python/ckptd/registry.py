# SPDX-License-Identifier: Apache-2.0
"""What the library was told: which leaves are protected, which are second names, and who holds their memory."""
from __future__ import annotations

from typing import Any, Optional

from . import arrays, binding, devices, tree
from .arrays import Leaf

#: The library may wait inside save for the capture of larger eager arrays instead of copying them.
LARGE_EAGER = 4 << 20

#: Fenced tensors up to this many bytes are held until they are seen to have changed, because there may be tens of
#: thousands of them (optimizers' step counters) and holding them anew at every save would take longer than the save.
HOLD_ALWAYS = 4096


class Registry:
    """Keeps libckpt's table equal to the leaves of the last `update`; tells it only what changed."""

    def __init__(self, rank: int, world: int, replicated: bool):
        self._replica = (rank, world) if world > 1 and replicated else None
        self._all_local = world > 1 and not replicated
        self._lists: "list[list[Leaf]]" = []
        self._local: "list[bool]" = []
        self._known: "Optional[dict[str, tuple[Any, int]]]" = {}
        self._aliases: "dict[str, str]" = {}
        self._large: "list[Any]" = []
        self._other: "list[Any]" = []
        self._small: "list[Any]" = []
        self._held: "list[Any]" = []
        self._on_devices: "list[Leaf]" = []
        #: Whether a save has to wait inside for eager arrays that are too large to be copied.
        self.large_eager = False

    def update(self, handle: binding.Handle, scanned: "list[tuple[list[Leaf], bool]]") -> bool:
        """`scanned`: per object its leaves and whether they are this rank's own. Lists that are the same objects as the
        last time are taken to be unchanged. True if the library had to be told something."""
        lists = [leaves for leaves, _ in scanned]
        if self._known is not None and len(lists) == len(self._lists) and tree.same_objects(lists, self._lists):
            return False
        primaries, aliases = self._resolve(scanned)
        wanted = {leaf.name: (leaf.registration(), leaf) for leaf in primaries}
        known, self._known = self._known, None
        if known is None or aliases != self._aliases or any(
            target not in known or known[target][0] != wanted[target][0] for target in aliases.values()
        ):
            handle.unprotect_all()
            known = {}
            fresh_aliases = aliases
        else:
            fresh_aliases = {}
        for name, (registration, identity) in list(known.items()):
            if name not in wanted or wanted[name][0] != registration:
                handle.unprotect(identity)
                del known[name]
        for name, (registration, leaf) in wanted.items():
            if name not in known:
                known[name] = (registration, _protect(handle, leaf))
        for alias, target in fresh_aliases.items():
            handle.alias(alias.encode(), target.encode())
        self._known, self._aliases, self._lists = known, aliases, lists
        self.large_eager = any(leaf.nbytes > LARGE_EAGER for leaf in primaries if not leaf.held)
        self._on_devices = [leaf for leaf in primaries if leaf.device is not None]
        fenced = [leaf for leaf in primaries if leaf.held]
        self._other = [leaf.keep for leaf in fenced if not tree.is_torch(leaf.keep)]
        self._large = [leaf.keep for leaf in fenced if tree.is_torch(leaf.keep) and leaf.nbytes > HOLD_ALWAYS]
        self._small = _hold([leaf.keep for leaf in fenced if tree.is_torch(leaf.keep) and leaf.nbytes <= HOLD_ALWAYS])
        return True

    def _resolve(self, scanned: "list[tuple[list[Leaf], bool]]") -> "tuple[list[Leaf], dict[str, str]]":
        """One leaf per view of memory; the others of the same view are aliases. It is fenced if any of them is: a
        parameter that also stands in a plain dict stays a parameter."""
        primaries: "list[Leaf]" = []
        aliases: "dict[str, str]" = {}
        seen: "dict[tuple[Any, ...], Leaf]" = {}
        for leaves, local in scanned:
            for leaf in leaves:
                if leaf.offset is not None and leaf.nbytes == 0:
                    continue
                leaf.rank_local = local or (self._all_local and leaf.offset is None)
                leaf.held = leaf.fenced
                if leaf.offset is None:
                    leaf.replica = None if leaf.rank_local else self._replica
                first = seen.setdefault(leaf.identity(), leaf) if leaf.nbytes else leaf
                if first is leaf:
                    primaries.append(leaf)
                else:
                    first.held = first.held or leaf.fenced
                    aliases[leaf.name] = first.name
        return primaries, aliases

    def hold(self) -> None:
        """Keeps all fenced memory alive, whatever the program does with its tensors, until `release`."""
        self._held = self._other + _hold(self._large)

    def streams(self) -> "list[int]":
        """The CUDA streams behind which what is protected is to be read."""
        return devices.streams_of(leaf.device for leaf in self._on_devices if leaf.device) if self._on_devices else []

    def release(self) -> None:
        self._held = []


def _hold(values: "list[Any]") -> "list[Any]":
    if not values:
        return []
    from . import tensors

    return tensors.hold(values)


def _protect(handle: binding.Handle, leaf: Leaf) -> int:
    flags = (binding.RANK_LOCAL if leaf.rank_local else 0) | (0 if leaf.held else binding.EAGER)
    packed = leaf.stride == arrays.row_major(leaf.shape, binding.DTYPE_SIZES[leaf.dtype])
    box = None if leaf.offset is None else (leaf.offset, leaf.shape)
    return handle.protect(
        leaf.name.encode(), leaf.dtype, leaf.address, leaf.whole, None if packed else leaf.stride, flags, box,
        leaf.replica or (0, 1),
    )
