"""How an attempt's gang ended, as its machines' agents tell it."""

from dataclasses import dataclass, field

from domain.reasons import Reason
from domain.reported import TaskProgress


@dataclass(frozen=True)
class LaunchFailure:
    """Why a gang could not be started."""

    reason: Reason
    blames_machine: str | None
    blames_workload: bool = False
    """No other machine could start it either."""


@dataclass(frozen=True)
class Failure:
    """A task that ended badly by itself."""

    name: str
    status: str
    memory: dict[str, int] | None = None
    """Limit and peak, where its memory ran out."""


@dataclass
class GangEnd:
    """How a gang ended."""

    all_succeeded: bool
    lost_machine: str | None
    first_failure: Failure
    refused: LaunchFailure | None = None
    """A machine would not run its tasks, and no task failed by itself."""
    stopped_before: bool = False
    """An agent had stopped it before this workflow asked for anything, and no task failed by itself."""
    failed: bool = False
    """A task failed by itself: not because it was told to stop."""
    noticed: Reason | None = None
    """A platform said that it takes one of its machines."""
    progress: tuple[TaskProgress, ...] = field(default=())
