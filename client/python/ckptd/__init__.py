# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that do not block: the Python side of ckptd.

    import ckptd

    with ckptd.Checkpointer("job", model=model, optimizer=optimizer, scheduler=scheduler) as ckpt:
        start = ckpt.restore()                 # the step, or None at a fresh start
        for step in range(0 if start is None else start + 1, steps):
            loss(model, step).backward()
            optimizer.step()                   # waits by itself until the last save's bytes are out
            scheduler.step()
            ckpt.save(step)                    # returns at once

Works with torch 1.13 and later, with numpy alone, and with neither. Failed saves are told to the logger ``ckptd``.
"""
from .arrays import fenced, rank_local, shard
from .checkpointer import Checkpointer
from .errors import CheckpointError, DeadlinePassed, LibraryMissing, NothingDurable, RestoreMismatch
from .levels import DeviceUsage, Durable, Info, Level, SaveResult, Version

__version__ = "0.1.0"

__all__ = [
    "CheckpointError", "Checkpointer", "DeadlinePassed", "DeviceUsage", "Durable", "Info", "Level", "LibraryMissing", "NothingDurable",
    "RestoreMismatch", "SaveResult", "Version", "fenced", "rank_local", "shard",
]
