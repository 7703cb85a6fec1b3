"""backlog: the CPU time that 5,000 pending workloads cost while idle, and the cost of submitting and cancelling them.

`mizzen up` runs with default settings, on a fleet of one machine with one GPU, which one workload holds throughout. All
other workloads request that GPU, so each is pending with a reason. One run measures on the same Temporal server:

1. CPU seconds of the process tree of `mizzen up` over an idle period with an empty queue.
2. 8 threads POST 5,000 workloads; CPU until all outbox messages are delivered.
3. CPU over an idle period of the same length with these workloads pending, and the time of `GET /queue` for all.
4. 8 threads cancel the workloads, one request each: the time from the first request until every row is `cancelled`, and
   until none of their workflows runs.
5. 5,000 bare workflows on the same server, which wait for a signal, are signalled and complete: the time from the first
   signal to the last result. Their worker is a separate process that is not part of the tree.

CPU is the user and system time of every process of the tree, including ended ones, from /proc.

    python -m bench.backlog --pending 500 --idle-s 30      # a short form
"""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click
from sqlalchemy import func, select
from temporalio.client import Client as Temporal

from bench import bare
from bench.harness import Bench, Figure, InvalidBenchmark, Line, Suite
from infra.config.services import TemporalSettings
from infra.config.settings import load_settings
from infra.db.logs import Outbox
from infra.db.models import Machine, Workload
from infra.db.session import open_engine, transaction
from infra.stack.ports import free_port
from infra.stack.postgres import EmbeddedPostgres
from infra.stack.supervisor import dies_with_parent
from infra.temporal_client import connect
from mizzen_client import Client

CLIENTS = 8
_AT_ONCE = 200
"""Bare workflows that are started or signalled concurrently."""
_PATIENCE_S = 1800.0
_READS = 5
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
FLEET = """
version: 1
regions:
  - name: east
    clusters:
      - name: a
        machines: [{name: m, gpus: 1, gpu_type: a100, cpus: 8, memory: 16GiB}]
"""
PARTS = {
    "temporal": "start-dev",
    "worker": "server worker",
    "api": "server api",
    "agents": "server agents",
    "postgres": "postgres",
}
"""A substring of the command line for each part of the stack."""


@dataclass(frozen=True)
class BacklogSizes:
    """The number of workloads, and the durations of the measurement."""

    pending: int = 5000
    idle_s: float = 300.0
    settle_s: float = 60.0
    """Pause before each idle period."""


def cpu_s(root: int) -> dict[str, float]:
    """Returns the CPU seconds that the process tree of `root` has used so far, by part, and in total as `all`."""
    found: dict[int, tuple[int, float, str]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            found[int(entry.name)] = int(fields[1]), sum(map(int, fields[11:15])) / _TICKS_PER_S, command
    children: dict[int, list[int]] = {}
    for pid, (parent, _, _) in found.items():
        children.setdefault(parent, []).append(pid)
    out = dict.fromkeys([*PARTS, "rest", "all"], 0.0)

    def add(pid: int, part: str) -> None:
        _, seconds, command = found[pid]
        # Child processes belong to the part of their parent, whatever their command line is.
        part = part if part != "rest" else next((p for p, word in PARTS.items() if word in command), "rest")
        out[part] += seconds
        out["all"] += seconds
        for child in children.get(pid, ()):
            add(child, part)

    add(root, "rest")
    return out


def _less(after: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    return {part: after[part] - before[part] for part in after}


class BacklogStack:
    """A `mizzen up` in a separate process."""

    def __init__(self, folder: Path, exit_: ExitStack, fleet: str = FLEET, machines: int = 1) -> None:
        """Starts the stack, and waits until its machines are ready. `fleet`: the text of a file with `machines`."""
        port = free_port()
        self.data = folder / "data"
        (folder / "fleet.yaml").write_text(fleet)
        command = [*dies_with_parent(), sys.executable, "-m", "server", "up", "--data-dir", str(self.data)]
        command += ["--fleet", str(folder / "fleet.yaml"), "--port", str(port)]
        self._log = (folder / "up.log").open("w+")
        self.process = subprocess.Popen(command, stdout=self._log, stderr=self._log, start_new_session=True)
        exit_.callback(self._stop)
        self.url = f"http://127.0.0.1:{port}"
        self.until(lambda: "mizzen is up" in (folder / "up.log").read_text(), 120.0)
        self.temporal = load_settings(self.data / "run" / "settings.yaml").temporal
        self.address = self.temporal.address or ""
        self.engine = open_engine(EmbeddedPostgres(self.data / "postgres").url)
        exit_.callback(self.engine.dispose)
        self.key = (self.data / "operator.key").read_text().strip()
        self.until(lambda: self.count(select(Machine.id).where(Machine.state == "ready")) == machines)
        self._exit = exit_

    def start_bare_worker(self) -> None:
        """Starts the worker of the bare workflows; only when they begin, since its polls cost Temporal CPU time."""
        worker = subprocess.Popen([*dies_with_parent(), sys.executable, "-m", "bench.bare", self.address])
        self._exit.callback(worker.wait)
        self._exit.callback(worker.terminate)

    def _stop(self) -> None:
        for _ in range(2):  # The second signal skips the wait for the running workload.
            self.process.send_signal(signal.SIGINT)
            time.sleep(1.0)
        self.process.wait(120.0)

    def client(self) -> Client:
        """Returns a client with the operator's key."""
        return Client(self.url, self.key)

    def count(self, rows: Any) -> int:
        """Returns the number of rows of a select."""
        with transaction(self.engine) as session:
            return int(session.scalar(select(func.count()).select_from(rows.subquery())) or 0)

    def until(self, holds: Callable[[], bool], patience_s: float = _PATIENCE_S) -> None:
        """Waits until `holds` returns True.

        Raises:
            InvalidBenchmark: `mizzen up` ended, or `patience_s` have passed.
        """
        give_up_s = time.monotonic() + patience_s
        while not holds():
            if time.monotonic() > give_up_s or self.process.poll() is not None:
                self._log.seek(0)
                raise InvalidBenchmark(
                    f"mizzen up has ended, or {patience_s:.0f} s have passed; log: {self._log.read()[-500:]}"
                )
            time.sleep(0.1)

    def in_threads(self, work: Callable[[Client, int], object], count: int) -> None:
        """Calls `work` with 0 to `count` - 1 in 8 threads, which share a client."""
        with self.client() as client, ThreadPoolExecutor(CLIENTS) as threads:
            for done in [threads.submit(work, client, k) for k in range(count)]:
                done.result()

    def idle(self, sizes: BacklogSizes) -> dict[str, float]:
        """Returns the CPU seconds of an idle period, by part."""
        time.sleep(sizes.settle_s)
        before = cpu_s(self.process.pid)
        time.sleep(sizes.idle_s)
        return _less(cpu_s(self.process.pid), before)


def document(name: str, run: str = "true") -> dict[str, Any]:
    """Returns the document of a workload with one task that requests the GPU."""
    resources = {"accelerators": "a100:1", "cpus": 0.1, "memory": "16MiB"}
    job = {"name": "main", "tasks": 1, "resources": resources, "run": run}
    return {"version": 1, "name": name, "tenant": "t", "jobs": [job]}


async def _bare(address: str, count: int) -> float:
    """Starts `count` bare workflows, and returns the seconds to signal them until all have completed."""
    client: Temporal = await connect(TemporalSettings(address=address))
    batch = uuid.uuid4().hex[:8]
    gate = asyncio.Semaphore(_AT_ONCE)

    async def start(k: int) -> None:
        async with gate:
            await client.start_workflow("Signalled", id=f"{batch}-{k}", task_queue=bare.QUEUE)

    async def end(k: int) -> None:
        async with gate:
            handle = client.get_workflow_handle(f"{batch}-{k}")
            await handle.signal("end")
            await handle.result()

    await asyncio.gather(*(start(k) for k in range(count)))
    await asyncio.sleep(5.0)
    began_s = time.perf_counter()
    await asyncio.gather(*(end(k) for k in range(count)))
    return time.perf_counter() - began_s


async def _running(address: str) -> int:
    client: Temporal = await connect(TemporalSettings(address=address))
    return (await client.count_workflows("WorkflowType = 'WorkloadWorkflow' AND ExecutionStatus = 'Running'")).count


LINES = (
    Line("idle CPU with pending workloads over that with an empty queue", 1.5),
    Line("idle CPU with an empty queue, of a core", 0.03),
    Line("time to cancel over bare workflows signalled", 0.5),
    Line("minutes until the cancelled workloads' workflows have ended, of 5", 1.0),
    Line("CPU seconds per POST", None),
    Line("CPU seconds per cancelled workload", None),
    Line("seconds of GET /queue", None),
)


def measure(sizes: BacklogSizes, say: Callable[[str], None]) -> Iterator[Figure]:
    """Yields the figures of all lines, from one round."""
    shown: dict[str, float | str] = {
        "pending": sizes.pending, "idle_s": sizes.idle_s, "settle_s": sizes.settle_s, "clients": CLIENTS,
    }  # fmt: skip

    def figure(line: int, ratio: float, absolute: Mapping[str, float]) -> Figure:
        return Figure("backlog", LINES[line], ratio, absolute, 1, shown)

    with tempfile.TemporaryDirectory(prefix=".bench-", dir=Path.cwd()) as name, ExitStack() as exit_:
        say("starting the stack")
        stack = BacklogStack(Path(name), exit_)
        with stack.client() as client:
            client.set_tenant("t", 3, {}, None)
            client.submit(document("holder", "sleep 1000000"))
        stack.until(lambda: stack.count(select(Workload.id).where(Workload.phase == "running")) == 1)
        waiting = select(Workload.id).where(Workload.name.startswith("w-"))
        say("idle, empty queue")
        empty = stack.idle(sizes)
        yield figure(1, empty["all"] / sizes.idle_s, {f"{part}_s": s for part, s in empty.items()})
        say("POSTs")
        before = cpu_s(stack.process.pid)
        began_s = time.perf_counter()
        stack.in_threads(lambda c, k: c.submit(document(f"w-{k}")), sizes.pending)
        posted_s = time.perf_counter() - began_s
        stack.until(lambda: stack.count(select(Outbox.id).where(Outbox.delivered_at.is_(None))) == 0)
        posts = {part: s / sizes.pending for part, s in _less(cpu_s(stack.process.pid), before).items()}
        yield figure(4, posts["all"], {f"{part}_s": s for part, s in posts.items()} | {"took_s": posted_s})
        say("idle, workloads pending")
        full = stack.idle(sizes)
        if stack.count(waiting.where(Workload.phase == "pending")) != sizes.pending:
            raise InvalidBenchmark("not all workloads are pending")
        both = {"pending_s": full["all"], "empty_s": empty["all"]} | {f"pending_{p}_s": s for p, s in full.items()}
        yield figure(0, full["all"] / empty["all"], both)
        with stack.client() as client:
            took = []
            for _ in range(_READS):
                began_s = time.perf_counter()
                client.queue(limit=sizes.pending)
                took.append(time.perf_counter() - began_s)
        yield figure(6, median(took), {"fastest_s": min(took), "slowest_s": max(took)})
        say("cancellations")
        with transaction(stack.engine) as session:
            ids = list(session.scalars(waiting.order_by(Workload.id)))
        before = cpu_s(stack.process.pid)
        began_s = time.perf_counter()
        stack.in_threads(lambda c, k: c.cancel(ids[k]), sizes.pending)
        asked_s = time.perf_counter() - began_s
        stack.until(lambda: stack.count(waiting.where(Workload.phase == "cancelled")) == sizes.pending)
        cancelled_s = time.perf_counter() - began_s
        stack.until(lambda: asyncio.run(_running(stack.address)) <= 1)
        ended_s = time.perf_counter() - began_s
        cancels = {part: s / sizes.pending for part, s in _less(cpu_s(stack.process.pid), before).items()}
        yield figure(5, cancels["all"], {f"{part}_s": s for part, s in cancels.items()})
        yield figure(3, ended_s / 300.0, {"ended_s": ended_s})
        say("bare workflows")
        stack.start_bare_worker()
        bare_s = asyncio.run(_bare(stack.address, sizes.pending))
        yield figure(2, cancelled_s / bare_s, {"cancelled_s": cancelled_s, "bare_s": bare_s, "requests_s": asked_s})


def run(bench: Bench) -> Iterator[Figure]:
    """Yields the figures of all lines at full size, from one round, which takes a quarter of an hour."""
    yield from measure(BacklogSizes(), bench.say)


SUITE = Suite("backlog", LINES, run)


@click.command()
@click.option("--pending", type=click.IntRange(min=1), default=BacklogSizes.pending, show_default=True)
@click.option("--idle-s", type=click.FloatRange(min=1), default=BacklogSizes.idle_s, show_default=True)
@click.option("--settle-s", type=click.FloatRange(min=0), default=BacklogSizes.settle_s, show_default=True)
def main(pending: int, idle_s: float, settle_s: float) -> None:
    """Measures with other sizes, and prints one figure per line as JSON."""
    for figure in measure(
        BacklogSizes(pending, idle_s, settle_s), lambda text: click.echo(f"backlog: {text}", err=True)
    ):
        print(figure.to_json(), flush=True)


if __name__ == "__main__":
    main()
