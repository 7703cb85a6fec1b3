"""The environment variables that mizzen sets for each task, and `TaskEnvironment`, which reads them.

| variable | meaning |
| --- | --- |
| `MIZZEN_WORKLOAD`, `MIZZEN_WORKLOAD_NAME` | id and name of the workload |
| `MIZZEN_TENANT` | tenant of the workload |
| `MIZZEN_ATTEMPT` | number of this attempt of the workload, from 1; the fencing token of its checkpoints |
| `MIZZEN_JOB` | name of the task's job |
| `MIZZEN_TASK`, `MIZZEN_TASKS` | index of the task in its job, from 0, and the number of tasks of the job |
| `MIZZEN_REGION`, `MIZZEN_MACHINE` | region and machine on which the task runs |
| `MIZZEN_RUN_ID` | id of this task in this attempt, for logs |
| `MIZZEN_CHECKPOINT_URI` | root of the workload's checkpoints, in the region's bucket: `file://`, `s3://` or `gs://` |
| `MIZZEN_CHECKPOINT_INTERVAL_S` | seconds between two saves, if the workload sets an interval |
| `MIZZEN_INTERVAL_FILE` | file with the interval that a coordinator computes (`mizzen.cadence.interval_file`) |
| `MIZZEN_CHECKPOINT_KEEP` | number of checkpoints to keep |
| `MIZZEN_CHECKPOINT_MAX_FAILING_S` | how long saves may fail in a row, in seconds, if the workload sets it |
| `MIZZEN_CHECKPOINT_MAX_FAILURES` | how many saves in a row may fail, if the workload sets it |
| `MIZZEN_MACHINE_HAZARD_PER_H` | interruptions per machine hour in the cluster, if the scheduler has enough data |
| `MIZZEN_GANG_MACHINES` | number of machines of the gang |
| `MIZZEN_GANG_MTBF_S` | mean seconds between interruptions of the whole gang, if it is known |
| `MIZZEN_PLATFORM` | platform of the machine (`mizzen.cadence`), if its agent has that setting |
| `MIZZEN_GRACE_S` | seconds from the notice (SIGTERM) to SIGKILL |
| `MIZZEN_DEADLINE_FILE` | file that says after the notice when SIGKILL comes (`mizzen.notices.agent`) |
| `MIZZEN_REPORT` | file to which the task reports progress and checkpoints (`mizzen.report`) |
| `MIZZEN_PYTHON` | a Python interpreter that has mizzen installed: the agent's own |
| `MIZZEN_TABLE_<NAME>` | URI of an input table's folder in the region's bucket |
| `MIZZEN_TABLE_<NAME>_COMPLETE_UNTIL` | for a stale table: the time up to which it is complete (RFC 3339, UTC) |
| `MIZZEN_JOB_<NAME>_ADDR` | `host:port` of a job's rendezvous, for every job of the workload |
| `CUDA_VISIBLE_DEVICES` | GPU slots of this task |
| `RANK`, `WORLD_SIZE` | index of the task in its job, and number of tasks of the job |
| `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, `NODE_RANK` | the same for the tasks on this machine, and the machine's index |
| `MASTER_ADDR`, `MASTER_PORT` | rendezvous of the task's own job: the address on which its rank 0 listens |

`<NAME>` is the table's or job's name in upper case with `-` as `_` and `.` as `__`.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from urllib.parse import unquote, urlsplit

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


@dataclass(frozen=True)
class TaskEnvironment:
    """The environment of a task. A variable that is not set is None, or the value for a single process."""

    workload: str | None = None
    workload_name: str | None = None
    tenant: str | None = None
    attempt: int | None = None
    job: str | None = None
    task: int = 0
    tasks: int = 1
    region: str | None = None
    machine: str | None = None
    run_id: str | None = None
    checkpoint_uri: str | None = None
    checkpoint_interval_s: float | None = None
    checkpoint_keep: int | None = None
    checkpoint_max_failing_s: float | None = None
    checkpoint_max_failures: int | None = None
    gang_mtbf_s: float | None = None
    machine_hazard_per_h: float | None = None
    gang_machines: int | None = None
    platform: str | None = None
    grace_s: float | None = None
    report: str | None = None
    gpus: tuple[str, ...] = ()
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    master_addr: str | None = None
    master_port: int | None = None
    tables: Mapping[str, str] = field(default_factory=dict)
    """URI of each table's folder, by the name in its variable (`variable_name`)."""
    tables_complete_until: Mapping[str, datetime] = field(default_factory=dict)
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
        return cls(
            workload=given.get("MIZZEN_WORKLOAD"),
            workload_name=given.get("MIZZEN_WORKLOAD_NAME"),
            tenant=given.get("MIZZEN_TENANT"),
            attempt=_whole(given, "MIZZEN_ATTEMPT", least=1),
            job=given.get("MIZZEN_JOB"),
            task=_whole(given, "MIZZEN_TASK") or 0,
            tasks=_whole(given, "MIZZEN_TASKS", least=1) or 1,
            region=given.get("MIZZEN_REGION"),
            machine=given.get("MIZZEN_MACHINE"),
            run_id=given.get("MIZZEN_RUN_ID"),
            checkpoint_uri=given.get("MIZZEN_CHECKPOINT_URI"),
            checkpoint_interval_s=_seconds(given, "MIZZEN_CHECKPOINT_INTERVAL_S"),
            checkpoint_keep=_whole(given, "MIZZEN_CHECKPOINT_KEEP", least=1),
            checkpoint_max_failing_s=_seconds(given, "MIZZEN_CHECKPOINT_MAX_FAILING_S"),
            checkpoint_max_failures=_whole(given, "MIZZEN_CHECKPOINT_MAX_FAILURES"),
            gang_mtbf_s=_seconds(given, "MIZZEN_GANG_MTBF_S"),
            machine_hazard_per_h=_number(given, "MIZZEN_MACHINE_HAZARD_PER_H", "interruptions per hour"),
            gang_machines=_whole(given, "MIZZEN_GANG_MACHINES", least=1),
            platform=given.get("MIZZEN_PLATFORM"),
            grace_s=_seconds(given, "MIZZEN_GRACE_S"),
            report=given.get("MIZZEN_REPORT"),
            gpus=tuple(gpu.strip() for gpu in given.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu.strip()),
            rank=_whole(given, "RANK") or 0,
            world_size=_whole(given, "WORLD_SIZE", least=1) or 1,
            local_rank=_whole(given, "LOCAL_RANK") or 0,
            local_world_size=_whole(given, "LOCAL_WORLD_SIZE", least=1) or 1,
            node_rank=_whole(given, "NODE_RANK") or 0,
            master_addr=given.get("MASTER_ADDR"),
            master_port=_whole(given, "MASTER_PORT", least=1),
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


def _whole(given: Mapping[str, str], name: str, least: int = 0) -> int | None:
    if name not in given:
        return None
    try:
        number = int(given[name])
    except ValueError:
        raise ValueError(f"{name}={given[name]!r}: must be a whole number") from None
    if number < least:
        raise ValueError(f"{name}={given[name]!r}: must be at least {least}")
    return number


def _instant(given: Mapping[str, str], name: str) -> datetime:
    try:
        at = datetime.fromisoformat(given[name])
    except ValueError:
        at = None
    if at is None or at.tzinfo is None:
        raise ValueError(f"{name}={given[name]!r}: must be a time with a time zone, such as 2026-11-22T03:00:00Z")
    return at


def _seconds(given: Mapping[str, str], name: str) -> float | None:
    return _number(given, name, "seconds")


def _number(given: Mapping[str, str], name: str, unit: str) -> float | None:
    if name not in given:
        return None
    try:
        number = float(given[name])
    except ValueError:
        raise ValueError(f"{name}={given[name]!r}: must be a number of {unit}") from None
    if not number >= 0:
        raise ValueError(f"{name}={given[name]!r}: must be 0 or more {unit}")
    return number
