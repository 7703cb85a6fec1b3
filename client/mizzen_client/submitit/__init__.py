"""submitit's interface on mizzen: replace `import submitit` by `from mizzen_client import submitit`.

It has `AutoExecutor`, `Job`, `JobEnvironment` and `helpers`, with the names and the behaviour of submitit 1.5 as far as
`docs/python.md` lists it. Names are imported on first use: a task needs only `helpers` and `JobEnvironment`, which need
no library.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mizzen_client.submitit import core, helpers
    from mizzen_client.submitit.auto import AutoExecutor
    from mizzen_client.submitit.job import FailedJobError, Job, UncompletedJobError
    from mizzen_client.submitit.job_environment import JobEnvironment

__all__ = ["AutoExecutor", "FailedJobError", "Job", "JobEnvironment", "UncompletedJobError", "core", "helpers"]

_HOMES = {
    "AutoExecutor": "auto",
    "FailedJobError": "job",
    "Job": "job",
    "JobEnvironment": "job_environment",
    "UncompletedJobError": "job",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'mizzen_client.submitit' has no attribute {name!r}")
    module = import_module(f"mizzen_client.submitit.{_HOMES.get(name, name)}")
    return getattr(module, name) if name in _HOMES else module
