"""`Job` with submitit's interface: the future of a call that runs as a workload."""

import asyncio
import concurrent.futures
from typing import Any, Generic, TypeVar

from mizzen_client.functions.errors import CallFailed
from mizzen_client.functions.executor import Executor
from mizzen_client.functions.future import CallFuture

R = TypeVar("R", covariant=True)

_STATES = {"succeeded": "COMPLETED", "failed": "FAILED", "cancelled": "CANCELLED", "running": "RUNNING"}
"""Maps phases to Slurm's states; all other phases are pending."""


class UncompletedJobError(RuntimeError):
    """The job ended without a result: it was cancelled, its task was killed, or its function raised an exception."""


class FailedJobError(UncompletedJobError):
    """The function raised an exception, which is the cause. The message has its traceback."""


class Job(Generic[R]):
    """A call of an `AutoExecutor`."""

    def __init__(self, future: CallFuture[R], executor: Executor) -> None:
        self._future, self._executor = future, executor

    def __repr__(self) -> str:
        return f"Job<job_id={self._future.workload}, state={self.state!r}>"

    @property
    def job_id(self) -> str:
        """The id of the workload, or of the element of an array.

        Raises:
            RuntimeError: the job is in a batch that has not ended.
            ClientError: the workload could not be submitted.
        """
        if self._future.workload is None:
            self._executor.flush()
        if self._future.workload is None:
            raise RuntimeError("the job has no id before the end of its batch, or was cancelled before")
        return self._future.workload

    @property
    def num_tasks(self) -> int:
        """Always 1: a job of several tasks has one result, that of its first task."""
        return 1

    @property
    def state(self) -> str:
        """The state with Slurm's name, such as `RUNNING`, as last seen."""
        if self._future.cancelled():
            return "CANCELLED"
        return _STATES.get(self._future.phase, "PENDING")

    def get_info(self, mode: str = "force") -> dict[str, str]:
        """Return the id and the state, with Slurm's names. `mode` has no effect."""
        return {"JobID": self.job_id, "State": self.state}

    def result(self) -> R:
        """Wait for the end, and return the result.

        Raises:
            FailedJobError: the function raised an exception.
            UncompletedJobError: there is no outcome.
        """
        error = self.exception()
        if error is not None:
            raise error
        return self._future.result()

    def results(self) -> list[R]:
        """Return a list with the result; see `result`."""
        return [self.result()]

    def exception(self) -> FailedJobError | UncompletedJobError | None:
        """Wait for the end, and return the error that `result` would raise."""
        try:
            error = self._future.exception()
        except concurrent.futures.CancelledError:
            return UncompletedJobError(f"job {self._future.workload} was cancelled")
        if error is None:
            return None
        if isinstance(error, CallFailed):
            return UncompletedJobError(str(error))
        told = FailedJobError(f"job {self._future.workload} failed with: {error!r}{error.__cause__ or ''}")
        told.__cause__ = error
        return told

    def wait(self) -> None:
        """Wait for the end."""
        concurrent.futures.wait([self._future])

    def done(self, force_check: bool = False) -> bool:
        """Return whether the job has ended, as last seen. `force_check` has no effect."""
        return self._future.done()

    def cancel(self, check: bool = True) -> None:
        """Cancel the job. `check` has no effect."""
        self._future.cancel()

    def stdout(self) -> str | None:
        """Return the output of all tasks, with that to stderr; None: there is none yet."""
        return self._executor.output(self.job_id)

    def stderr(self) -> str | None:
        """Return the same as `stdout`: a task has one log."""
        return self.stdout()

    def awaitable(self) -> "AwaitableJob":
        """Return an object whose methods `wait`, `result` and `results` can be awaited."""
        return AwaitableJob(self)


class AwaitableJob:
    """The methods of a job that wait, as coroutines."""

    def __init__(self, job: Job[Any]) -> None:
        self._job = job

    async def wait(self) -> None:
        """See `Job.wait`."""
        await asyncio.to_thread(self._job.wait)

    async def result(self) -> Any:
        """See `Job.result`."""
        return await asyncio.to_thread(self._job.result)

    async def results(self) -> list[Any]:
        """See `Job.results`."""
        return await asyncio.to_thread(self._job.results)
