"""`Executor`: `concurrent.futures.Executor` whose calls run as workloads."""

import concurrent.futures
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, islice
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from mizzen.client import Client
from mizzen.client.archives import pack
from mizzen.client.documents import without_empty
from mizzen.client.errors import Conflict
from mizzen.functions.calls import FILE, PickledCall, archive_of, call_of, pickled_function
from mizzen.functions.future import CallFuture
from mizzen.functions.watch import LABEL, Watch

T = TypeVar("T")

_COMBINED_S = 0.05
"""Calls of `submit` within this time become one array."""
_DEFAULT_PYTHON = '"$MIZZEN_PYTHON"'


class Executor(concurrent.futures.Executor):
    """Runs calls as workloads: `submit` and `map` are those of `concurrent.futures`, and `map` makes one array.

        with mizzen.Executor(gpus="a100:1", tenant="vision") as executor:
            for loss in executor.map(train, [0.1, 0.01, 0.001]):
                print(loss)

    Results are pickles that tasks of your tenant have written; loading one can run any code.

    Args:
        gpus: GPUs of each task, such as `a100:1`, or several in order of preference.
        cpus: cores of each task.
        memory: memory of each task, such as `16GiB`.
        tasks: number of tasks of each call, which start together. All run the function; the result is that of task 0.
        max_workers: how many calls of one array run at a time; None: as many as there is room for.
        python: the command of the interpreter in the task, of the same minor version as this one. The default is the
            interpreter of the machine's agent.
        workdir: a folder whose files the tasks get as their working directory, from which they import modules.
        job: further fields of the job, such as `setup`, `image`, `env` and `secrets`.
        client: the client of the API; None: one for the context that `Client.from_environment` chooses.
        fields: further fields of the document, such as `tenant`, `name`, `limits` and `labels` (docs/workloads.md).
    """

    def __init__(
        self,
        *,
        gpus: str | Sequence[str] | None = None,
        cpus: float | None = None,
        memory: str | None = None,
        tasks: int = 1,
        max_workers: int | None = None,
        python: str = _DEFAULT_PYTHON,
        workdir: Path | str | None = None,
        job: Mapping[str, Any] | None = None,
        client: Client | None = None,
        **fields: Any,
    ) -> None:
        self.id = uuid.uuid4().hex[:16]
        """The value of the label `mizzen-executor` of all its workloads."""
        self._workdir = None if workdir is None else Path(workdir)
        self._max_workers = max_workers
        resources = without_empty({"accelerators": gpus, "cpus": cpus, "memory": memory})
        its_job = {
            "name": "main",
            "tasks": tasks,
            "resources": resources,
            "run": f"exec {python} {FILE}",
            **(job or {}),
        }
        labels = {**fields.pop("labels", {}), LABEL: self.id}
        self._document = {"version": 1, "name": "python", **fields, "labels": labels, "jobs": [without_empty(its_job)]}
        self._client = client or Client.from_environment()
        self._watch = Watch(self._client, self.id)
        self._lock = threading.RLock()
        self._unsent: list[tuple[PickledCall, CallFuture[Any]]] = []
        self._batches = 0
        self._timer: threading.Timer | None = None
        self._is_shut = False

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> CallFuture[T]:
        """Run a call as a workload. Calls that are submitted within a short moment become one array.

        Raises:
            TypeError: the function or an argument cannot be pickled; the message names it.
            RuntimeError: the executor was shut down.
        """
        call = call_of(fn, pickled_function(fn), args, kwargs)
        with self._lock:
            future = self._future()
            self._unsent.append((call, future))
            if not self._batches and self._timer is None:
                self._timer = threading.Timer(_COMBINED_S, self._flush_later)
                self._timer.start()
        return future

    def submit_array(self, fn: Callable[..., T], /, *iterables: Iterable[Any]) -> list[CallFuture[T]]:
        """Run a call for each tuple of arguments, as `map` does, in one array. Return the futures.

        Raises:
            TypeError: the function or an argument cannot be pickled; the message names it.
            ValueError: the calls are too large; the message names the largest.
            RuntimeError: the executor was shut down.
            ClientError: the API cannot be reached or refuses the document.
        """
        function = pickled_function(fn)
        calls = [call_of(fn, function, arguments, {}) for arguments in zip(*iterables, strict=False)]
        pairs = [(call, self._future()) for call in calls]
        self._send(pairs)
        return [future for _, future in pairs]

    def map(
        self, fn: Callable[..., T], /, *iterables: Iterable[Any], timeout: float | None = None, chunksize: int = 1
    ) -> Iterator[T]:
        """See `concurrent.futures.Executor.map`. Calls are one array, each element of which makes `chunksize` calls."""
        if chunksize < 1:
            raise ValueError(f"chunksize={chunksize}: must be 1 or more")
        if chunksize == 1:
            return _Given().map(fn, self.submit_array(fn, *iterables), timeout=timeout)

        def chunk(calls: list[tuple[Any, ...]]) -> list[T]:
            return [fn(*arguments) for arguments in calls]

        arguments = zip(*iterables, strict=False)
        chunks = iter(lambda: list(islice(arguments, chunksize)), [])
        return chain.from_iterable(_Given().map(chunk, self.submit_array(chunk, chunks), timeout=timeout))

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Combine all calls of `submit` in this context into one array, which is submitted at its end."""
        with self._lock:
            self._batches += 1
        try:
            yield
        finally:
            with self._lock:
                self._batches -= 1
            if not self._batches:
                self._flush()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """See `concurrent.futures.Executor.shutdown`. `cancel_futures` also cancels calls that run."""
        with self._lock:
            self._is_shut = True
        self._flush()
        pending = self._watch.pending()
        if cancel_futures:
            for future in pending:
                future.cancel()
        if wait:
            concurrent.futures.wait(pending)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> bool | None:
        """Wait for all calls; after Ctrl-C cancel them."""
        self.shutdown(cancel_futures=kind is not None and issubclass(kind, KeyboardInterrupt))
        return None

    def _future(self) -> CallFuture[Any]:
        if self._is_shut:
            raise RuntimeError("cannot schedule new futures after shutdown")
        return CallFuture(self._cancel)

    def _flush_later(self) -> None:
        with suppress(Exception):  # The futures have the error.
            self._flush()

    def _flush(self) -> None:
        """Submit the calls that wait for others."""
        with self._lock:
            pairs, self._unsent, self._timer = self._unsent, [], None
        try:
            self._send([(call, future) for call, future in pairs if not future.done()])
        except Exception as error:
            for _, future in pairs:
                if not future.done():
                    future.set_exception(error)
            raise

    def _send(self, pairs: Sequence[tuple[PickledCall, CallFuture[Any]]]) -> None:
        if not pairs:
            return
        document = dict(self._document)
        if len(pairs) > 1:
            document["array"] = without_empty({"indexes": f"0-{len(pairs) - 1}", "throttle": self._max_workers})
        files = {FILE: archive_of([call for call, _ in pairs])}
        workload = self._client.submit(document, pack(self._workdir, files))["id"]
        for index, (_, future) in enumerate(pairs):
            future.workload = f"{workload}-{index}" if len(pairs) > 1 else workload
        self._watch.add(workload, {str(future.workload): future for _, future in pairs})

    def _cancel(self, future: CallFuture[Any]) -> bool:
        with self._lock:
            if future.workload is None:
                return True  # `_flush` does not submit it.
        try:
            self._client.cancel(future.workload)
        except Conflict:
            return False
        return True


class _Given(concurrent.futures.Executor):
    """Returns futures that are given, so that `map` is that of the standard library."""

    def submit(self, fn: Any, future: Any) -> Any:  # type: ignore[override]
        return future
