"""reclaim-now: the time from the start of the command `mizzen reclaim --now` until no task runs on the GPU.

`mizzen up` runs with a separate `mizzen agent` with 16 GPUs. On each GPU a workload runs that ignores SIGTERM. The
owner takes one GPU at a time, each with a new process of the command: half of them while the installation works, and
half after SIGKILL to every process of `mizzen up` (the API, Temporal, Postgres and the worker). A task has ended when
its process has; this is polled each millisecond.

    python -m bench.reclaim_now
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from statistics import median

import click
from sqlalchemy import select

from agent.processes import with_run_ids
from agent.shim import descendants
from agent.state import StateFolder
from agent.tasks import RunFolder, TaskState, inspect
from bench import backlog
from bench.harness import Bench, Figure, InvalidBenchmark, Line, Suite
from infra.db.models import Machine, Workload
from infra.stack.supervisor import dies_with_parent

GPUS = 16
LINES = (
    Line("seconds from the command to no task, everything else down (median)", 1.0),
    Line("seconds from the command to no task, everything up (median)", 1.0),
    Line("the same, everything else down, of the time of `mizzen version`", None),
)
_COMMAND = Path(sys.executable).parent / "mizzen"
_PATIENCE_S = 60.0


def _agent(stack: backlog.BacklogStack, folder: Path, exit_: ExitStack) -> Path:
    """Starts the agent of a machine with `GPUS` GPUs; returns its state folder."""
    state = folder / "agent"
    bucket = (stack.data / "buckets" / "east").resolve().as_uri()
    command = [
        *dies_with_parent(), sys.executable, "-m", "server", "agent", "--temporal", stack.address,
        "--payload-keys", str(stack.temporal.payload_keys), "--region", "east",
        "--cluster", "lent", "--name", "m", "--gpus", str(GPUS), "--gpu-type", "lent", "--cpus", "16", "--memory",
        "16GiB", "--bucket", bucket, "--state-dir", str(state), "--owner", str(os.getuid()),
    ]  # fmt: skip
    with (folder / "agent.log").open("w") as log:
        agent = subprocess.Popen(command, stdout=log, stderr=log)
    exit_.callback(agent.wait)
    exit_.callback(agent.terminate)
    ready = select(Machine.id).where(Machine.id == "east/lent/m", Machine.state == "ready")
    stack.until(lambda: stack.count(ready) == 1)
    return state


def _document(number: int) -> dict[str, object]:
    resources = {"accelerators": "lent:1", "cpus": 0.1, "memory": "16MiB"}
    run = "trap '' TERM; while :; do sleep 1000; done"
    job = {"name": "main", "tasks": 1, "resources": resources, "run": run}
    return {"version": 1, "name": f"w-{number}", "tenant": "t", "jobs": [job]}


def _runs(state: Path) -> dict[int, RunFolder]:
    """Returns the running task of each GPU."""
    found = {}
    for attempt in StateFolder(state).attempts():
        launch = attempt.launch()
        for place in () if launch is None else launch.tasks:
            run = attempt.run(place.job, place.task)
            if inspect(run) is TaskState.RUNNING:
                found[place.slots[0]] = run
    return found


def _reclaim_s(state: Path, gpu: int, run: RunFolder) -> float:
    """Returns the seconds from the start of the command until the task has ended."""
    identities = run.identities()
    assert identities is not None
    command = [str(_COMMAND), "reclaim", "--now", "--gpus", str(gpu), "--socket", str(state / "owner.sock")]
    began_s = time.perf_counter()
    owner = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while identities[1].alive():
        if time.perf_counter() > began_s + _PATIENCE_S:
            raise InvalidBenchmark(f"the task on GPU {gpu} did not end within {_PATIENCE_S:.0f} s")
        time.sleep(0.001)
    took_s = time.perf_counter() - began_s
    if owner.wait(_PATIENCE_S) != 0 or with_run_ids({run.run_id}):
        raise InvalidBenchmark(f"the command failed, or processes of the task on GPU {gpu} are left")
    return took_s


def _version_s() -> float:
    began_s = time.perf_counter()
    subprocess.run([str(_COMMAND), "version"], capture_output=True, check=False, timeout=_PATIENCE_S)
    return time.perf_counter() - began_s


def measure(say: Callable[[str], None]) -> Iterator[Figure]:
    """Yields the figures of all lines."""
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=Path.cwd()) as name, ExitStack() as exit_:
        folder = Path(name)
        say("starting the stack")
        stack = backlog.BacklogStack(folder, exit_)
        state = _agent(stack, folder, exit_)
        with stack.client() as client:
            client.set_tenant("t", 3, {"lent": GPUS}, None)
            for number in range(GPUS):
                client.submit(_document(number))
        running = select(Workload.id).where(Workload.phase == "running")
        stack.until(lambda: stack.count(running) == GPUS and len(_runs(state)) == GPUS, 120.0)
        runs = _runs(state)
        say("everything up")
        up = [_reclaim_s(state, gpu, runs[gpu]) for gpu in range(GPUS // 2)]
        say("everything else down")
        tree = {stack.process.pid, *descendants({stack.process.pid})}
        for pid in tree:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        down = [_reclaim_s(state, gpu, runs[gpu]) for gpu in range(GPUS // 2, GPUS)]
        version_s = median(_version_s() for _ in range(GPUS // 2))

        def figure(line: int, ratio: float, times: list[float]) -> Figure:
            shown = {"median_s": median(times), "slowest_s": max(times), "version_s": version_s}
            return Figure("reclaim-now", LINES[line], ratio, shown, len(times), {"gpus": GPUS})

        yield figure(0, median(down), down)
        yield figure(1, median(up), up)
        yield figure(2, median(down) / version_s, down)


def run(bench: Bench) -> Iterator[Figure]:
    """Yields the figures of all lines, from one round."""
    yield from measure(bench.say)


SUITE = Suite("reclaim-now", LINES, run)


@click.command()
def main() -> None:
    """Measures, and prints one figure per line as JSON."""
    for figure in measure(lambda text: click.echo(f"reclaim-now: {text}", err=True)):
        print(figure.to_json(), flush=True)


if __name__ == "__main__":
    main()
