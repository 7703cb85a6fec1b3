"""Training with torch's `DistributedDataParallel`: all ranks save, and exit, at the same step.

    checkpointer = ddp.checkpointer()
    checkpointer.track(model=model, optimizer=optimizer, loader=loader)
    step = checkpointer.restore()
    ...
        checkpointer.step(step)

At each step the ranks compute the maximum of one number. It is raised by rank 0 if a save is due, and by any rank whose
machine received a notice. So all ranks save the same step, and all exit after the same step, although a notice reaches
only one machine. The numbers are exchanged over gloo from CPU memory, so no rank waits for a GPU.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import distributed

from mizzen.checkpoint import Checkpointer, CheckpointError, CheckpointSettings


def agreement() -> Callable[[int], int]:
    """Return a function that computes the maximum of a number over all ranks. All ranks must call it together.

    Without a process group, the function returns its argument. All ranks must also call `agreement` itself, in the same
    order relative to the creation of their other process groups.
    """
    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        return lambda number: number
    # A separate group: its messages cannot mix with those of the training, and gloo works at the same time as NCCL.
    group = distributed.new_group(backend="gloo")

    def agree(number: int) -> int:
        held = torch.tensor(number, dtype=torch.int64)
        distributed.all_reduce(held, op=distributed.ReduceOp.MAX, group=group)
        return int(held)

    return agree


def checkpointer(
    uri: str | os.PathLike[str] | None = None,
    *,
    attempt: int | None = None,
    sharded: bool = True,
    settings: CheckpointSettings | None = None,
    **options: Any,
) -> Checkpointer:
    """Create a `Checkpointer` for this rank of a gang. All ranks must call this, after `init_process_group`.

    Rank 0 saves the state that is equal on all ranks, such as the model. Each rank saves its own random generators. If
    `attempt` is given neither here nor in the environment, rank 0 claims the next attempt for all ranks.

    Args:
        uri: root of the checkpoints. All ranks must be able to access it.
        attempt: fencing token, the same for all ranks.
        sharded: whether each rank saves its own parts; if not, rank 0 alone saves.
        settings: as for `Checkpointer`; `sharded`, `rank`, `world_size` and `agree` are set here.
        options: further options of `Checkpointer`.

    Raises:
        ValueError, CheckpointError: as `Checkpointer` does; or rank 0 could not claim the root.
    """
    agree = agreement()
    rank = distributed.get_rank() if distributed.is_initialized() else 0
    world_size = distributed.get_world_size() if distributed.is_initialized() else 1
    if attempt is None and "MIZZEN_ATTEMPT" not in os.environ:
        attempt = _claimed(uri, rank, agree)
    gang = replace(settings or CheckpointSettings(), sharded=sharded, rank=rank, world_size=world_size, agree=agree)
    return Checkpointer(uri, attempt=attempt, settings=gang, **options)


def _claimed(uri: str | os.PathLike[str] | None, rank: int, agree: Callable[[int], int]) -> int:
    """Let rank 0 claim the next attempt, and return its number on all ranks."""
    claimed = 0
    try:
        if rank == 0:
            claimed = Checkpointer(uri, settings=CheckpointSettings(rank=0, world_size=1)).claim()
    finally:
        # Also if rank 0 fails, because the other ranks wait for its number.
        claimed = agree(claimed)
    if not claimed:
        raise CheckpointError(
            f"{uri or 'MIZZEN_CHECKPOINT_URI'}: rank 0 could not claim the root; see the error of rank 0"
        )
    return claimed
