"""The common parts of the trainings of `rigs.crash.kill_loop`: configurations, counts, and ends of processes."""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rigs.crash.kill_process import Process
from rigs.crash.kill_training import WORDS, KillJob, SaveStage


@dataclass(frozen=True)
class Variant:
    """A configuration of a training."""

    name: str
    background: bool = False
    by_step: bool = False
    local: bool = False
    world_size: int = 1
    numbered: bool = True
    """Whether the supervisor numbers the attempts; otherwise the checkpointer does."""
    keep: int = 2


VARIANTS = (
    Variant("foreground", by_step=True, numbered=False),
    Variant("background", background=True, by_step=True),
    Variant("two roots", local=True, numbered=False),
    Variant("gang of 2", world_size=2),
    Variant("foreground, keep 1", keep=1),
    Variant("background, keep 1", background=True, keep=1, numbered=False),
    Variant("two roots, background", local=True, background=True),
    Variant("gang of 3, background", world_size=3, background=True, keep=1),
)


class ArenaViolation(Exception):
    """An invariant does not hold."""


@dataclass
class Tally:
    """Counts of events so far."""

    kills: int = 0
    """Interruptions by SIGKILL; the kill of a whole gang counts once."""
    processes: int = 0
    freezes: int = 0
    refused: int = 0
    trainings: int = 0
    restarts: int = 0
    places: Counter[tuple[SaveStage, bool]] = field(default_factory=Counter)
    frozen: Counter[tuple[SaveStage, bool]] = field(default_factory=Counter)
    hows: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    most_empty_folders: int = 0


@dataclass
class Arena:
    """The state that all trainings of a run share."""

    rng: random.Random
    folder: Path
    new_root: Callable[[], str]
    freezes: bool
    tell: Callable[[dict[str, Any]], None]
    tally: Tally = field(default_factory=Tally)
    calls: dict[tuple[str, str], int] = field(default_factory=dict)
    """Number of system-call stops of a "start" or a "save", by (variant name, kind); measured once."""
    seconds: dict[tuple[str, str], float] = field(default_factory=dict)
    job: KillJob = field(default_factory=lambda: KillJob(0, ""))
    """Template of all jobs."""


@contextmanager
def children(processes: Sequence[Process]) -> Iterator[Sequence[Process]]:
    """Ends all processes at the exit of the context."""
    try:
        yield processes
    finally:
        for process in processes:
            process.close()


def place_name(place: SaveStage, local: bool) -> str:
    """Returns the description of a stage for the table."""
    return f"{WORDS[place]}{' (local root)' if local else ''}"
