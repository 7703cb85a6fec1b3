"""Whether an attempt's tasks could load their checkpoint, by what they report."""

from collections.abc import Iterable
from dataclasses import dataclass

from domain.reported import LoadState, TaskProgress


@dataclass(frozen=True)
class FailedLoad:
    """A task that could not load its checkpoint."""

    task: str
    error: str
    skipped: int
    """Checkpoints that it passed over as damaged."""


def failed_load(progress: Iterable[TaskProgress], failed: str | None, status: str) -> FailedLoad | None:
    """The first task, by job and index, whose load failed; None: none did, as far as they say.

    A load has failed if the task says so; if it found nothing valid and passed something over; or if it ended by an
    error before it had loaded. `failed` is the task that ended so, with its `status`; None: the attempt was stopped,
    and a load that was interrupted is none that failed.
    """
    for task in sorted(progress, key=lambda p: (p.job, p.task)):
        name, load = f"{task.job}/{task.task}", task.load
        if load is None:
            continue
        if load.state == LoadState.FAILED:
            return FailedLoad(name, load.error or "it does not say why", load.skipped)
        if load.state == LoadState.NONE and load.skipped:
            return FailedLoad(name, f"nothing valid is left: {load.skipped} passed over", load.skipped)
        if load.state == LoadState.STARTED and name == failed:
            return FailedLoad(name, f"it ended with {status} while it loaded", load.skipped)
    return None


def loaded(progress: Iterable[TaskProgress]) -> bool:
    """Whether some task has loaded its checkpoint, or found that there is none yet."""
    return any(p.load is not None and p.load.state in (LoadState.LOADED, LoadState.NONE) for p in progress)
