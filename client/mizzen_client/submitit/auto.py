"""`AutoExecutor` with submitit's interface. Parameters are converted as by `mizzen convert`."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from mizzen_client import Client
from mizzen_client.convert.conversion import CannotConvert, Carryover, Conversion
from mizzen_client.convert.submitit_executors import ExecutorReader
from mizzen_client.convert.submitit_shape import ExecutorShape, SubmititExecutor
from mizzen_client.convert.submitit_values import Constants
from mizzen_client.functions.executor import Executor
from mizzen_client.submitit.job import Job

R = TypeVar("R")

_OWN = "mizzen_"
_NAME = "submitit"


class AutoExecutor:
    """Submits functions as submitit's `AutoExecutor` does. The tasks get the files of the current folder.

        executor = submitit.AutoExecutor(folder="logs")
        executor.update_parameters(timeout_min=60, gpus_per_node=8, mizzen_tenant="vision")
        jobs = executor.map_array(train, [0.1, 0.01])

    Args:
        folder: not used: `mizzen logs` and `Job.stdout` have the output.
        cluster: not used.
        client: the client of the API; None: one for the context that `Client.from_environment` chooses.
        parameters: not used; submitit has settings of its clusters here.
    """

    def __init__(
        self, folder: Path | str = ".", cluster: str | None = None, *, client: Client | None = None, **parameters: Any
    ) -> None:
        self.folder, self.cluster = folder, cluster
        self._client = client
        self._parameters: dict[str, Any] = {}
        self._executor: Executor | None = None
        self._batch: list[Job[Any]] | None = None

    def update_parameters(self, **parameters: Any) -> None:
        """Set parameters of later submissions: submitit's, with or without `slurm_`, and fields of mizzen's documents.

        `mizzen_X=...` is the argument X of `mizzen.Executor`, such as `mizzen_tenant` and `mizzen_gpus`. A parameter
        without a counterpart gives a warning that says why.

        Raises:
            ValueError: a value is invalid. The message names the parameter.
            RuntimeError: in a batch.
        """
        if self._batch is not None:
            raise RuntimeError("parameters cannot be changed in a batch")
        self._parameters |= {name: value for name, value in parameters.items() if value is not None}
        self._executor = None
        for message in self._options()[1]:
            if any(message.startswith(name) for name in parameters):
                warnings.warn(message, stacklevel=2)

    def submit(self, fn: Callable[..., R], *args: Any, **kwargs: Any) -> Job[R]:
        """Submit a call. Calls within a short moment, or in a `batch`, become one array."""
        executor = self._current()
        job = Job(executor.submit(fn, *args, **kwargs), executor)
        if self._batch is not None:
            self._batch.append(job)
        return job

    def map_array(self, fn: Callable[..., R], *iterables: Iterable[Any]) -> list[Job[R]]:
        """Submit a call for each tuple of arguments, as `map` does, in one array."""
        executor = self._current()
        return [Job(future, executor) for future in executor.submit_array(fn, *iterables)]

    def submit_array(self, fns: Sequence[Callable[[], R]]) -> list[Job[R]]:
        """Submit calls of functions without arguments in one array."""
        executor = self._current()
        with executor.batch():
            return [Job(executor.submit(fn), executor) for fn in fns]

    @contextmanager
    def batch(self, allow_implicit_submissions: bool = False) -> Iterator[None]:
        """Submit all calls in this context as one array, at its end. `allow_implicit_submissions` has no effect."""
        if self._batch is not None:
            raise RuntimeError("a batch cannot contain another")
        self._batch = []
        try:
            with self._current().batch():
                yield
        finally:
            self._batch = None

    def _current(self) -> Executor:
        if self._executor is None:
            self._executor = Executor(client=self._client, **self._options()[0])
        return self._executor

    def _options(self) -> tuple[dict[str, Any], list[str]]:
        """Return the arguments of `Executor`, and a message for each parameter that is lost."""
        conversion, given = Conversion("submitit"), SubmititExecutor(0, "AutoExecutor")
        own = {name.removeprefix(_OWN): value for name, value in self._parameters.items() if name.startswith(_OWN)}
        reader = ExecutorReader(conversion, Constants({}))
        for name, value in self._parameters.items():
            if not name.startswith(_OWN):
                reader.parameter(given, 0, name, value)
        shape = ExecutorShape(conversion, given)
        try:
            tasks, resources = shape.tasks() or 1, shape.resources()
            job = {"setup": shape.setup(), **own.pop("job", {})}
            fields = {"name": shape.name(_NAME, 0), "limits": shape.limits(), "checkpoint": shape.notice()}
            throttle = shape.throttle().get("throttle")
        except CannotConvert as error:
            raise ValueError(error.reason) from None
        options = {
            "tasks": tasks, "cpus": resources["cpus"], "gpus": resources.get("accelerators"), "max_workers": throttle,
            "memory": resources["memory"], "workdir": Path.cwd(), "job": job,
            **{name: value for name, value in fields.items() if value}, **own,
        }  # fmt: skip
        lost = [f"{r.source}: {r.why}" for r in conversion.remarks if r.outcome is Carryover.LOST]
        return options, lost
