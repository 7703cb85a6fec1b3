"""The environment variables that mizzen sets for each task, and `TaskEnvironment`, which reads them.

| variable | meaning |
| --- | --- |
| `MIZZEN_WORKLOAD`, `MIZZEN_WORKLOAD_NAME` | id and name of the workload |
| `MIZZEN_TENANT` | tenant of the workload |
| `MIZZEN_ATTEMPT` | number of this attempt of the workload, from 1; the fencing token of its checkpoints |
| `MIZZEN_JOB` | name of the task's job |
| `MIZZEN_TASK`, `MIZZEN_TASKS` | index of the task in its job, from 0, and the number of tasks of the job |
| `MIZZEN_MIN_TASKS`, `MIZZEN_MAX_TASKS` | of an elastic job: its fewest and its most tasks |
| `MIZZEN_SAVED_TASKS` | of an elastic job: the tasks of the last attempt that has saved a checkpoint |
| `MIZZEN_REGION`, `MIZZEN_MACHINE` | region and machine on which the task runs |
| `MIZZEN_RUN_ID` | id of this task in this attempt, for logs |
| `MIZZEN_CHECKPOINT_URI` | root of the workload's checkpoints, in the region's bucket: `file://`, `s3://` or `gs://` |
| `MIZZEN_CHECKPOINT_INTERVAL_S` | seconds between two saves, if the workload sets an interval |
| `MIZZEN_INTERVAL_FILE` | file with the interval that a coordinator computes (`mizzen.cadence.interval_file`) |
| `MIZZEN_CHECKPOINT_KEEP` | number of checkpoints to keep |
| `MIZZEN_CHECKPOINT_MAX_FAILING_S` | how long saves may fail in a row, in seconds, if the workload sets it |
| `MIZZEN_CHECKPOINT_MAX_FAILURES` | how many saves in a row may fail, if the workload sets it |
| `MIZZEN_MACHINE_HAZARD_PER_H` | interruptions per machine hour in the cluster, if the scheduler has enough data |
| `MIZZEN_PROCESS_HAZARD_PER_H` | losses of processes per machine hour, with or without their machine, if measured |
| `MIZZEN_BOTH_HAZARD_PER_H` | losses of a machine together with another one, per machine hour, if measured |
| `MIZZEN_GANG_MACHINES` | number of machines of the gang |
| `MIZZEN_GANG_MTBF_S` | mean seconds between interruptions of the whole gang, if it is known |
| `MIZZEN_PLATFORM` | platform of the machine (`mizzen.cadence`), if its agent has that setting |
| `MIZZEN_GRACE_S` | seconds from the notice (SIGTERM) to SIGKILL |
| `MIZZEN_DEADLINE_FILE` | file that says after the notice when SIGKILL comes (`mizzen.notices.AgentWatcher`) |
| `MIZZEN_GCS_TOKEN_FILE` | file with a token for Google Cloud Storage and its expiry, which the agent renews |
| `MIZZEN_REPORT` | file to which the task reports progress and checkpoints (`mizzen.report`) |
| `MIZZEN_MEMORY_SERVER` | folder with the sockets of the memory server that the agent holds (`mizzen.memory`) |
| `MIZZEN_MEMORY_PEER` | machine that holds a second copy of checkpoints in memory |
| `MIZZEN_PYTHON` | a Python interpreter that has mizzen installed: the agent's own |
| `MIZZEN_TABLE_<NAME>` | URI of an input table's folder in the region's bucket |
| `MIZZEN_TABLE_<NAME>_COMPLETE_UNTIL` | for a stale table: the time up to which it is complete (RFC 3339, UTC) |
| `MIZZEN_JOB_<NAME>_ADDR` | `host:port` of a job's rendezvous, for every job of the workload |
| `MIZZEN_TASK_ADDRS` | addresses of the machines of the job's tasks, by rank, one a line; absent above 64 KiB |
| `CUDA_VISIBLE_DEVICES` | GPU slots of this task |
| `RANK`, `WORLD_SIZE` | index of the task in its job, and number of tasks of the job |
| `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, `NODE_RANK` | the same for the tasks on this machine, and the machine's index |
| `MASTER_ADDR`, `MASTER_PORT` | rendezvous of the task's own job: the address on which its rank 0 listens |

`<NAME>` is the table's or job's name in upper case with `-` as `_` and `.` as `__`.
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from mizzen.cadence.interruptions import number

if TYPE_CHECKING:
    from datetime import datetime

_JOB_ADDRESS = re.compile(r"MIZZEN_JOB_(.+)_ADDR")
_TABLE = "MIZZEN_TABLE_"
_UNTIL = "_COMPLETE_UNTIL"


def variable_name(name: str) -> str:
    """Return a table's or job's `name` as it occurs in the name of a variable: `raw-text` is `RAW_TEXT`."""
    return name.upper().replace("-", "_").replace(".", "__")


def local_path(uri: str | os.PathLike[str]) -> Path:
    """Return the absolute path of a `file://` URI or of a plain path. `~` is the home folder.

    Raises:
        ValueError: the URI has another scheme or names another host.
    """
    text = os.fspath(uri)
    if "://" not in text:
        try:
            return Path(text).expanduser().absolute()
        except RuntimeError as error:
            raise ValueError(f"{text!r}: {error}") from None
    parts = urlsplit(text)
    if parts.scheme != "file":
        raise ValueError(f"{text!r}: the scheme {parts.scheme!r} is not supported; give a file:// URI or a path")
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise ValueError(f"{text!r}: a file:// URI needs an absolute path and no host: file:///folder")
    return Path(unquote(parts.path))


def _variable(read: Callable[[Mapping[str, str]], object], default: object = None) -> Any:
    """Return a field that `from_environ` sets to the result of `read`, unless this is None."""
    return field(default=default, metadata={"read": read})


def _text(name: str) -> Any:
    return _variable(lambda given: given.get(name))


def _whole(name: str, least: int, default: int | None = None) -> Any:
    right = f"a whole number, at least {least}"
    return _variable(lambda given: number(given, name, int, lambda n: n >= least, right), default)


def _number(name: str, unit: str) -> Any:
    return _variable(lambda given: number(given, name, float, lambda n: n >= 0, f"0 or more {unit}"))


@dataclass(frozen=True)
class TaskEnvironment:
    """The environment of a task. A variable that is not set is None, or the value for a single process."""

    workload: str | None = _text("MIZZEN_WORKLOAD")
    workload_name: str | None = _text("MIZZEN_WORKLOAD_NAME")
    tenant: str | None = _text("MIZZEN_TENANT")
    attempt: int | None = _whole("MIZZEN_ATTEMPT", 1)
    job: str | None = _text("MIZZEN_JOB")
    task: int = _whole("MIZZEN_TASK", 0, default=0)
    tasks: int = _whole("MIZZEN_TASKS", 1, default=1)
    min_tasks: int | None = _whole("MIZZEN_MIN_TASKS", 1)
    max_tasks: int | None = _whole("MIZZEN_MAX_TASKS", 1)
    saved_tasks: int | None = _whole("MIZZEN_SAVED_TASKS", 1)
    region: str | None = _text("MIZZEN_REGION")
    machine: str | None = _text("MIZZEN_MACHINE")
    run_id: str | None = _text("MIZZEN_RUN_ID")
    checkpoint_uri: str | None = _text("MIZZEN_CHECKPOINT_URI")
    checkpoint_interval_s: float | None = _number("MIZZEN_CHECKPOINT_INTERVAL_S", "seconds")
    checkpoint_keep: int | None = _whole("MIZZEN_CHECKPOINT_KEEP", 1)
    checkpoint_max_failing_s: float | None = _number("MIZZEN_CHECKPOINT_MAX_FAILING_S", "seconds")
    checkpoint_max_failures: int | None = _whole("MIZZEN_CHECKPOINT_MAX_FAILURES", 0)
    gang_mtbf_s: float | None = _number("MIZZEN_GANG_MTBF_S", "seconds")
    machine_hazard_per_h: float | None = _number("MIZZEN_MACHINE_HAZARD_PER_H", "interruptions per hour")
    gang_machines: int | None = _whole("MIZZEN_GANG_MACHINES", 1)
    platform: str | None = _text("MIZZEN_PLATFORM")
    grace_s: float | None = _number("MIZZEN_GRACE_S", "seconds")
    report: str | None = _text("MIZZEN_REPORT")
    gpus: tuple[str, ...] = ()
    rank: int = _whole("RANK", 0, default=0)
    world_size: int = _whole("WORLD_SIZE", 1, default=1)
    local_rank: int = _whole("LOCAL_RANK", 0, default=0)
    local_world_size: int = _whole("LOCAL_WORLD_SIZE", 1, default=1)
    node_rank: int = _whole("NODE_RANK", 0, default=0)
    master_addr: str | None = _text("MASTER_ADDR")
    master_port: int | None = _whole("MASTER_PORT", 1)
    tables: Mapping[str, str] = field(default_factory=dict)
    """URI of each table's folder, by the name in its variable (`variable_name`)."""
    tables_complete_until: "Mapping[str, datetime]" = field(default_factory=dict)
    """The tables that are stale in the task's region, each with the time up to which it is complete."""
    job_addresses: Mapping[str, str] = field(default_factory=dict)
    """`host:port` of each job's rendezvous, by the name in its variable."""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> "TaskEnvironment":
        """Read and check the variables of `environ` (default: `os.environ`). An empty value counts as absent.

        Raises:
            ValueError: a variable is not a valid number or time, or is too small. The message names the variable.
        """
        given = {name: text for name, text in (os.environ if environ is None else environ).items() if text}
        until = {name + _UNTIL for name in given if name.startswith(_TABLE)} & given.keys()
        read = {field.name: field.metadata.get("read", lambda _: None)(given) for field in fields(cls)}
        return cls(
            **{name: value for name, value in read.items() if value is not None},
            gpus=tuple(gpu.strip() for gpu in given.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu.strip()),
            tables={n.removeprefix(_TABLE): u for n, u in given.items() if n.startswith(_TABLE) and n not in until},
            tables_complete_until={
                name.removeprefix(_TABLE).removesuffix(_UNTIL): _instant(given, name) for name in until
            },
            job_addresses={m[1]: text for name, text in given.items() if (m := _JOB_ADDRESS.fullmatch(name))},
        )

    def table(self, name: str) -> Path:
        """Return the local folder of the input table `name`.

        Raises:
            KeyError: the workload has no such table.
            ValueError: the table's URI is not a `file://` URI.
        """
        if variable_name(name) not in self.tables:
            known = ", ".join(sorted(self.tables)) or "none"
            raise KeyError(f"{_TABLE}{variable_name(name)} is not set: the tables of this workload are: {known}")
        return local_path(self.tables[variable_name(name)])


@dataclass(frozen=True)
class World:
    """How many tasks the job has in this attempt, and how many saved the checkpoint from which it resumes."""

    tasks: int
    """The number of tasks: `WORLD_SIZE`, unless a launcher such as torchrun starts several processes in each task."""
    saved_tasks: int | None
    """The tasks of the last attempt that has saved a checkpoint; None: none has, or the job is not elastic."""
    min_tasks: int
    max_tasks: int

    @property
    def changed(self) -> bool:
        """Whether the checkpoint was saved with another number of tasks."""
        return self.saved_tasks not in (None, self.tasks)


def world(environ: Mapping[str, str] | None = None) -> World:
    """Return the size of the job in this attempt. For a job that is not elastic, minimum and maximum are this size.

    Raises:
        ValueError: a variable is not a valid number. The message names the variable.
    """
    told = TaskEnvironment.from_environ(environ)
    return World(told.tasks, told.saved_tasks, told.min_tasks or told.tasks, told.max_tasks or told.tasks)


def _instant(given: Mapping[str, str], name: str) -> "datetime":
    from datetime import datetime

    try:
        at = datetime.fromisoformat(given[name])
    except ValueError:
        at = None
    if at is None or at.tzinfo is None:
        raise ValueError(f"{name}={given[name]!r}: must be a time with a time zone, such as 2026-11-22T03:00:00Z")
    return at
