"""The launch of one task, made from its attempt's launch description (`domain.launch`)."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC
from pathlib import Path
from typing import Any

from domain.ids import run_id
from domain.launch import LaunchDescription, TaskPlace

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class Owner:
    """As whom a task runs."""

    uid: int
    gid: int
    groups: tuple[int, ...]


@dataclass(frozen=True)
class TaskLaunch:
    """What the shim is given."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str
    output: str
    """File for standard output and error."""
    grace_s: float
    """For a SIGTERM that comes without a deadline."""
    uid: int | None = None
    gid: int | None = None
    groups: tuple[int, ...] = ()
    cgroup: str | None = None
    """A cgroup v2 in which all of it can be killed at once."""
    limits: tuple[str, ...] = ()
    """Cgroups with limits, which it joins before it runs."""
    view: Mapping[str, list[str]] = field(default_factory=dict)
    """What it sees of folders that its user may not enter (`agent.view`)."""

    def to_json(self) -> dict[str, Any]:
        """The shim's input."""
        return asdict(self)


def environment(
    launch: LaunchDescription,
    place: TaskPlace,
    *,
    masters: Mapping[str, str],
    home: Path,
    report: Path,
    python: str,
    secrets: Mapping[str, str],
    platform: str | None = None,
) -> dict[str, str]:
    """The whole environment of a task: nothing of the agent's own is in it.

    `masters` is job to `address:port`, `secrets` are those of the task's job, `platform` is what the machine's
    configuration says of how often it is interrupted. The user's variables may replace PATH,
    HOME and LANG, and none of those that mizzen hands out; no name that starts with `MIZZEN_` is theirs.
    """
    job = launch.jobs[place.job]
    theirs = {k: v for k, v in {**job.env, **secrets}.items() if not k.startswith("MIZZEN_")}
    ours = {
        "MIZZEN_WORKLOAD": launch.workload_id,
        "MIZZEN_WORKLOAD_NAME": launch.name,
        "MIZZEN_TENANT": launch.tenant,
        "MIZZEN_ATTEMPT": str(launch.attempt),
        "MIZZEN_JOB": place.job,
        "MIZZEN_TASK": str(place.task),
        "MIZZEN_TASKS": str(job.tasks),
        "MIZZEN_REGION": launch.region,
        "MIZZEN_MACHINE": place.machine,
        "MIZZEN_RUN_ID": run_id(launch.workload_id, launch.attempt, place.job, place.task),
        "MIZZEN_CHECKPOINT_URI": launch.checkpoint.uri,
        "MIZZEN_CHECKPOINT_KEEP": str(launch.checkpoint.keep),
        "MIZZEN_GRACE_S": f"{launch.checkpoint.grace_s:.12g}",
        "MIZZEN_REPORT": str(report),
        "MIZZEN_PYTHON": python,
        "CUDA_VISIBLE_DEVICES": ",".join(str(slot) for slot in place.slots),
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "NODE_RANK": str(place.node_rank),
        "MIZZEN_GANG_MACHINES": str(len({task.machine for task in launch.tasks})),
    }
    if launch.checkpoint.interval_s is not None:
        ours["MIZZEN_CHECKPOINT_INTERVAL_S"] = f"{launch.checkpoint.interval_s:.12g}"
    if launch.checkpoint.machine_hazard_per_h is not None:
        ours["MIZZEN_MACHINE_HAZARD_PER_H"] = f"{launch.checkpoint.machine_hazard_per_h:.6g}"
    if platform is not None:
        ours["MIZZEN_PLATFORM"] = platform
    for table, uri in launch.tables.items():
        ours[f"MIZZEN_TABLE_{_variable(table)}"] = uri
    for table, until in launch.stale_tables.items():
        ours[f"MIZZEN_TABLE_{_variable(table)}_COMPLETE_UNTIL"] = f"{until.astimezone(UTC):%Y-%m-%dT%H:%M:%S.%fZ}"
    for name, address in masters.items():
        ours[f"MIZZEN_JOB_{_variable(name)}_ADDR"] = address
    if place.job in masters:
        ours["MASTER_ADDR"], _, ours["MASTER_PORT"] = masters[place.job].rpartition(":")
    return {"PATH": DEFAULT_PATH, "HOME": str(home), "LANG": "C.UTF-8"} | theirs | ours


def _variable(name: str) -> str:
    return name.upper().replace("-", "_").replace(".", "__")
