"""Training with torch's `DistributedDataParallel`: the ranks agree at each step whether to save, and whether to leave.

    checkpointer = ddp.checkpointer()
    checkpointer.track(model=model, optimizer=optimizer, loader=loader)
    step = checkpointer.restore()
    ...
        checkpointer.step(step)

At each step one number goes round, the greatest wins: rank 0 to save because it is due, any rank's to leave
because its machine was told to. So all ranks save the same step, and all leave after the same one, although a notice
reaches one machine only. The numbers go over gloo, from the CPU's memory, so no GPU is waited for.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed

from mizzen.checkpoint import Checkpointer, CheckpointError


def agreement() -> Callable[[int], int]:
    """A function that gives the maximum of a number over all ranks; each call of it must be made by all of them.

    Without a process group it gives back the number itself. All ranks call `agreement` too, in the same order as they
    make their other groups.
    """
    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        return lambda number: number
    # Of its own: numbers of it never meet those of the training, and it works beside NCCL.
    group = distributed.new_group(backend="gloo")

    def agree(number: int) -> int:
        held = torch.tensor(number, dtype=torch.int64)
        distributed.all_reduce(held, op=distributed.ReduceOp.MAX, group=group)
        return int(held)

    return agree


def checkpointer(
    uri: str | os.PathLike[str] | None = None, *, attempt: int | None = None, **options: Any
) -> Checkpointer:
    """A `Checkpointer` for this rank of a gang, after `init_process_group`. All ranks call it.

    What all ranks have alike, such as the model, is saved by rank 0; each rank saves its own random generators.
    Without an `attempt`, here or in the environment, rank 0 claims the next one for all.

    Args:
        uri: root of the checkpoints, one that all ranks reach.
        attempt: fencing number, the same for all ranks.
        options: others of `Checkpointer`.

    Raises:
        ValueError, CheckpointError: as `Checkpointer` does; or rank 0 could not claim the root.
    """
    agree = agreement()
    rank = distributed.get_rank() if distributed.is_initialized() else 0
    world_size = distributed.get_world_size() if distributed.is_initialized() else 1
    if attempt is None and "MIZZEN_ATTEMPT" not in os.environ:
        attempt = _claimed(uri, rank, agree)
    options = {"sharded": True, "rank": rank, "world_size": world_size, "agree": agree} | options
    return Checkpointer(uri, attempt=attempt, **options)


def _claimed(uri: str | os.PathLike[str] | None, rank: int, agree: Callable[[int], int]) -> int:
    """The attempt that rank 0 has claimed for all."""
    claimed = 0
    try:
        if rank == 0:
            claimed = Checkpointer(uri, rank=0, world_size=1).claim()
    finally:
        # Also where rank 0 fails: the others wait for its number.
        claimed = agree(claimed)
    if not claimed:
        raise CheckpointError(f"{uri or 'MIZZEN_CHECKPOINT_URI'}: rank 0 could not claim it; its own error says why")
    return claimed
