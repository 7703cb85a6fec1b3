"""Starts agents: one for this machine, or one for each machine in a fleet file."""

import logging
import os
import socket
from collections.abc import Collection
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from agent.config import AgentConfig
from agent.fleet import end_machine, serve_many
from agent.host import run_agent as run_one
from agent.isolation import why_not_separate
from agent.state import StateFolder, make_folder
from capacity.providers.trace import open_clouds
from domain.ids import INSTANCE_PREFIX, NAME_RULE, is_name, machine_id
from domain.units import parse_size_bytes
from infra.config.settings import Settings
from infra.errors import ConfigurationError
from infra.machine_shape import MachineShape
from infra.stack.fleet import load_fleet
from infra.users import user_name

_log = logging.getLogger(__name__)
_FIRST_PORT = 20000
_PORTS_EACH = 40
"""Number of ports per machine for rendezvous and services, if several machines share this computer's address."""


def machine_state_dir(data_dir: Path, machine: str) -> Path:
    """Returns the folder with the state of a machine of the embedded fleet."""
    return data_dir / "machines" / machine.replace("/", ".")


def run_fleet(settings: Settings, fleet_file: Path) -> None:
    """Runs the agents of all machines in a fleet file until a stop signal.

    Raises:
        ConfigurationError: the file is invalid, or has more machines than there are ports for.
    """
    fleet = load_fleet(fleet_file)
    make_folder(settings.data_dir / "machines")
    separate = _tenant_uids(settings, settings.data_dir / "machines")
    buckets = {r.name: fleet.bucket_url(r, settings.data_dir) for r in fleet.regions}
    configs = []
    for number, machine in enumerate(fleet.machines()):
        entry = machine["entry"]
        configs.append(
            _config(
                machine=machine["id"],
                region=machine["region"],
                cluster=machine["cluster"],
                rack=entry.rack,
                **_shape(entry),
                **_here(settings, machine["id"], number),
                bucket_url=buckets[machine["region"]],
                run_as=entry.run_as,
                owner=entry.owner,
                **_task_options(settings, None if entry.run_as else separate),
            )
        )
    clouds = open_clouds(settings)

    def launched() -> list[AgentConfig]:
        found = []
        for place, cloud in enumerate(clouds):
            for one in cloud.started():
                region, cluster, _ = one.machine.split("/")
                found.append(
                    _config(
                        machine=one.machine,
                        region=region,
                        cluster=cluster,
                        rack=one.instance.zone,
                        **_shape(MachineShape.model_validate(one.shape)),
                        **_here(settings, one.machine, len(configs) + one.number * len(clouds) + place),
                        bucket_url=one.bucket_url,
                        platform="file",
                        notice_file=cloud.notice_file(one.instance.native_id),
                        instance=one.instance.token,
                        join_token=one.join_token,
                        **_task_options(settings, separate),
                    )
                )
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


def _shape(shape: MachineShape) -> dict[str, Any]:
    return {
        "gpu_type": shape.gpu_type,
        "gpus": shape.gpus,
        "cpus_milli": round(shape.cpus * 1000),
        "memory_bytes": shape.memory,
    }


def _here(settings: Settings, machine: str, number: int) -> dict[str, Any]:
    """Returns a machine's address, port range and state folder on this computer. `number` is unique to the machine."""
    first = _FIRST_PORT + number * _PORTS_EACH
    return {
        "address": "127.0.0.1",
        "ports": (first, first + _PORTS_EACH - 1),
        "state_dir": machine_state_dir(settings.data_dir, machine),
    }


def run_agent(settings: Settings, options: dict[str, Any]) -> None:
    """Runs this machine's agent until a stop signal. `options` are those of `mizzen agent`.

    Raises:
        ConfigurationError: an option is invalid; the message names it.
    """
    name = options["name"] or options["instance"] or socket.gethostname().partition(".")[0].lower()
    if not is_name(name):
        raise ConfigurationError(f"--name: {name!r} must be {NAME_RULE}")
    first, _, last = str(options["ports"]).partition("-")
    if not (first.isdigit() and last.isdigit()):
        raise ConfigurationError(f"--ports: {options['ports']!r} must be a range such as 20000-20999")
    if bool(options["gpus"]) != bool(options["gpu_type"]):
        raise ConfigurationError("--gpus and --gpu-type: give both, or neither on a machine without GPUs")
    try:
        memory = parse_size_bytes(options["memory"]) if options["memory"] else _memory_bytes()
    except ValueError as error:
        raise ConfigurationError(f"--memory: {options['memory']!r} {error}") from None
    config = _config(
        machine=machine_id(options["region"], options["cluster"], name),
        region=options["region"],
        cluster=options["cluster"],
        rack=options["rack"],
        gpu_type=options["gpu_type"],
        gpus=options["gpus"],
        cpus_milli=round(options["cpus"] * 1000),
        memory_bytes=memory,
        address=options["address"],
        ports=(int(first), int(last)),
        bucket_url=options["bucket"],
        state_dir=options["state_dir"],
        run_as=options["run_as"],
        platform=options["platform"],
        owner=options["owner"],
        owner_socket=options["owner_socket"],
        interface=options["interface"],
        link_bytes_s=options["link_mbit"] * 125_000,
        instance=options["instance"],
        # A secret, so it is not passed as a flag, which other users can read, and not inherited by child processes.
        join_token=os.environ.pop("MIZZEN_JOIN_TOKEN", ""),
        **_task_options(settings, None if options["run_as"] else _tenant_uids(settings, Path(options["state_dir"]))),
    )
    if options["rotate_key"]:
        StateFolder(config.state_dir).rotate_key()
    run_one(config, settings.temporal)


def _task_options(settings: Settings, tenant_uids: tuple[int, int] | None) -> dict[str, Any]:
    tasks = settings.tasks
    return {
        "cgroup": tasks.limits,
        "private_tmp": tasks.private_tmp,
        "keep_runs_s": tasks.keep_runs_s,
        "keep_at_most_s": tasks.keep_at_most_s,
        "keep_free": tasks.keep_free,
        "output_bytes": tasks.output_bytes,
        "keep_stopped_s": tasks.keep_stopped_s,
        "processes_per_task": tasks.processes_per_task,
        "processes_per_cpu": tasks.processes_per_cpu,
        "tenant_uids": tenant_uids,
    }


def _tenant_uids(settings: Settings, folder: Path) -> tuple[int, int] | None:
    """Returns the first user id and the number of user ids for the tasks of tenants.

    If the tasks run as the agent's user, it logs a warning and returns None.
    """
    shared = why_shared(settings, folder)
    if shared is None:
        return settings.tasks.first_uid, settings.tasks.uids
    _log.warning("%s", shared)
    return None


def why_shared(settings: Settings, folder: Path) -> str | None:
    """Returns one line: why tasks of all tenants run as the agent's user, and a remedy. None: users are separate."""
    user = f"tasks of all tenants run as user {user_name(os.geteuid())} and can read all files of this user"
    if not settings.tasks.separate_tenants:
        return f"{user}: tasks.separate_tenants is false in the settings"
    why = why_not_separate(folder, (settings.tasks.first_uid, settings.tasks.uids))
    if why is None:
        return None
    what = "start mizzen as root, or" if os.geteuid() != 0 else "install mizzen where every user can read it, or"
    return f"{user}: {why}; {what} set run_as for its machines"


def _config(**values: Any) -> AgentConfig:
    try:
        return AgentConfig(**values)
    except ValidationError as error:
        lines = [f"{'.'.join(str(p) for p in e['loc']) or 'agent'}: {e['msg']}" for e in error.errors()]
        raise ConfigurationError("; ".join(lines)) from None


def _memory_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) << 10
    return 1 << 30
