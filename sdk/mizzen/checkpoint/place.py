"""The root, rank and attempt with which a process saves, from arguments of its `Checkpointer` or the environment."""

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mizzen.checkpoint.gpu_copies import DEFAULT_PINNED_BYTES, LEAST_PINNED_BYTES
from mizzen.checkpoint.manifest import CheckpointId, Manifest
from mizzen.checkpoint.save_failures import DEFAULT_MAX_FAILING_S, Limits
from mizzen.checkpoint.tier_cadence import Tiers
from mizzen.environment import TaskEnvironment
from mizzen.objects.store import Chunk

DEFAULT_KEEP = 2

SHARD_TIMEOUT_S = 600.0
"""Default timeout of a sharded save for the other ranks, in seconds."""


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """Settings of a `Checkpointer` that few scripts need: for gangs, and for rare cases."""

    rank: int | None = None
    """Rank of this process, from 0. By default read from the environment."""
    world_size: int | None = None
    """Number of ranks in the gang. By default read from the environment."""
    sharded: bool = False
    """Whether each rank saves its own parts. All ranks must then pass the same `attempt` to the `Checkpointer`."""
    agree: Callable[[int], int] | None = None
    """Returns the maximum of a number over all ranks. All ranks call it together: at each `step`, and for each
    checkpoint that `load_latest` tries. `step` needs it in a gang."""
    shard_timeout_s: float = SHARD_TIMEOUT_S
    """How long a sharded save waits for the other ranks, in seconds."""
    other_world: bool = False
    """Whether a sharded checkpoint of a gang of another size may be loaded. The parts that belong to single ranks are
    then left out, except attributes that were equal on all ranks."""
    trusted: bool = False
    """Whether parts that were saved as `Pickled` may be loaded. Loading a pickle can run any code."""
    start_over: bool = False
    """Whether to start without a checkpoint if checkpoints exist but none can be loaded. By default that is an
    error."""
    keep_every: int | None = None
    """Checkpoints whose step is a multiple of this number are never removed."""
    checksum: str | None = None
    """`xxh3_128` or `sha256`; by default the fastest that is installed."""
    max_failing_s: float | None = None
    """How long saves may fail in a row before a failed save is an error, in seconds; 3600 by default, and at most 60
    while there is no checkpoint. The environment can set another default."""
    max_failures: int | None = None
    """How many saves in a row may fail before that; by default not limited. The environment can set another default."""
    pinned_bytes: int = DEFAULT_PINNED_BYTES
    """Pinned memory through which tensors of a GPU are copied to the host, at most; at least 1 MiB."""
    gpu_copy_bytes: int | None = None
    """Memory on each GPU for the copy of the state that a background save makes there, so that the training can go on
    at once. By default what the training has never needed. The rest of the state is copied to the host first."""
    tiers: Tiers | None = None
    """Saves to memory, `local` and the root, each at an interval of its own. By default each save goes to `local` and
    the root."""

    def __post_init__(self) -> None:
        if self.pinned_bytes < LEAST_PINNED_BYTES:
            raise ValueError(f"pinned_bytes={self.pinned_bytes}: must be at least {LEAST_PINNED_BYTES}")
        if self.gpu_copy_bytes is not None and self.gpu_copy_bytes < 0:
            raise ValueError(f"gpu_copy_bytes={self.gpu_copy_bytes}: must be 0 or more")


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
class Best:
    """Which checkpoints are the best: those with the least, or the greatest, value of `name`."""

    name: str
    count: int
    greatest: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or isinstance(self.count, bool) or not isinstance(self.count, int):
            raise ValueError(f"best={(self.name, self.count)}: must be a name and a number, such as ('val_loss', 3)")
        if self.count < 1:
            raise ValueError(f"best={(self.name, self.count)}: the number must be 1 or more")

    @classmethod
    def of(cls, given: "tuple[str, int] | tuple[str, int, str]") -> "Best":
        """Parse an argument such as `("val_loss", 3)` or `("accuracy", 3, "max")`.

        Raises:
            ValueError: the argument has another form.
        """
        match given:
            case (name, count) | (name, count, "min"):
                return cls(name, count)
            case (name, count, "max"):
                return cls(name, count, greatest=True)
        raise ValueError(
            f"best={given!r}: must be a name, a number and 'min' (default) or 'max', as in ('val_loss', 3)"
        )

    def score(self, progress: Mapping[str, Any]) -> float | None:
        """Return the value of a checkpoint, from its part `progress`; None if it has none that can be compared."""
        value = progress.get(self.name)
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else None

    def among(self, manifests: Iterable[Manifest]) -> frozenset[CheckpointId]:
        """Return the ids of the best checkpoints; of equal ones, the newer."""
        scored = [(dict(one.scores)[self.name], one.id) for one in manifests if self.name in dict(one.scores)]
        scored.sort(key=lambda pair: pair[1], reverse=True)
        scored.sort(key=lambda pair: pair[0], reverse=self.greatest)
        return frozenset(identity for _, identity in scored[: self.count])


@dataclass(frozen=True)
class Retention:
    """Which checkpoints are kept: the newest `keep`, those at every `every_steps` steps, and the best."""

    keep: int = 2
    every_steps: int | None = None
    best: Best | None = None
    held: set[int] = field(default_factory=set, compare=False)
    """Steps whose checkpoints are not removed now, because they are being copied."""

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise ValueError(f"keep={self.keep}: must be 1 or more")
        if self.every_steps is not None and self.every_steps < 1:
            raise ValueError(f"keep_every={self.every_steps}: must be 1 or more")

    def scores(self, encoded: Mapping[str, tuple[str, Sequence[Chunk]]]) -> tuple[tuple[str, float], ...]:
        """Return the scores by which a checkpoint is compared with others, from its part `progress`."""
        kind, chunks = encoded.get("progress", ("", ()))
        if self.best is None or kind != "json":
            return ()
        progress = json.loads(b"".join(chunks))
        score = self.best.score(progress) if isinstance(progress, dict) else None
        return () if score is None else ((self.best.name, score),)

    def best_of(self, manifests: Iterable[Manifest]) -> frozenset[CheckpointId]:
        """Return the ids of the checkpoints that are kept because they are the best."""
        return self.best.among(manifests) if self.best is not None else frozenset()

    def for_good(self, step: int) -> bool:
        """Return whether the checkpoint of `step` is never removed, or not now."""
        return step in self.held or (self.every_steps is not None and step % self.every_steps == 0)


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
    keep: int | None,
    best: tuple[str, int] | tuple[str, int, str] | None,
    settings: CheckpointSettings,
) -> Place:
    """Return the place of a process. Arguments that are None are read from the environment; see `Checkpointer`.

    Raises:
        ValueError: no root is given, a number is out of range, or a sharded gang has no attempt number.
    """
    told = TaskEnvironment.from_environ()
    uri = _first(uri, told.checkpoint_uri)
    if uri is None:
        raise ValueError("no checkpoint root: pass uri, or set MIZZEN_CHECKPOINT_URI")
    retention = Retention(
        _first(keep, told.checkpoint_keep, DEFAULT_KEEP), settings.keep_every, Best.of(best) if best else None
    )
    gang = Gang(_first(settings.rank, told.rank), _first(settings.world_size, told.world_size))
    attempt = _first(attempt, told.attempt)
    if attempt is not None and attempt < 1:
        raise ValueError(f"attempt={attempt}: must be 1 or more")
    if settings.sharded and attempt is None and gang.world_size > 1:
        raise ValueError("attempt=None: a sharded checkpoint needs an attempt number, the same for all ranks")
    limits = Limits(
        _first(settings.max_failing_s, told.checkpoint_max_failing_s, DEFAULT_MAX_FAILING_S),
        _first(settings.max_failures, told.checkpoint_max_failures),
    )
    return Place(uri, attempt, gang, retention, limits)


def _first(*values: Any) -> Any:
    """Return the first value that is not None; None if there is none."""
    return next((value for value in values if value is not None), None)
