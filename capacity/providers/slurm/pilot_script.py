"""The batch script of a pilot, and the file with its secrets."""

import shlex
from collections.abc import Iterator
from pathlib import Path

from capacity.provider import LaunchRequest
from capacity.providers.agent_command import agent_flags
from capacity.providers.slurm.jobs import native_id
from capacity.providers.slurm.settings import SlurmPartition, SlurmSettings
from domain import agent_exits
from domain.ids import is_name

_PORTS_EACH, _RANGES = 40, 250
"""Pilots on one node have different ranges of ports, unless the numbers of their jobs are equal modulo `_RANGES`."""


def secrets_file(settings: SlurmSettings, owner: str, instance: str) -> Path:
    """Returns the file with the secrets of a pilot that has not started.

    `owner` names provider and installation: several providers and installations may share the folder.
    """
    return settings.folder / f"{owner}.{instance}.env"


def secrets_files(settings: SlurmSettings, owner: str) -> Iterator[tuple[str, Path]]:
    """Yields the instances of all such files of an owner, each with its file."""
    for file in sorted(settings.folder.glob(f"{owner}.*.env")):
        yield file.name.removeprefix(f"{owner}.").removesuffix(".env"), file


def secrets(request: LaunchRequest) -> str:
    """Returns the content of that file."""
    return (
        f"export MIZZEN_JOIN_TOKEN={shlex.quote(request.join_token)}\n"
        f"export MIZZEN_TEMPORAL_API_KEY={shlex.quote(request.machine_key)}\n"
    )


def options(settings: SlurmSettings, request: LaunchRequest, comment: str) -> dict[str, str]:
    """Returns the options of `sbatch`; the value of a flag is empty."""
    of, machine = settings.partitions[request.offer.zone], settings.machine_types[request.offer.shape.machine_type]
    gres = machine.gres or (f"gpu:{machine.gpus}" if machine.gpus else None)
    features = "&".join(feature for feature in (of.constraint, machine.constraint) if feature)
    given = {
        "job-name": request.instance,
        "comment": comment,
        "partition": partition_of(request.offer.zone, of),
        "time": str(of.minutes),
        "nodes": "1",
        "ntasks": "1",
        "cpus-per-task": str(-int(-machine.cpus // 1)),
        "mem": f"{machine.memory >> 20}M",
        "gres": gres,
        "constraint": features or None,
        "account": of.account,
        "qos": of.qos,
        "licenses": of.licenses,
        "reservation": of.reservation,
        "exclude": of.exclude,
        # Without `B:` every process of every step would get it, and die.
        "signal": f"B:USR1@{settings.leave_s:.0f}",
        "export": "NONE",
        "output": str(settings.folder / f"{request.instance}.log"),
        "open-mode": "append",
        "chdir": "/",
    }
    flags = {"no-requeue": "", **({"exclusive": ""} if machine.exclusive else {})}
    return flags | {name: value for name, value in given.items() if value is not None}


def partition_of(zone: str, of: SlurmPartition) -> str:
    """Returns Slurm's name of the partition of a zone."""
    return of.partition or zone


def _in_ledger(instance: str) -> list[str]:
    return [
        f"export MIZZEN_INSTANCE={shlex.quote(instance)}",
        f"export MIZZEN_NATIVE_ID={native_id('$SLURM_JOB_ID', instance)}",
    ]


def script(settings: SlurmSettings, request: LaunchRequest, with_secrets: Path) -> str:
    """Returns the batch script. It contains no secret: Slurm stores scripts, and shows them to operators."""
    assert is_name(request.instance)
    file = shlex.quote(str(with_secrets))
    lines = [
        "#!/bin/sh",
        "set -eu",
        "umask 077",
        f'[ "${{SLURM_RESTART_COUNT:-0}}" -eq 0 ] || exit {agent_exits.RESTARTED}',
        # The signal of `--signal` may come while the agent starts. It is only a hint, and must not end the job.
        "trap '' USR1",
        # A second job of this instance finds no file, and ends.
        f"[ -r {file} ] || exit {agent_exits.NO_SECRETS}",
        f". {file}",
        f"rm -f {file}",
        *(_in_ledger(request.instance) if request.join_token else []),
        f"export MIZZEN_SLURM_SIGNAL=B:USR1@{settings.leave_s:.0f}",
        f"export MIZZEN_NOTICE_WINDOW_S={settings.kill_wait_s:g}",
        *([settings.prepare.strip()] if settings.prepare.strip() else []),
        f"first=$((20000 + SLURM_JOB_ID % {_RANGES} * {_PORTS_EACH}))",
        f'state="{settings.state_dir}/mizzen-$SLURM_JOB_ID"',
        f'more="--platform slurm --once --state-dir $state --ports $first-$((first + {_PORTS_EACH - 1}))"',
        f'more="$more --address {settings.address}"',
        f"exec {settings.agent} {agent_flags(request)} $more",
    ]
    return "\n".join(lines) + "\n"
