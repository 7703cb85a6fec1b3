"""Agents as commands start them: one for this machine, or one for each machine of a fleet file."""

import socket
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from agent.config import AgentConfig
from agent.fleet import serve_many
from agent.host import run_agent as run_one
from domain.ids import NAME_RULE, is_name, machine_id
from domain.units import parse_size_bytes
from infra.config import Settings
from infra.errors import ConfigurationError
from infra.stack.fleet import load_fleet

_FIRST_PORT = 20000
_PORTS_EACH = 40
"""Rendezvous ports of each machine where several share this computer's address."""


def machine_state_dir(data_dir: Path, machine: str) -> Path:
    """Where a machine of the embedded fleet keeps its state."""
    return data_dir / "machines" / machine.replace("/", ".")


def run_fleet(settings: Settings, fleet_file: Path) -> None:
    """Runs the agents of all machines of a fleet file until told to stop.

    Raises:
        ConfigurationError: the file is not usable, or has more machines than there are ports for.
    """
    fleet = load_fleet(fleet_file)
    buckets = {r.name: fleet.bucket_url(r, settings.data_dir) for r in fleet.regions}
    configs = []
    for number, machine in enumerate(fleet.machines()):
        entry = machine["entry"]
        first = _FIRST_PORT + number * _PORTS_EACH
        configs.append(
            _config(
                machine=machine["id"],
                region=machine["region"],
                cluster=machine["cluster"],
                rack=entry.rack,
                gpu_type=entry.gpu_type,
                gpus=entry.gpus,
                cpus_milli=round(entry.cpus * 1000),
                memory_bytes=entry.memory,
                address="127.0.0.1",
                ports=(first, first + _PORTS_EACH - 1),
                bucket_url=buckets[machine["region"]],
                state_dir=machine_state_dir(settings.data_dir, machine["id"]),
                attend_interval_s=min(5.0, settings.lifecycle.heartbeat_timeout_s / 4),
            )
        )
    serve_many(configs, settings.temporal, stuck_after_s=settings.liveness.restart_after_s)


def run_agent(settings: Settings, options: dict[str, Any]) -> None:
    """Runs this machine's agent until told to stop. `options` are those of `mizzen agent`.

    Raises:
        ConfigurationError: an option is not usable; it is named.
    """
    name = options["name"] or socket.gethostname().partition(".")[0].lower()
    if not is_name(name):
        raise ConfigurationError(f"--name: {name!r} must be {NAME_RULE}")
    first, _, last = str(options["ports"]).partition("-")
    if not (first.isdigit() and last.isdigit()):
        raise ConfigurationError(f"--ports: {options['ports']!r} must be a range such as 20000-20999")
    if bool(options["gpus"]) != bool(options["gpu_type"]):
        raise ConfigurationError("--gpus and --gpu-type go together: give both, or none on a machine without GPUs")
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
    )
    run_one(config, settings.temporal)


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
