"""submitit's helpers, with which a call continues after a preemption. Needs no other library."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mizzen_client.submitit.job import Job

_POLL_S = 0.2


class DelayedSubmission:
    """The call that replaces another after a preemption; methods `checkpoint` return it."""

    def __init__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self.function, self.args, self.kwargs = function, args, kwargs


class Checkpointable:
    """Base class of functions that start again after a preemption with the state that they have then."""

    def checkpoint(self, *args: Any, **kwargs: Any) -> DelayedSubmission:
        """Return the call with which the next attempt starts. It is called when the notice to stop arrives."""
        return DelayedSubmission(self, *args, **kwargs)  # type: ignore[arg-type]  # Subclasses have `__call__`.


def as_completed(
    jobs: "Sequence[Job[Any]]", timeout: float | None = None, poll_frequency: float = _POLL_S
) -> "Iterator[Job[Any]]":
    """Yield jobs as they end.

    Args:
        jobs: the jobs.
        timeout: seconds after which `TimeoutError` is raised; None: never.
        poll_frequency: seconds between two checks.
    """
    deadline_s = None if timeout is None else time.monotonic() + timeout
    left = list(jobs)
    while left:
        done = [job for job in left if job.done()]
        left = [job for job in left if job not in done]
        yield from done
        if left and not done:
            if deadline_s is not None and time.monotonic() > deadline_s:
                raise TimeoutError(f"{len(left)} of {len(jobs)} jobs have not ended")
            time.sleep(poll_frequency)
