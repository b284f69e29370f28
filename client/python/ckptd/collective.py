# SPDX-License-Identifier: Apache-2.0
"""Who this process is among its job's: rank, world and run id, all from one source."""
from __future__ import annotations

import os
import sys
import uuid
from typing import Any, Optional


def _group() -> Any:
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available():
        return None
    return torch.distributed if torch.distributed.is_initialized() else None


def identify(rank: Optional[int], world: Optional[int], run_id: Optional[str]) -> "tuple[int, int, Optional[str]]":
    """(rank, world, run id or None for the library's own search).

    Explicit rank and world win; else an initialised torch.distributed, where rank 0 draws the run id and
    broadcasts it (collective: all ranks make their checkpointer); else one rank alone. torchrun's environment without
    a process group is refused: its id survives restarts, so two runs could not be told apart.
    """
    if (rank is None) != (world is None):
        raise ValueError("give rank and world together, or neither")
    group = _group()
    if rank is not None and world is not None:
        if not 0 <= rank < world:
            raise ValueError("rank %d is not below world %d" % (rank, world))
        return rank, world, run_id
    if group is not None:
        rank, world = group.get_rank(), group.get_world_size()
        if run_id is None and not os.environ.get("CKPT_RUN_ID"):
            drawn = [uuid.uuid4().hex if rank == 0 else None]
            group.broadcast_object_list(drawn, src=0)
            run_id = drawn[0]
        return rank, world, run_id
    torchrun = os.environ.get("TORCHELASTIC_RUN_ID") or int(os.environ.get("WORLD_SIZE") or 1) > 1
    if torchrun and run_id is None and not os.environ.get("CKPT_RUN_ID"):
        raise RuntimeError(
            "the environment (RANK, WORLD_SIZE) says that this process was started by torchrun, but there is no "
            "process group: call torch.distributed.init_process_group() first, or give rank, world and run_id"
        )
    if torchrun:
        return int(os.environ.get("RANK") or 0), int(os.environ.get("WORLD_SIZE") or 1), run_id
    return 0, 1, run_id
