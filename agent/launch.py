"""Builds the shim's input for one task, including its environment, from the launch description (`domain.launch`)."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC
from pathlib import Path
from types import MappingProxyType
from typing import Any

from domain.ids import run_id
from domain.launch import JobLaunch, LaunchDescription, TaskPlace

_MOST_ADDRESSES_BYTES = 64 << 10
"""The kernel limits a variable to 128 KiB."""
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class Owner:
    """The user, group and supplementary groups that a task runs as."""

    uid: int
    gid: int
    groups: tuple[int, ...]


@dataclass(frozen=True)
class TaskLaunch:
    """The shim's input for one task."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str
    output: str
    """Path of the file that receives standard output and standard error."""
    grace_s: float
    """Grace in seconds for a SIGTERM to the shim without a deadline in `stop.json`."""
    errors: str | None = None
    """Path of the file that receives standard error instead of `output`; None: there is none."""
    uid: int | None = None
    gid: int | None = None
    groups: tuple[int, ...] = ()
    cgroup: str | None = None
    """Path of a cgroup v2 through which all processes of the task can be killed at once, if there is one."""
    limits: tuple[str, ...] = ()
    """Paths of cgroups with limits or with a port map. The task does not run if it cannot join them."""
    sandbox: Mapping[str, Any] | None = None
    """Arguments of `agent.sandbox.hold`; None: the task runs without a sandbox."""
    container: Mapping[str, Any] | None = None
    """Input of `agent.containers.container_shim`, with command and environment; None: the task has no image."""
    ports: tuple[tuple[int, int], ...] = ()
    """With a network of the sandbox's own: ports of the machine, and those of the task to which they lead."""
    setup: tuple[str, ...] | None = None
    """Command that runs before `argv`, once; None: there is none."""
    setup_by: str | None = None
    """The file `begun` of the task that runs `setup` for this one; None: this task runs it."""
    shares: tuple[str, ...] = ()
    """The working directories that get the files made by `setup` (`agent.task_setup`)."""
    restarts: Mapping[str, int | None] = field(default_factory=dict)
    """Exit status, or `other`, to the number of restarts of the task alone (`agent.restarts`)."""
    lane: Mapping[str, Any] | None = None
    """If this is a runner: `interrupt` and `max_runtime_s` of its elements (`agent.lane`); None: it is not."""

    def to_json(self) -> dict[str, Any]:
        """Returns the shim's input as a JSON object."""
        return dict(vars(self))


def script_command(script: str, path: Path, search: str) -> tuple[str, ...]:
    """Returns the command that runs the script in the file `path`; used for `setup` and `run` of all documents.

    The interpreter in the script's first line (`#!`) runs it, with the one argument that may follow, as the kernel
    would run it. The file need not be executable. Without that line, bash runs the script with `-e`, or `/bin/sh` if
    there is no bash in the folders `search` (in the form of `PATH`).
    """
    first = script.partition("\n")[0]
    interpreter = first[2:].strip().split(maxsplit=1) if first.startswith("#!") else []
    if interpreter:
        return (*interpreter, str(path))
    return (shutil.which("bash", path=search) or "/bin/sh", "-e", str(path))


def setup_command(job: JobLaunch, python: str, path: Path, search: str) -> tuple[str, ...] | None:
    """Returns the command that runs before the task's: it copies `mounts`, then runs the script; None: there is none.

    `path` and `search` are as in `script_command`. `python` runs the copies.
    """
    script = () if job.setup is None else script_command(job.setup, path, search)
    copies = [word for mount in job.mounts if mount.source for word in (mount.source, mount.target)]
    if not copies:
        return script or None
    return (python, "-m", "mizzen.objects.fetch", *copies, "--", *script)


def environment(
    launch: LaunchDescription,
    place: TaskPlace,
    *,
    masters: Mapping[str, str],
    home: Path,
    report: Path,
    interval_file: Path,
    deadline_file: Path,
    python: str,
    secrets: Mapping[str, str],
    user: str,
    platform: str | None = None,
    port: int | None = None,
    credentials: Mapping[str, str] = MappingProxyType({}),
    gpus: Sequence[int] | None = None,
    memory: Path | None = None,
) -> dict[str, str]:
    """Returns the complete environment of a task. It inherits nothing from the agent's environment.

    `masters` maps a job to `address:port`. `interval_file` and `deadline_file` need not exist yet. `secrets` are the
    secrets of the task's job. `user` is the name of the task's user, or its number: it may have no entry in passwd, and
    libraries look at the variables first. `platform` is the platform's name in `mizzen.cadence`, or None if it is
    unknown. `port` is the port on which the task serves requests, if it serves any. `credentials` are variables by
    which libraries find the task's credentials for its buckets. `gpus` are the numbers of its GPUs as the task sees
    them; None: those of its slots. `memory` is the folder of the workload's memory server.

    The user's variables may replace `credentials`, PATH, HOME, USER, LOGNAME, LANG and PYTHONUNBUFFERED, but no other
    variable that mizzen sets. User variables whose names start with `MIZZEN_` are dropped.
    """
    job = launch.jobs[place.job]
    theirs = {k: v for k, v in {**job.env, **secrets}.items() if not k.startswith("MIZZEN_")}
    ours = launch.array_variables | {
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
        "MIZZEN_INTERVAL_FILE": str(interval_file),
        "MIZZEN_DEADLINE_FILE": str(deadline_file),
        "MIZZEN_SESSION_FILE": str(deadline_file.with_name("session")),
        "MIZZEN_PYTHON": python,
        # Numbers in the order of the bus, like those of `agent.gpus` and nvidia-smi. By default, CUDA gives the fastest
        # GPU the first number. UUIDs would not need an order, but programs such as vLLM accept only numbers.
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, place.slots if gpus is None else gpus)),
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "NODE_RANK": str(place.node_rank),
        "MIZZEN_GANG_MACHINES": str(len({task.machine for task in launch.tasks})),
    }
    sizes = {"MIN": job.min_tasks, "MAX": job.max_tasks, "SAVED": job.saved_tasks}
    ours |= {f"MIZZEN_{name}_TASKS": str(tasks) for name, tasks in sizes.items() if tasks is not None}
    if launch.checkpoint.interval_s is not None:
        ours["MIZZEN_CHECKPOINT_INTERVAL_S"] = f"{launch.checkpoint.interval_s:.12g}"
    if launch.checkpoint.max_failing_s is not None:
        ours["MIZZEN_CHECKPOINT_MAX_FAILING_S"] = f"{launch.checkpoint.max_failing_s:.12g}"
    if launch.checkpoint.max_failures is not None:
        ours["MIZZEN_CHECKPOINT_MAX_FAILURES"] = str(launch.checkpoint.max_failures)
    if launch.checkpoint.machine_hazard_per_h is not None:
        ours["MIZZEN_MACHINE_HAZARD_PER_H"] = f"{launch.checkpoint.machine_hazard_per_h:.6g}"
    if launch.checkpoint.process_hazard_per_h is not None:
        ours["MIZZEN_PROCESS_HAZARD_PER_H"] = f"{launch.checkpoint.process_hazard_per_h:.6g}"
    if launch.checkpoint.both_hazard_per_h is not None:
        ours["MIZZEN_BOTH_HAZARD_PER_H"] = f"{launch.checkpoint.both_hazard_per_h:.6g}"
    if (peer := launch.memory_peers.get(place.machine)) is not None:
        ours["MIZZEN_MEMORY_PEER"] = peer
    if memory is not None:
        ours["MIZZEN_MEMORY_SERVER"] = str(memory)
    if platform is not None:
        ours["MIZZEN_PLATFORM"] = platform
    if port is not None:
        ours["MIZZEN_PORT"] = str(port)
    for table, uri in launch.tables.items():
        ours[f"MIZZEN_TABLE_{_variable(table)}"] = uri
    for table, until in launch.stale_tables.items():
        ours[f"MIZZEN_TABLE_{_variable(table)}_COMPLETE_UNTIL"] = f"{until.astimezone(UTC):%Y-%m-%dT%H:%M:%S.%fZ}"
    for name, address in masters.items():
        ours[f"MIZZEN_JOB_{_variable(name)}_ADDR"] = address
    if place.job in masters:
        ours["MASTER_ADDR"], _, ours["MASTER_PORT"] = masters[place.job].rpartition(":")
    if (addresses := _addresses(launch, place.job)) is not None:
        ours["MIZZEN_TASK_ADDRS"] = addresses
    # The output is a file, of which Python would otherwise buffer 8 KiB: it would be late, and lost with a kill.
    defaults = {"PATH": DEFAULT_PATH, "HOME": str(home), "LANG": "C.UTF-8", "PYTHONUNBUFFERED": "1"}
    defaults |= {"USER": user, "LOGNAME": user, **credentials}
    return defaults | theirs | ours


def _addresses(launch: LaunchDescription, job: str) -> str | None:
    """Returns the addresses of a job's tasks, by rank, one a line; None: unknown, or too long for a variable."""
    ranked = sorted((one for one in launch.tasks if one.job == job), key=lambda one: one.rank)
    if any(one.machine not in launch.addresses for one in ranked):
        return None
    text = "\n".join(launch.addresses[one.machine] for one in ranked)
    return text if len(text) <= _MOST_ADDRESSES_BYTES else None


def _variable(name: str) -> str:
    return name.upper().replace("-", "_").replace(".", "__")
