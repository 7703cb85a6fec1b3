"""The start delay of a task in a sandbox, compared with no sandbox, and in a container, compared with `docker run`.

It is measured from the request to the agent's zygote, or the call of `docker run`, to the task's first output.
"""

import itertools
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agent import tasks
from agent.containers.engine import FOLDER_LABEL, MACHINE_LABEL, RUN_LABEL, Container, container_name
from agent.isolation import TENANT_UIDS
from agent.launch import TaskLaunch
from agent.sandbox_view import bubblewrap, sandbox_command
from agent.tasks import RunFolder
from bench.container_engine import DockerHere, NoEngineError, dockerd
from bench.harness import Bench, Figure, InvalidBenchmark, Line, Suite, interleave, medians

_ROOT = os.geteuid() == 0
_LIMIT_S = 0.05 if _ROOT else 0.08
_STARTS = 50
_COMMAND = ("/bin/sh", "-c", "echo; sleep 0.05")
_CONTAINER_S = 0.2
SANDBOX_LINE = Line(f"first task of an attempt in a sandbox, {'root' if _ROOT else 'ordinary user'}", 1.0)
CONTAINER_LINE = Line("task in a container, over the engine's own run", 1.0)
_IMAGE = "bench-shell:1"


def _run_folder(folder: Path, number: int) -> RunFolder:
    run = RunFolder(folder / f"wl-{number}.1" / "main.0", f"wl-{number}", 1, "main", 0)
    run.work.mkdir(parents=True)
    run.report.parent.mkdir()
    return run


def _start(run: RunFolder, **how: Any) -> float:
    """Returns the seconds until a task that is the first of its attempt has written; it ends before this returns."""
    uid = TENANT_UIDS[0] if _ROOT else None
    launch = TaskLaunch(
        argv=_COMMAND, env={"PATH": "/usr/bin:/bin", "MIZZEN_RUN_ID": run.run_id}, cwd=str(run.work),
        output=str(run.output), grace_s=5.0, uid=uid, gid=uid, **how,
    )  # fmt: skip
    began_s = time.perf_counter()
    tasks.start(run, launch)
    while not run.output.stat().st_size:
        if (end := run.exit()) is not None and not run.output.stat().st_size:
            raise InvalidBenchmark(f"the task has written nothing: {end}")
        time.sleep(0.0002)
    took_s = time.perf_counter() - began_s
    while run.exit() is None or (run.path.parent / "private").exists():
        time.sleep(0.002)
    return took_s


def _sandboxed(run: RunFolder) -> float:
    private, program = run.path.parent / "private", bubblewrap()
    if program is None:
        raise InvalidBenchmark("bubblewrap is not installed")
    command = sandbox_command(program, private, reads=[str(run.path)], writes=[str(run.work)])
    return _start(run, sandbox={"folder": str(private), "command": command})


def _contained(run: RunFolder, here: DockerHere) -> float:
    uid = TENANT_UIDS[0] if _ROOT else os.getuid()
    container = Container(
        name=container_name(run.run_id), image=_IMAGE, argv=_COMMAND, env={}, cwd="/", user=f"{uid}:{uid}",
        mounts={str(run.work): (str(run.work), True)}, tmpfs={},
        labels={RUN_LABEL: run.run_id, MACHINE_LABEL: "bench", FOLDER_LABEL: str(run.path)},
    )  # fmt: skip
    private = str(run.path.parent / "private")
    spec = {"socket": str(here.socket), "private": private, "shared": False, "spec": container.to_json()}
    return _start(run, container=spec)


def _own_run(here: DockerHere) -> float:
    command = ["docker", "-H", f"unix://{here.socket}", "run", "--rm", "--network", "host", _IMAGE, *_COMMAND]
    began_s = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        return time.perf_counter() - began_s


def _run(bench: Bench) -> Iterator[Figure]:
    folder, numbers = Path(tempfile.mkdtemp(dir="/var/tmp")), itertools.count()
    folder.chmod(0o755)

    def new() -> RunFolder:
        return _run_folder(folder, next(numbers))

    def figure(line: Line, base: str, own: str, limit_s: float, found: dict[str, float]) -> Figure:
        more_s = found[own] - found[base]
        absolute = {**found, "more_s": more_s}
        return Figure("task-start", line, more_s / limit_s, absolute, _STARTS, {"starts": _STARTS, "limit_s": limit_s})

    times = Bench(_STARTS, bench.say)
    try:
        things = {"none_s": lambda: _start(new()), "sandbox_s": lambda: _sandboxed(new())}
        found = medians(interleave(times, things, warm_ups=3))
        yield figure(SANDBOX_LINE, "none_s", "sandbox_s", _LIMIT_S, found)
        try:
            with dockerd() as here:
                here.load(_IMAGE)
                things = {"docker_run_s": lambda: _own_run(here), "container_s": lambda: _contained(new(), here)}
                found = medians(interleave(times, things, warm_ups=3))
            yield figure(CONTAINER_LINE, "docker_run_s", "container_s", _CONTAINER_S, found)
        except NoEngineError as error:
            bench.say(f"task-start: no containers: {error}")
    finally:
        shutil.rmtree(folder)


SUITE = Suite("task-start", (SANDBOX_LINE, CONTAINER_LINE), _run)
