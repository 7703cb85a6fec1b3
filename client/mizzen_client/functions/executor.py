"""`Executor`: `concurrent.futures.Executor` whose calls run as workloads."""

import concurrent.futures
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain, islice
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from mizzen_client import Client
from mizzen_client.archives import pack
from mizzen_client.documents import without_empty
from mizzen_client.errors import NotFound
from mizzen_client.functions import outcomes
from mizzen_client.functions.calls import FILE, PickledCall, archive_of, call_of, pickled_function, require_cloudpickle
from mizzen_client.functions.future import CallFuture
from mizzen_client.functions.outcomes import LABEL
from mizzen_client.functions.watch import Watch, cancel_call, indexes_of
from mizzen_client.references import resolve_newest

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
        detach: whether calls continue after Ctrl-C in the `with` block. By default they are cancelled.
        fields: further fields of the document, such as `tenant`, `name`, `limits` and `labels` (docs/workloads.md).

    Raises:
        ValueError: `max_workers` is below 1.
        ImportError: the extra `functions` is not installed.
        NotConfigured: no API is configured.
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
        detach: bool = False,
        **fields: Any,
    ) -> None:
        require_cloudpickle()
        if max_workers is not None and max_workers < 1:
            raise ValueError(f"max_workers={max_workers}: max_workers must be greater than 0, or None for no limit")
        self.id = uuid.uuid4().hex
        """The value of the label `mizzen-executor` of all its workloads, with which tasks sign outcomes."""
        self._workdir = None if workdir is None else Path(workdir)
        self._max_workers = max_workers
        self._detach = detach
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
        self.client = client or Client.from_environment()
        """The client of the API."""
        self._watch = Watch(self.client, self.id)
        self._lock = threading.Lock()
        self._sending = threading.RLock()
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
                # Not a daemon: a program that ends now has submitted its calls.
                self._timer = threading.Timer(_COMBINED_S, self._flush_quietly)
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
        deadline_s = None if timeout is None else time.monotonic() + timeout
        if chunksize == 1:
            return self._results(self.submit_array(fn, *iterables), deadline_s)

        def chunk(calls: list[tuple[Any, ...]]) -> list[T]:
            return [fn(*arguments) for arguments in calls]

        arguments = zip(*iterables, strict=False)
        chunks = iter(lambda: list(islice(arguments, chunksize)), [])
        return chain.from_iterable(self._results(self.submit_array(chunk, chunks), deadline_s))

    def _results(self, futures: list[CallFuture[T]], deadline_s: float | None) -> Iterator[T]:
        """Yield the results in order. Cancel the other calls after an exception."""
        futures.reverse()
        try:
            while futures:
                yield _taken(futures, None if deadline_s is None else deadline_s - time.monotonic())
        finally:
            self.cancel(futures)

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Combine all calls of `submit` in this context into one array, which is submitted at its end."""
        with self._lock:
            self._batches += 1
        try:
            yield
        except BaseException:
            with self._lock:
                self._batches -= 1
                unsent, self._unsent, self._timer = self._unsent, [], None
            for _, future in unsent:
                future.cancel()
            raise
        with self._lock:
            self._batches -= 1
        self.flush()

    def flush(self) -> None:
        """Submit the calls that still wait to be combined, except in a batch, and assign workloads to their futures.

        Raises:
            ValueError: the calls are too large; the message names the largest.
            ClientError: the API cannot be reached or refuses the document.
        """
        with self._sending:
            with self._lock:
                if self._batches:
                    return
                pairs, self._unsent, self._timer = self._unsent, [], None
            pairs = [(call, future) for call, future in pairs if not future.done()]
            try:
                self._send(pairs)
            except Exception as error:
                for _, future in pairs:
                    with suppress(concurrent.futures.InvalidStateError):  # It was cancelled.
                        future.set_exception(error)
                raise

    def output(self, workload: str) -> str | None:
        """Return the output of the newest attempt of a call, without that of the result; None: there is none yet.

        Raises:
            ClientError: the API cannot be reached.
        """
        try:
            lines = list(outcomes.without_outcome(self.client.logs(workload)))
        except NotFound:
            return None
        return "".join(f"{line.decode(errors='replace')}\n" for line in lines)

    def cancel(self, futures: Iterable[CallFuture[Any]]) -> None:
        """Cancel calls, with one request for an array whose unfinished calls are all among them.

        Raises:
            ClientError: the API cannot be reached.
        """
        chosen = set(futures)
        for future in chosen:
            if future.workload is None:
                future.cancel()
        self._watch.cancel(chosen)

    @classmethod
    def attach(cls, workload: str, *, tenant: str | None = None, client: Client | None = None) -> list[CallFuture[Any]]:
        """Return the futures of calls that this or another process has submitted, in the order of their indexes.

        Args:
            workload: an id or a name: of a workload, of an array, or of an element of one.
            tenant: the tenant whose results you trust; None: that of the API key.
            client: the client of the API; None: as for an executor.

        Raises:
            ValueError: no executor has submitted the workload.
            PermissionError: the workload belongs to another tenant: loading a result can run any code.
            ClientError: there is no such workload, or the API cannot be reached.
        """
        client = client or Client.from_environment()
        found = client.workload(resolve_newest(client, workload))
        trusted = tenant or client.whoami()["tenant"]
        if found["tenant"] != trusted:
            raise PermissionError(
                f"{found['id']} belongs to tenant {found['tenant']}, and loading its results runs code of that tenant:"
                f" if you trust it, use attach({workload!r}, tenant={found['tenant']!r})"
            )
        if LABEL not in found["labels"]:
            raise ValueError(f"{found['id']} has no label {LABEL!r}: mizzen.Executor did not submit it")
        ids = [found["id"]]
        if found["array"] is not None:
            ids = [f"{found['id']}-{index}" for index in indexes_of(found["spec"]["array"]["indexes"])]
        watch = Watch(client, found["labels"][LABEL])
        futures = [CallFuture(partial(cancel_call, client), id_) for id_ in ids]
        watch.add(found["id"], {str(future.workload): future for future in futures})
        return futures

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """See `concurrent.futures.Executor.shutdown`. `cancel_futures` also cancels calls that run."""
        with self._lock:
            self._is_shut = True
        self._flush_quietly()
        pending = self._watch.pending()
        if cancel_futures:
            self.cancel(pending)
        if wait:
            concurrent.futures.wait(pending)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> bool | None:
        """Wait for all calls. After Ctrl-C, cancel them unless `detach` is set."""
        is_interrupted = kind is not None and issubclass(kind, KeyboardInterrupt)
        self.shutdown(wait=not is_interrupted, cancel_futures=is_interrupted and not self._detach)
        return None

    def _future(self) -> CallFuture[Any]:
        if self._is_shut:
            raise RuntimeError("cannot schedule new futures after shutdown")
        return CallFuture(partial(cancel_call, self.client))

    def _flush_quietly(self) -> None:
        with suppress(Exception):  # The futures have the error.
            self.flush()

    def _send(self, pairs: Sequence[tuple[PickledCall, CallFuture[Any]]]) -> None:
        if not pairs:
            return
        document = dict(self._document)
        if len(pairs) > 1:
            document["array"] = without_empty({"indexes": f"0-{len(pairs) - 1}", "throttle": self._max_workers})
        files = {FILE: archive_of([call for call, _ in pairs], self.id)}
        workload = self.client.submit(document, pack(self._workdir, files))["id"]
        for index, (_, future) in enumerate(pairs):
            future.workload = f"{workload}-{index}" if len(pairs) > 1 else workload
        self._watch.add(workload, {str(future.workload): future for _, future in pairs})
        for _, future in pairs:
            if future.cancelled():  # In the meantime.
                cancel_call(self.client, future)


def _taken(futures: list[CallFuture[T]], timeout: float | None) -> T:
    """Remove the last future and return its result, so that an iterator of results does not keep them in memory."""
    result = futures[-1].result(timeout)
    futures.pop()
    return result
