"""Starts agents: one for this machine, or one for each machine in a fleet file."""

import json
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
from infra.documents import problem_lines
from infra.errors import ConfigurationError
from infra.machine_shape import MachineShape
from infra.stack.embedded import MACHINE_KEYS
from infra.stack.fleet import Fleet, load_fleet
from infra.users import user_name

_log = logging.getLogger(__name__)
_FIRST_PORT = 20000
_PORTS_EACH = 40
"""Number of ports per machine for rendezvous and services, if several machines share this computer's address."""
_OPTIONS = (
    "region", "cluster", "rack", "gpu_type", "gpus", "address", "state_dir", "run_as", "platform", "owner",
    "owner_socket", "interface", "instance",
)  # fmt: skip
"""Options of `mizzen agent` that are fields of `AgentConfig`."""
_TASK_SETTINGS = (
    "private_tmp", "keep_runs_s", "keep_at_most_s", "keep_free", "output_bytes", "keep_stopped_s", "processes_per_task",
    "processes_per_cpu",
)  # fmt: skip
"""Settings of `tasks:` that are fields of `AgentConfig`."""


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
    keys: dict[str, str] = json.loads((settings.data_dir / MACHINE_KEYS).read_text())
    configs = []
    for number, machine in enumerate(fleet.machines()):
        entry = machine["entry"]
        own = {"rack": entry.rack, "bucket_url": buckets[machine["region"]], "owner": entry.owner}
        own |= {"machine_key": keys[machine["id"]]}
        uids = None if entry.run_as else separate
        configs.append(_config_here(settings, machine["id"], entry, number, uids, run_as=entry.run_as, **own))
    clouds = open_clouds(settings)

    def launched() -> list[AgentConfig]:
        found = []
        for place, cloud in enumerate(clouds):
            for one in cloud.started():
                number = len(configs) + one.number * len(clouds) + place
                own = {
                    "rack": one.instance.zone,
                    "bucket_url": one.bucket_url,
                    "platform": "file",
                    "notice_file": cloud.notice_file(one.instance.native_id),
                    "instance": one.instance.token,
                    "join_token": one.join_token,
                    "machine_key": one.machine_key,
                }
                shape = MachineShape.model_validate(one.shape)
                found.append(_config_here(settings, one.machine, shape, number, separate, **own))
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
    tenant_uids: tuple[int, int] | None,
    **more: Any,
) -> AgentConfig:
    """Returns the configuration of a machine on this computer. `number`, unique to it, determines its ports."""
    region, cluster, _ = machine.split("/")
    first = _FIRST_PORT + number * _PORTS_EACH
    return _config(
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
        **_task_options(settings, tenant_uids),
        **more,
    )


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
        **{option: options[option] for option in _OPTIONS},
        machine=machine_id(options["region"], options["cluster"], name),
        cpus_milli=round(options["cpus"] * 1000),
        memory_bytes=memory,
        ports=(int(first), int(last)),
        bucket_url=options["bucket"],
        link_bytes_s=options["link_mbit"] * 125_000,
        # A secret, so it is not passed as a flag, which other users can read, and not inherited by child processes.
        join_token=os.environ.pop("MIZZEN_JOIN_TOKEN", ""),
        **_task_options(settings, None if options["run_as"] else _tenant_uids(settings, Path(options["state_dir"]))),
    )
    if options["rotate_key"]:
        StateFolder(config.state_dir).rotate_key()
    run_one(config, settings.temporal)


def _task_options(settings: Settings, tenant_uids: tuple[int, int] | None) -> dict[str, Any]:
    same = {name: getattr(settings.tasks, name) for name in _TASK_SETTINGS}
    return {**same, "cgroup": settings.tasks.limits, "tenant_uids": tenant_uids}


def _tenant_uids(settings: Settings, folder: Path) -> tuple[int, int] | None:
    """Returns the first user id and the number of user ids for the tasks of tenants.

    If the tasks run as the agent's user, it logs a warning and returns None.
    """
    shared = why_shared(settings, folder)
    if shared is None:
        return settings.tasks.first_uid, settings.tasks.uids
    _log.warning("%s", shared)
    return None


def why_users_are_shared(settings: Settings, fleet: Fleet, data_dir: Path) -> str | None:
    """Returns `why_shared` for machines of a fleet without a user for tasks (`run_as`); None: they are separate."""
    own = [machine for machine in fleet.machines() if machine["entry"].run_as is None]
    return why_shared(settings, data_dir / "machines") if own else None


def why_shared(settings: Settings, folder: Path) -> str | None:
    """Returns one line: why tasks of all tenants run as the agent's user, and a remedy. None: they are separate."""
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
        raise ConfigurationError("; ".join(problem_lines(AgentConfig, error))) from None


def _memory_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) << 10
    return 1 << 30
