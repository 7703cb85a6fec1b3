"""Decides from the tasks' reports whether an attempt could load its checkpoint."""

from collections.abc import Iterable
from dataclasses import dataclass

from domain.task_reports import LoadState, TaskProgress


@dataclass(frozen=True)
class FailedLoad:
    """A task that could not load its checkpoint."""

    task: str
    error: str
    skipped: int
    """The number of damaged checkpoints that the task skipped."""


def failed_load(progress: Iterable[TaskProgress], failed: str | None, status: str) -> FailedLoad | None:
    """Returns the first task, by job and index, whose load failed; None: no reported load has failed.

    A load has failed if the task reports a failure, if the task skipped damaged checkpoints and found no valid one, or
    if the task ended with an error before its load completed. `failed` is the task that ended with an error, and
    `status` is its status. `failed` is None if the attempt was stopped: an interrupted load has not failed.
    """
    for task in sorted(progress, key=lambda p: (p.job, p.task)):
        name, load = f"{task.job}/{task.task}", task.load
        if load is None:
            continue
        if load.state == LoadState.FAILED:
            return FailedLoad(name, load.error or "the task reported no cause", load.skipped)
        if load.state == LoadState.NONE and load.skipped:
            return FailedLoad(name, f"no valid checkpoint is left: {load.skipped} skipped", load.skipped)
        if load.state == LoadState.STARTED and name == failed:
            return FailedLoad(name, f"the task ended with {status} during the load", load.skipped)
    return None


def loaded(progress: Iterable[TaskProgress]) -> bool:
    """Returns whether at least one task has loaded its checkpoint, or found that there is none yet."""
    return any(p.load is not None and p.load.state in (LoadState.LOADED, LoadState.NONE) for p in progress)
