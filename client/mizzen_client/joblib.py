"""Backend of joblib: `joblib.Parallel` runs its batches of calls as workloads.

    import joblib
    import mizzen_client.joblib  # registers the backend

    with joblib.parallel_config(backend="mizzen", n_jobs=100, tenant="vision", cpus=1):
        joblib.Parallel()(joblib.delayed(train)(seed) for seed in range(1000))

Arguments in addition to those of joblib are those of `mizzen.Executor`. The task's Python needs joblib, too.
"""

from collections.abc import Callable
from typing import Any

from joblib import register_parallel_backend
from joblib.parallel import ParallelBackendBase, SequentialBackend

from mizzen_client.functions.executor import Executor
from mizzen_client.functions.future import CallFuture

_ALL = 1000
"""The number of calls at a time for `n_jobs=-1`: mizzen runs as many of them as there is room for."""


class MizzenBackend(ParallelBackendBase):
    """See the module. `options` are the arguments of `Executor`."""

    supports_retrieve_callback = True
    default_n_jobs = -1

    def __init__(self, nesting_level: int | None = None, inner_max_num_threads: int | None = None, **options: Any):
        super().__init__(nesting_level=nesting_level, inner_max_num_threads=inner_max_num_threads)
        self._options = options
        self._executor: Executor | None = None

    def effective_n_jobs(self, n_jobs: int | None) -> int:
        """Return how many calls are submitted at a time."""
        if n_jobs == 0:
            raise ValueError("n_jobs=0: must be 1 or more, or -1 for as many as there is room for")
        return _ALL if n_jobs is None or n_jobs < 0 else n_jobs

    def start_call(self) -> None:
        """Start to submit."""
        self._executor = Executor(**{"name": "joblib", **self._options})

    def stop_call(self) -> None:
        """End the executor; all calls have ended."""
        if self._executor is not None:
            self._executor.shutdown(wait=False)

    def submit(self, func: Callable[[], Any], callback: Callable[[Any], None] | None = None) -> CallFuture[Any]:
        """Submit a batch of calls."""
        assert self._executor is not None
        future = self._executor.submit(func)
        if callback is not None:
            future.add_done_callback(callback)
        return future

    def retrieve_result_callback(self, out: CallFuture[Any]) -> Any:
        """Return the result of a batch, or raise its exception."""
        return out.result()

    def abort_everything(self, ensure_ready: bool = True) -> None:
        """Cancel all calls."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
        if ensure_ready:
            self.start_call()

    def get_nested_backend(self) -> tuple[SequentialBackend, None]:
        """Return the backend of calls of `Parallel` in a task."""
        return SequentialBackend(nesting_level=(self.nesting_level or 0) + 1), None


register_parallel_backend("mizzen", MizzenBackend)
