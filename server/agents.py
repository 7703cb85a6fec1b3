"""Starts agents: one for this machine, or one for each machine in a fleet file."""

import json
import logging
import os
import shutil
import socket
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from agent import nvml
from agent.config import AgentConfig
from agent.containers.detect import find_engine
from agent.containers.engine import EngineFacts
from agent.fleet import end_machine, serve_many
from agent.host import run_agent as run_one
from agent.isolation import choose, why_not
from agent.state import StateFolder, make_folder
from capacity.providers.trace import open_clouds
from domain.ids import INSTANCE_PREFIX, NAME_RULE, is_name, machine_id
from domain.isolation import Isolation, TaskNetwork
from domain.units import parse_size_bytes
from infra.config.settings import Settings
from infra.documents import problem_lines
from infra.errors import ConfigurationError
from infra.machine_shape import MachineShape
from infra.stack.embedded import MACHINE_KEYS
from infra.stack.fleet import Fleet, load_fleet
from infra.users import user_name
from mizzen_client.cli.formats import plural

_log = logging.getLogger(__name__)
_FIRST_PORT = 20000
_PORTS_EACH = 40
"""Number of ports per machine for rendezvous and services, if several machines share this computer's address."""
_OPTIONS = (
    "region", "cluster", "rack", "gpu_type", "gpus", "address", "state_dir", "run_as", "platform", "owner",
    "owner_socket", "interface", "instance", "native_id", "once",
)  # fmt: skip
"""Options of `mizzen agent` that are fields of `AgentConfig`."""
_TASK_SETTINGS = (
    "keep_runs_s", "keep_at_most_s", "keep_free", "output_bytes", "log_bytes", "largest_output_bytes",
    "largest_output_files", "keep_stopped_s", "processes_per_task", "processes_per_cpu",
    "keep_images_s", "images_bytes", "image_bytes_s", "paths", "metadata_service", "s3_role", "gcs_tokens",
    "credentials_s", "keep_memory_s",
)  # fmt: skip
"""Settings of `tasks:` that are fields of `AgentConfig`."""


def machine_state_dir(data_dir: Path, machine: str) -> Path:
    """Returns the folder with the state of a machine of the embedded fleet."""
    return data_dir / "machines" / machine.replace("/", ".")


def run_fleet(settings: Settings, fleet_file: Path, *, separate: bool = False) -> None:
    """Runs the agents of all machines in a fleet file until a stop signal.

    `separate`: the tasks of different tenants must be separated; `mizzen up` has checked that they can be.

    Raises:
        ConfigurationError: the file is invalid, has more machines than there are ports for, or with `separate`, the
            tasks of tenants cannot be separated now.
    """
    fleet = load_fleet(fleet_file)
    make_folder(settings.data_dir / "machines")
    why_shared = fleet_isolation(settings, fleet, settings.data_dir).why_shared
    if separate and why_shared is not None:
        raise ConfigurationError(f"the tasks of different tenants are no longer separated: {why_shared}")
    _warn(why_shared)
    buckets = {r.name: fleet.bucket_url(r, settings.data_dir) for r in fleet.regions}
    keys: dict[str, str] = json.loads((settings.data_dir / MACHINE_KEYS).read_text())
    configs = []
    machines = fleet.machines()
    tasks = _task_options(settings, len(machines))
    for number, machine in enumerate(machines):
        entry = machine["entry"]
        own = {**tasks, "rack": entry.rack, "bucket_url": buckets[machine["region"]], "owner": entry.owner}
        own |= {"machine_key": keys[machine["id"]], "run_as": entry.run_as}
        own |= _isolation(settings, machine["isolation"], settings.data_dir / "machines", entry.run_as, entry.owner)
        configs.append(_config_here(settings, machine["id"], entry, number, **own))
    clouds = open_clouds(settings)

    def launched() -> list[AgentConfig]:
        found = []
        for place, cloud in enumerate(clouds):
            for one in cloud.started():
                number = len(configs) + one.number * len(clouds) + place
                own = {
                    **tasks,
                    "rack": one.instance.zone,
                    "bucket_url": one.bucket_url,
                    "platform": "file",
                    "notice_file": cloud.notice_file(one.instance.native_id),
                    "instance": one.instance.token,
                    "join_token": one.join_token,
                    "machine_key": one.machine_key,
                    **_isolation(settings, None, settings.data_dir / "machines"),
                }
                shape = MachineShape.model_validate(one.shape)
                found.append(_config_here(settings, one.machine, shape, number, **own))
        return found

    try:
        _end_gone(settings, {config.state_dir for config in (*configs, *launched())})
    except Exception as error:  # If a cloud cannot be read, the agents of the other machines must still start.
        _log.warning("the launched machines cannot be read: %s", error)
    serve_many(
        configs,
        settings.temporal,
        launched=launched if clouds else None,
        stuck_after_s=settings.liveness.restart_after_s,
    )


def _end_gone(settings: Settings, there: Collection[Path]) -> None:
    """Ends the leftover processes of launched machines that were terminated while no agents ran on this computer."""
    for folder in (settings.data_dir / "machines").iterdir():
        if folder not in there and folder.name.rpartition(".")[2].startswith(INSTANCE_PREFIX):
            end_machine(folder)


def _config_here(
    settings: Settings,
    machine: str,
    shape: MachineShape,
    number: int,
    **more: Any,
) -> AgentConfig:
    """Returns the configuration of a machine on this computer. Its unique `number` determines its ports."""
    region, cluster, _ = machine.split("/")
    first = _FIRST_PORT + number * _PORTS_EACH
    return _config(
        settings,
        machine=machine,
        region=region,
        cluster=cluster,
        gpu_type=shape.gpu_type,
        gpus=shape.gpus,
        cpus_milli=round(shape.cpus * 1000),
        memory_bytes=shape.memory,
        address="127.0.0.1",
        ports=(first, first + _PORTS_EACH - 1),
        state_dir=machine_state_dir(settings.data_dir, machine),
        **more,
    )


def run_agent(settings: Settings, options: dict[str, Any]) -> int:
    """Runs this machine's agent until a stop signal; returns its exit status. `options` are those of `mizzen agent`.

    Raises:
        ConfigurationError: an option is invalid; the message names it.
    """
    name = options["name"] or options["instance"] or socket.gethostname().partition(".")[0].lower()
    if not is_name(name):
        raise ConfigurationError(f"--name: {name!r} must be {NAME_RULE}")
    first, _, last = str(options["ports"]).partition("-")
    if not (first.isdigit() and last.isdigit()):
        raise ConfigurationError(f"--ports: {options['ports']!r} must be a range such as 20000-20999")
    options["gpus"], options["gpu_type"] = _gpus(options["gpus"], options["gpu_type"])
    numbers = _given_gpus() if options["once"] else ()
    if numbers:
        # The limits are those of the job's allocation, not those of the machine or of the request.
        options["gpus"] = len(numbers)
        nvml.offer_only(numbers)
    try:
        memory = parse_size_bytes(options["memory"]) if options["memory"] else _memory_bytes()
    except ValueError as error:
        raise ConfigurationError(f"--memory: {options['memory']!r} {error}") from None
    run_as, owner = options["run_as"], options["owner"]
    isolation = _isolation(settings, options["isolation"], Path(options["state_dir"]), run_as, owner)
    if isolation["isolation"] is Isolation.NONE and not run_as:
        _warn(_why_shared(isolation["isolation_why"]))
    config = _config(
        settings,
        **{option: options[option] for option in _OPTIONS},
        machine=machine_id(options["region"], options["cluster"], name),
        cpus_milli=round(options["cpus"] * 1000),
        memory_bytes=memory,
        ports=(int(first), int(last)),
        bucket_url=options["bucket"],
        gpu_numbers=numbers,
        link_bytes_s=options["link_mbit"] * 125_000,
        # A secret, so it is not passed as a flag, which other users can read, and not inherited by child processes.
        join_token=os.environ.pop("MIZZEN_JOIN_TOKEN", ""),
        **_task_options(settings),
        **isolation,
    )
    if options["rotate_key"]:
        StateFolder(config.state_dir).rotate_key()
    status = run_one(config, settings.temporal)
    if config.once:
        shutil.rmtree(config.state_dir, ignore_errors=True)
    return status


def _gpus(count: int | None, gpu_type: str | None) -> tuple[int, str | None]:
    """Returns the number and the type of this machine's GPUs: as given, else as NVML reports them.

    Raises:
        ConfigurationError: a value is not given and NVML does not report it, or NVML reports GPUs of several types.
    """
    found = nvml.devices() or []
    types = sorted({gpu.type for gpu in found})
    if count is None:
        count = len(found)
    if count and gpu_type is None and len(types) > 1:
        raise ConfigurationError(
            f"--gpu-type: the machine has GPUs of the types {', '.join(types)}; give --gpus and --gpu-type"
        )
    gpu_type = gpu_type or (types[0] if count and types else None)
    if bool(count) != bool(gpu_type):
        raise ConfigurationError(
            "--gpus and --gpu-type: give both, or neither on a machine without GPUs: NVML shows none here"
        )
    if found and count > len(found):
        _log.warning("--gpus: %d, but NVML shows only %s", count, plural(len(found), "GPU"))
    return count, gpu_type


def _given_gpus() -> tuple[int, ...]:
    """Returns the numbers of the GPUs that Slurm assigned to this job; empty: Slurm manages no GPUs.

    Raises:
        ConfigurationError: the GPUs have names instead of numbers, as MIG partitions have.
    """
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if given in ("", "NoDevFiles"):
        return ()
    parts = given.split(",")
    if not all(part.isdigit() for part in parts):
        raise ConfigurationError(f"CUDA_VISIBLE_DEVICES: {given!r} must be numbers of GPUs, such as 0,1")
    return tuple(sorted(map(int, parts)))


def _task_options(settings: Settings, machines: int = 1) -> dict[str, Any]:
    """Returns fields of `AgentConfig` from the settings. `machines`: how many agents share this disk."""
    same = {name: getattr(settings.tasks, name) for name in _TASK_SETTINGS}
    fraction = settings.tasks.disk_fraction
    if (engine := _engine(settings)) is not None:
        same |= {"engine_socket": engine[0], "engine": engine[1].name}
    return {**same, "cgroup": settings.tasks.limits, "disk_fraction": fraction and fraction / max(1, machines)}


def _engine(settings: Settings) -> tuple[Path, EngineFacts] | None:
    """Returns the socket and properties of this machine's container engine; None: no engine, or tasks may not use it.

    Raises:
        ConfigurationError: the engine in the settings cannot be used.
    """
    tasks = settings.tasks
    if tasks.network is TaskNetwork.HOST:
        return find_engine(tasks.container_engine)
    if tasks.container_engine.startswith("/"):
        raise ConfigurationError(
            f"tasks.network {tasks.network}: containers have the network of the machine; set tasks.container_engine to"
            f" none, not {tasks.container_engine}"
        )
    return None


def _isolation(
    settings: Settings, wanted: Isolation | None, folder: Path, run_as: str | None = None, owner: str | None = None
) -> dict[str, Any]:
    """Returns the fields of `AgentConfig` about the isolation of tasks. `wanted`: mode set for the cluster or agent.

    Raises:
        ConfigurationError: the machine does not support the wanted mode or network, or a lent machine has no sandbox.
    """
    root, tasks = os.geteuid() == 0, settings.tasks
    uid = tasks.first_uid + tasks.uids - 1 if root else None
    mode, why = choose(wanted or tasks.isolation, folder, uid=uid, is_lent=owner is not None)
    if tasks.network is TaskNetwork.PORTS:
        reason = why_not(mode, folder, uid, tasks.network) if mode is Isolation.SANDBOX else f"isolation is {mode}"
        if reason is not None:
            raise ConfigurationError(f"tasks.network {tasks.network}: not possible on this machine: {reason}")
    own = root and mode is not Isolation.NONE and run_as is None
    uids = (tasks.first_uid, tasks.uids) if own else None
    return {"isolation": mode, "isolation_why": why, "tenant_uids": uids, "network": tasks.network}


@dataclass(frozen=True)
class FleetIsolation:
    """How the tasks on the machines of a fleet are separated."""

    modes: dict[Isolation, int]
    """Number of machines with each mode."""
    why_shared: str | None
    """One line: why the tasks of all tenants run as one user, not separated, and a remedy. None: they are separated."""
    engine: str | None = None
    """Kind and version of the container engine; None: there is none."""

    def __str__(self) -> str:
        modes = ", ".join(f"{mode} on {plural(count, 'machine')}" for mode, count in sorted(self.modes.items()))
        return modes if self.engine is None else f"{modes}; container ({self.engine}) for jobs with an image"


def fleet_isolation(settings: Settings, fleet: Fleet, data_dir: Path) -> FleetIsolation:
    """Returns how tasks are separated on the machines of a fleet, all of which are on this computer.

    Machines with a user for their tasks (`run_as`) are ignored in `why_shared`: their operators chose that user.

    Raises:
        ConfigurationError: a machine does not support the mode that the fleet file or the settings require.
    """
    modes, why_shared = Counter[Isolation](), None
    for machine in fleet.machines():
        entry = machine["entry"]
        found = _isolation(settings, machine["isolation"], data_dir / "machines", entry.run_as, entry.owner)
        modes[found["isolation"]] += 1
        if found["isolation"] is Isolation.NONE and entry.run_as is None:
            why_shared = _why_shared(found["isolation_why"])
    engine = _engine(settings)
    return FleetIsolation(dict(modes), why_shared, None if engine is None else engine[1].name)


def _why_shared(why: str) -> str:
    user = f"tasks of all tenants run as user {user_name(os.geteuid())} and can read all files of this user"
    return f"{user}: {why}; or set run_as for its machines" if why else f"{user}: isolation is none in the settings"


def _warn(text: str | None) -> None:
    if text is not None:
        _log.warning("%s", text)


def _config(settings: Settings, **values: Any) -> AgentConfig:
    held = int(values["memory_bytes"] * settings.tasks.checkpoint_memory)
    try:
        return AgentConfig(checkpoint_memory_bytes=held, **values)
    except ValidationError as error:
        raise ConfigurationError("; ".join(problem_lines(AgentConfig, error))) from None


def _memory_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) << 10
    return 1 << 30
