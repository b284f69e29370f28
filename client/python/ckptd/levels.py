# SPDX-License-Identifier: Apache-2.0
"""Levels, results and versions, as the caller sees them."""
from __future__ import annotations

import datetime
import enum
from typing import NamedTuple, Union

from . import binding


class Level(enum.IntEnum):
    """What a version survives."""

    CAPTURED = binding.CAPTURED  #: the program's death
    LOCAL = binding.LOCAL  #: the daemon's death, a reboot
    PARTNER = binding.PARTNER  #: loss of a node (not offered yet)
    GLOBAL = binding.GLOBAL  #: loss of the job's nodes

    @classmethod
    def of(cls, level: "LevelLike") -> "Level":
        """From a Level, its number or its name in any case."""
        if isinstance(level, str):
            try:
                return cls[level.upper()]
            except KeyError:
                raise ValueError(
                    "no level %r; the levels are %s" % (level, ", ".join(each.name.lower() for each in cls))
                ) from None
        return cls(level)


LevelLike = Union[Level, int, str]


class SaveResult(str, enum.Enum):
    """What became of a save; true if the step is (or was before) accepted."""

    SAVED = "saved"  #: accepted; do not change fenced tensors before the fence
    ALREADY = "already"  #: this step was accepted before; nothing was done
    SKIPPED = "skipped"  #: no room in time; nothing was taken
    FAILED = "failed"  #: no daemon, or it refused; the reason was logged; the next save tries again

    def __bool__(self) -> bool:
        return self in (SaveResult.SAVED, SaveResult.ALREADY)

    def __str__(self) -> str:
        return self.value


class Version(NamedTuple):
    """One complete version. `bytes` of all its images; `levels` where it is complete."""

    generation: int
    step: int
    bytes: int
    created: datetime.datetime
    world: int
    levels: "frozenset[Level]"
    pinned: bool


class Durable(NamedTuple):
    """The newest complete version at a level; `age` in seconds since it became complete there."""

    generation: int
    step: int
    age: float


class Info(NamedTuple):
    """Facts about a checkpointer. `resumes`: (generation, step) that this run resumes from, or None. `push`: the
    daemon cannot read this process, a thread copies instead; `push_reason` says why. `image_size` of the last save in
    bytes. `saves`, `skipped`, `lost`: accepted; skipped; accepted but given up before they were captured."""

    rank: int
    world: int
    connected: bool
    generation: int
    resumes: "tuple[int, int] | None"
    levels: "frozenset[Level]"
    push: bool
    image_size: int
    saves: int
    skipped: int
    lost: int
    push_reason: "str | None" = None


class DeviceUsage(NamedTuple):
    """Device memory that the daemon takes, in bytes: its `contexts`, the allocations of this checkpointer that it has
    open (`imports`, which stay allocated while it has), and its arena."""

    contexts: int
    imports: int
    context_bytes: int
    import_bytes: int
    arena_bytes: int


def level_set(bits: int) -> "frozenset[Level]":
    return frozenset(level for level in Level if bits & (1 << level))


def version(entry: binding.VersionEntry) -> Version:
    created = datetime.datetime.fromtimestamp(entry.created_ns / 1e9, datetime.timezone.utc)
    return Version(
        entry.generation, entry.step, entry.bytes, created, entry.world, level_set(entry.levels), bool(entry.flags & 1)
    )


def info(raw: binding.Info) -> Info:
    return Info(
        raw.rank, raw.world, bool(raw.connected), raw.generation,
        (raw.resume_generation, raw.resume_step) if raw.resumes else None, level_set(raw.levels), bool(raw.push),
        raw.image_size, raw.saves, raw.skipped, raw.lost, raw.push_reason.decode() if raw.push_reason else None,
    )
