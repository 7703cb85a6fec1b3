"""Attempts on a machine, as values for its owner; and leaving tasks, as input of the traffic control."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from agent.lending.task_stop import Held
from agent.shim import boot_time_s
from agent.task_progress import read_progress
from agent.tasks import RunFolder

PERIOD_S = 1.0
"""Interval of decisions about the traffic while tasks leave."""


@dataclass(frozen=True)
class LeavingTask:
    """A task that must leave."""

    run_id: str
    cgroup: Path
    """Its cgroup v2."""
    checkpoint_bytes: int | None
    """What the save of its newest checkpoint has sent; None: it has saved none. The last save sends about as much."""
    deadline_s: float
    """When the machine is the owner's, in seconds since the epoch."""
    pre_sync: bool = False
    """Whether it sends parts ahead of its last checkpoint now."""


def view(one: Held, outcomes: Mapping[str, IntEnum | None]) -> dict[str, Any]:
    """Returns an attempt as values of JSON. `outcomes` are those of `Traffic.update`."""
    try:
        launch = one.folder.launch()
    except (OSError, ValueError):
        launch = None
    runs = one.folder.runs()
    started = [at_s for run in runs if (at_s := run.started_at_s()) is not None]
    grace_s = 0.0 if launch is None else launch.checkpoint.grace_s
    leaving = [found for run in runs if (found := outcomes.get(run.run_id)) is not None]
    ends = [ends_s for run in runs if (ends_s := _ends_in_s(run)) is not None]
    return {
        "workload": one.folder.workload_id,
        "name": None if launch is None else launch.name,
        "tenant": None if launch is None else launch.tenant,
        "gpus": sorted(one.slots),
        "tasks": len(runs),
        "since_s": min(started, default=None),
        "ends_in_s": max(ends, default=grace_s),
        "checkpoint": max(leaving).name.lower() if leaving else None,
    }


def leaving_task(run: RunFolder, cgroup: Path, due_s: float) -> LeavingTask:
    """Returns a task that must leave, with what its last save has sent."""
    told = read_progress(run, None)
    size_bytes = told.checkpoint_bytes if told.checkpoint_sent_bytes is None else told.checkpoint_sent_bytes
    return LeavingTask(run.run_id, cgroup, size_bytes, due_s, told.pre_sync)


def _ends_in_s(run: RunFolder) -> float | None:
    """Returns the time until a task that was told to stop is killed, in seconds; None: it was not told."""
    stop = run.stop()
    return None if stop is None else max(0.0, stop.deadline_boot_s - boot_time_s())
