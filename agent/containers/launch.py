"""Builds the container of a task from the launch description: its image, command, environment, files and limits."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mizzen
import mizzen_client
from agent.config import AgentConfig
from agent.containers.engine import (
    FOLDER_LABEL,
    MACHINE_LABEL,
    RUN_LABEL,
    Container,
    Image,
    container_name,
)
from agent.isolation import task_paths
from agent.launch import DEFAULT_PATH, Owner
from agent.sandbox import FOLDERS
from agent.tasks import RunFolder
from domain.launch import JobLaunch, LaunchDescription, TaskPlace

_INSIDE = "/run/mizzen"
"""Folder in containers with the SDK for images that have Python and no mizzen."""
_SHELL = 'if command -v bash >/dev/null; then exec bash -e "$0"; else exec sh -e "$0"; fi'
_NO_GPUS = "void"
"""Value of `NVIDIA_VISIBLE_DEVICES` for a container without GPUs. Images of CUDA set it to all of them."""
_TMPFS = "rw,nosuid,nodev,mode=1777"


def container_of(
    config: AgentConfig,
    *,
    launch: LaunchDescription,
    runs: Sequence[RunFolder],
    run: RunFolder,
    place: TaskPlace,
    image: Image,
    env: Mapping[str, str],
    owner: Owner | None,
    gpus: tuple[str, ...],
    paths: Sequence[str],
) -> dict[str, Any]:
    """Returns `TaskLaunch.container` of the task `run`, without limits. `runs` are the attempt's tasks on the machine.

    `image` is what the engine says about the job's image, and `env` the complete environment of the task. `gpus` are
    ids of the GPUs that the attempt holds: each of its tasks may copy between them. `paths` is as `AgentConfig.paths`.
    """
    reads, writes = task_paths(launch, runs, paths)
    private = run.path.parent / "private"
    mounts = {path: (os.path.realpath(path), False) for path in reads}
    mounts |= {path: (os.path.realpath(path), True) for path in writes}
    mounts |= {place: (str(private / name), True) for name, place in FOLDERS.items()}
    mounts |= {path: (str(own), True) for path, own in run.mounted(launch.jobs[place.job].mounts).items()}
    for package in (mizzen, mizzen_client):
        mounts[f"{_INSIDE}/sdk/{package.__name__}"] = str(Path(str(package.__file__)).parent), False
    mounts[f"{_INSIDE}/python"] = str(Path(__file__).parent / "inside"), False
    uid, gid = (owner.uid, owner.gid) if owner is not None else (os.geteuid(), os.getegid())
    tmpfs = {path: _TMPFS for path in image.volumes if path not in mounts}
    container = Container(
        name=container_name(run.run_id),
        image=image.id,
        argv=command(launch.jobs[place.job], run),
        env=_environment(env, image) | {"NVIDIA_VISIBLE_DEVICES": ",".join(gpus) or _NO_GPUS},
        cwd=str(run.work),
        user=f"{uid}:{gid}",
        groups=tuple(map(str, owner.groups)) if owner is not None else (),
        mounts=mounts,
        tmpfs=tmpfs,
        labels={
            RUN_LABEL: run.run_id,
            MACHINE_LABEL: config.machine,
            FOLDER_LABEL: str(run.path),
        },
        gpus=gpus,
        shm_bytes=sum(other.memory_bytes for other in launch.on_machine(config.machine)),
    )
    return {
        "socket": str(config.engine_socket),
        "private": str(private),
        "shared": len(runs) > 1,
        "spec": container.to_json(),
    }


def command(job: JobLaunch, run: RunFolder) -> tuple[str, ...]:
    """Returns the command of a task with an image; empty: that of the image.

    A script without an interpreter in its first line is run by the image's bash, or sh.
    """
    if job.script is None:
        return job.argv
    first = job.script.partition("\n")[0]
    if first.startswith("#!") and (interpreter := first[2:].strip().split(maxsplit=1)):
        return (*interpreter, str(run.script))
    return ("/bin/sh", "-c", _SHELL, str(run.script))


def _environment(env: Mapping[str, str], image: Image) -> dict[str, str]:
    """Returns the variables to add to those of the image, whose own PATH counts unless the document sets one."""
    out = {name: value for name, value in env.items() if (name, value) != ("PATH", DEFAULT_PATH)}
    if "PATH" not in out and "PATH" not in image.env:
        out["PATH"] = DEFAULT_PATH
    theirs = out.get("PYTHONPATH", image.env.get("PYTHONPATH", ""))
    # Ours first: it runs the `sitecustomize` of the image, which would not run ours.
    out["PYTHONPATH"] = f"{_INSIDE}/python:{theirs}" if theirs else f"{_INSIDE}/python"
    return out
