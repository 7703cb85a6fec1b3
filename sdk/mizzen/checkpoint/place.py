"""Where and as what a process saves: from the arguments of its `Checkpointer`, or else from its environment."""

import os
from dataclasses import dataclass

from mizzen.checkpoint.save_failures import DEFAULT_MAX_FAILING_S, Limits
from mizzen.environment import TaskEnvironment

DEFAULT_KEEP = 2


@dataclass(frozen=True)
class Gang:
    """Rank of this process and size of its gang."""

    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ValueError(f"world_size={self.world_size}: must be at least 1")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank={self.rank}: must be from 0 to {self.world_size - 1}")


@dataclass(frozen=True)
class Retention:
    """Which checkpoints are kept: the newest `keep`, and those whose step is a multiple of `every_steps`, if set."""

    keep: int = 2
    every_steps: int | None = None

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise ValueError(f"keep={self.keep}: must be 1 or more")
        if self.every_steps is not None and self.every_steps < 1:
            raise ValueError(f"keep_every={self.every_steps}: must be 1 or more")

    def for_good(self, step: int) -> bool:
        """Return whether the checkpoint of `step` is never removed."""
        return self.every_steps is not None and step % self.every_steps == 0


@dataclass(frozen=True)
class Place:
    """The root, and the process that saves there."""

    uri: str | os.PathLike[str]
    attempt: int | None
    """Fencing token; None: the next free number."""
    gang: Gang
    retention: Retention
    limits: Limits


def place_of(
    uri: str | os.PathLike[str] | None,
    attempt: int | None,
    *,
    keep: int | None,
    keep_every: int | None,
    rank: int | None,
    world_size: int | None,
    sharded: bool,
    max_failing_s: float | None,
    max_failures: int | None,
) -> Place:
    """Return the place of a process. Arguments that are None are read from the environment; see `Checkpointer`.

    Raises:
        ValueError: no root is given, a number is out of range, or a sharded gang has no attempt number.
    """
    told = TaskEnvironment.from_environ()
    uri = uri if uri is not None else told.checkpoint_uri
    if uri is None:
        raise ValueError("no checkpoint root: pass uri, or set MIZZEN_CHECKPOINT_URI")
    given_keep = keep if keep is not None else told.checkpoint_keep
    retention = Retention(DEFAULT_KEEP if given_keep is None else given_keep, keep_every)
    gang = Gang(
        told.rank if rank is None else rank,
        told.world_size if world_size is None else world_size,
    )
    attempt = told.attempt if attempt is None else attempt
    if attempt is not None and attempt < 1:
        raise ValueError(f"attempt={attempt}: must be 1 or more")
    if sharded and attempt is None and gang.world_size > 1:
        raise ValueError("attempt=None: a sharded checkpoint needs an attempt number, the same for all ranks")
    failing_s = told.checkpoint_max_failing_s if max_failing_s is None else max_failing_s
    limits = Limits(
        DEFAULT_MAX_FAILING_S if failing_s is None else failing_s,
        told.checkpoint_max_failures if max_failures is None else max_failures,
    )
    return Place(uri, attempt, gang, retention, limits)
