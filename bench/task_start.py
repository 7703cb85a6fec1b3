"""How much later a task starts in a sandbox: from the request to the agent's zygote until the task's first output."""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from agent import tasks
from agent.isolation import TENANT_UIDS
from agent.launch import TaskLaunch
from agent.sandbox_view import bubblewrap, sandbox_command
from agent.tasks import RunFolder
from bench.harness import Bench, Figure, InvalidBenchmark, Line, Suite, interleave, medians

_ROOT = os.geteuid() == 0
_LIMIT_S = 0.05 if _ROOT else 0.08
_STARTS = 50
SUITE_LINE = Line(f"first task of an attempt, {'root' if _ROOT else 'ordinary user'}", 1.0)


def _start(folder: Path, number: int, *, sandboxed: bool) -> float:
    """Returns the seconds until a task that is the first of its attempt has written; it ends before this returns."""
    run = RunFolder(folder / f"wl-{number}.1" / "main.0", f"wl-{number}", 1, "main", 0)
    run.work.mkdir(parents=True)
    run.report.parent.mkdir()
    private, sandbox, program = run.path.parent / "private", None, bubblewrap()
    if sandboxed:
        if program is None:
            raise InvalidBenchmark("bubblewrap is not installed")
        command = sandbox_command(program, private, reads=[str(run.path)], writes=[str(run.work)])
        sandbox = {"folder": str(private), "command": command}
    uid = TENANT_UIDS[0] if _ROOT else None
    launch = TaskLaunch(
        argv=("/bin/sh", "-c", "echo; sleep 0.05"), env={"PATH": "/usr/bin:/bin", "MIZZEN_RUN_ID": run.run_id},
        cwd=str(run.work), output=str(run.output), grace_s=5.0, uid=uid, gid=uid, sandbox=sandbox,
    )  # fmt: skip
    began_s = time.perf_counter()
    tasks.start(run, launch)
    while not run.output.stat().st_size:
        time.sleep(0.0002)
    took_s = time.perf_counter() - began_s
    while run.exit() is None or private.exists():
        time.sleep(0.002)
    return took_s


def _run(bench: Bench) -> Iterator[Figure]:
    folder, number = Path(tempfile.mkdtemp(dir="/var/tmp")), 0
    folder.chmod(0o755)

    def measured(*, sandboxed: bool) -> float:
        nonlocal number
        number += 1
        return _start(folder, number, sandboxed=sandboxed)

    try:
        things = {"none_s": lambda: measured(sandboxed=False), "sandbox_s": lambda: measured(sandboxed=True)}
        found = medians(interleave(Bench(_STARTS, bench.say), things, warm_ups=3))
    finally:
        shutil.rmtree(folder)
    more_s = found["sandbox_s"] - found["none_s"]
    absolute = {**found, "more_s": more_s}
    yield Figure(
        "task-start", SUITE_LINE, more_s / _LIMIT_S, absolute, _STARTS, {"starts": _STARTS, "limit_s": _LIMIT_S}
    )


SUITE = Suite("task-start", (SUITE_LINE,), _run)
