"""The future of a call that runs as a workload."""

import concurrent.futures
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class CallFuture(concurrent.futures.Future[T]):
    """The future of one call. `cancel` also works while the call runs: it cancels the workload."""

    def __init__(self, cancel: "Callable[[CallFuture[T]], bool]", workload: str | None = None) -> None:
        super().__init__()
        self._cancel = cancel
        self.workload = workload
        """The id of the workload, or of the element of an array, such as `wl-01jd3k9p2q7x4m5t-17`. None: not submitted
        yet."""
        self.phase = "pending"
        """The phase of the workload, as last seen."""

    def cancel(self) -> bool:
        """Cancel the call. Return False if it has already ended."""
        if not self.done() and self._cancel(self):
            self.end_cancelled()
        return self.cancelled()

    def running(self) -> bool:
        """Return whether the call runs, as last seen."""
        return not self.done() and self.phase == "running"

    def end_cancelled(self) -> None:
        """Mark the future as cancelled, unless the call has ended."""
        if super().cancel():
            self.set_running_or_notify_cancel()
