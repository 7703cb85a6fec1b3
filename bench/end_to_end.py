"""end-to-end: 500 workloads of one task from POST to finished on the embedded stack.

The baseline is 500 bare workflows with one activity on the same Temporal server (`bench.bare`), from the start of the
first to the result of the last. The stack is that of `mizzen up`: API, worker, Postgres, Temporal and the agents of 13
machines, each a process on this computer. The worker of the bare workflows is one more process. A workload's task is
`true`, and all 500 workloads fit at once. 8 threads POST them. The measurement ends when Postgres has the last one as
finished. The processes of the baseline are idle during the measurement, and vice versa.

The latency for one user is measured on the same stack: workloads are POSTed at a fixed rate, 1 and 10 per second. A
latency is the time from the POST until the attempt began to run, by Postgres's clock, which is this computer's. The
baseline is the time of a bare workflow from start to result, at the same rate. Latencies are measured in one round.
"""

import asyncio
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, func, select
from temporalio.client import Client as Temporal

from bench import bare
from bench.harness import Bench, Figure, InvalidBenchmark, Line, Suite, interleave, medians
from infra.config.services import ApiSettings, TemporalSettings
from infra.config.settings import Settings
from infra.db.models import Attempt, Machine, Workload
from infra.db.session import open_engine, transaction
from infra.stack.embedded import EmbeddedStack
from infra.stack.fleet import ClusterEntry, Fleet, MachineEntry, RegionEntry
from infra.stack.lock import data_folder
from infra.stack.ports import free_port
from infra.stack.supervisor import Child, dies_with_parent
from infra.temporal_client import connect
from mizzen_client import Client

WORKLOADS, CLIENTS = 500, 8
RATES = {1: 30, 10: 200}
"""Number of arrivals for each rate in arrivals per second."""
PERCENTILES = 50, 99
MACHINES, CPUS = 13, 4
"""40 tasks fit on a machine, which is also the number of ports for the first tasks of jobs."""
_PATIENCE_S = 600.0
_LOOK_S = 0.25
"""Interval at which conditions are checked. A check costs as much as a hundredth of a workload or more."""
_MACHINES = MachineEntry(name="m", count=MACHINES, cpus=CPUS, memory=64 << 30)
FLEET = Fleet(
    regions=(RegionEntry(name="r", clusters=(ClusterEntry(name="c", machines=(_MACHINES,)),)),),
)


def document(name: str) -> dict[str, Any]:
    """Returns the document of a workload with one trivial task."""
    job = {"name": "main", "tasks": 1, "resources": {"cpus": 0.1, "memory": "16MiB"}, "run": "true"}
    return {"version": 1, "name": name, "tenant": "t", "jobs": [job]}


class EndToEndStack:
    """An embedded stack on a data folder, with the worker of the bare workflows."""

    def __init__(self, folder: Path) -> None:
        settings = Settings(data_dir=folder, api=ApiSettings(port=free_port()))
        self.embedded = EmbeddedStack(settings, FLEET, folder, lambda _: None)
        self.temporal: Temporal
        self.engine: Engine

    async def start(self) -> None:
        """Starts the stack, and waits for its machines."""
        await self.embedded.start()
        address = self.embedded.settings.temporal.address or ""
        command = [*dies_with_parent(), sys.executable, "-m", "bench.bare", address]
        log = self.embedded.data_dir / "run" / "log" / "bare.log"
        await self.embedded.supervisor.start(Child("bare", command, log, signal.SIGTERM))
        self.temporal = await connect(TemporalSettings(address=address))
        self.engine = open_engine(self.embedded.database_url)
        await self._until(lambda: self._count(select(Machine).where(Machine.state == "ready")) == MACHINES)
        with Client(self.embedded.api_url, self.embedded.operator_key) as client:
            await asyncio.to_thread(client.set_tenant, "t", 3, {}, None)

    async def stop(self) -> None:
        """Stops all processes."""
        hurry = asyncio.Event()
        hurry.set()
        await self.embedded.stop(hurry=hurry)

    def _count(self, rows: Any) -> int:
        with transaction(self.engine) as session:
            return int(session.scalar(select(func.count()).select_from(rows.subquery())) or 0)

    async def _until(self, holds: Callable[[], bool]) -> None:
        give_up_s = time.monotonic() + _PATIENCE_S
        while not await asyncio.to_thread(holds):
            if time.monotonic() > give_up_s:
                raise InvalidBenchmark(f"a condition was not met within {_PATIENCE_S:.0f} s")
            await asyncio.sleep(_LOOK_S)

    async def workloads(self) -> float:
        """Returns the workloads per second.

        Raises:
            InvalidBenchmark: a workload did not succeed.
        """
        batch = uuid.uuid4().hex[:8]
        mine = select(Workload).where(Workload.name.startswith(batch))
        start_s = time.perf_counter()
        with Client(self.embedded.api_url, self.embedded.operator_key) as client:
            threads = ThreadPoolExecutor(CLIENTS)
            try:
                posts = [threads.submit(client.submit, document(f"{batch}-{k}")) for k in range(WORKLOADS)]
                await self._until(lambda: all(post.done() for post in posts))
            finally:
                threads.shutdown(cancel_futures=True)
        for post in posts:
            post.result()
        await self._until(lambda: self._count(mine.where(Workload.finished_at.is_not(None))) == WORKLOADS)
        took_s = time.perf_counter() - start_s
        succeeded = self._count(mine.where(Workload.phase == "succeeded"))
        if succeeded != WORKLOADS:
            raise InvalidBenchmark(f"{succeeded} of {WORKLOADS} workloads succeeded")
        return WORKLOADS / took_s

    async def bare(self) -> float:
        """Returns the bare workflows per second."""
        batch = uuid.uuid4().hex[:8]
        start_s = time.perf_counter()
        await asyncio.gather(
            *(
                self.temporal.execute_workflow("Bare", id=f"{batch}-{k}", task_queue=bare.QUEUE)
                for k in range(WORKLOADS)
            )
        )
        return WORKLOADS / (time.perf_counter() - start_s)

    async def running_after_s(self, rate: int) -> list[float]:
        """Returns the seconds from POST to running of each workload at a rate, sorted."""
        batch = uuid.uuid4().hex[:8]
        began_s: dict[str, float] = {}
        with Client(self.embedded.api_url, self.embedded.operator_key) as client:

            async def post(k: int) -> None:
                name = f"{batch}-{k}"
                began_s[name] = time.time()
                await asyncio.to_thread(client.submit, document(name))

            await _at_rate(rate, post)
        mine = select(Workload).where(Workload.name.startswith(batch))
        await self._until(lambda: self._count(mine.where(Workload.finished_at.is_not(None))) == RATES[rate])
        with transaction(self.engine) as session:
            started = session.execute(
                select(Workload.name, Attempt.started_at)
                .join(Attempt, Attempt.workload == Workload.id)
                .where(Workload.name.startswith(batch), Attempt.attempt == 1)
            ).all()
        if len(started) != RATES[rate] or any(at is None for _, at in started):
            raise InvalidBenchmark(f"not all {RATES[rate]} workloads ran")
        return sorted(at.timestamp() - began_s[name] for name, at in started if at is not None)

    async def bare_after_s(self, rate: int) -> list[float]:
        """Starts empty workflows at a rate per second; returns the seconds from start to result of each, sorted."""
        batch, took_s = uuid.uuid4().hex[:8], []

        async def execute(k: int) -> None:
            began_s = time.time()
            await self.temporal.execute_workflow("Bare", id=f"{batch}-{k}", task_queue=bare.QUEUE)
            took_s.append(time.time() - began_s)

        await _at_rate(rate, execute)
        return sorted(took_s)


async def _at_rate(rate: int, work: Callable[[int], Coroutine[None, None, None]]) -> None:
    """Calls `work` with 0, 1 and so on, one call every 1 / `rate` seconds, without waiting for earlier calls."""
    first_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for k in range(RATES[rate]):
            await asyncio.sleep(max(0.0, first_s + k / rate - time.perf_counter()))
            group.create_task(work(k))


def _percentile(ordered: list[float], percent: int) -> float:
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


def _felt(runner: asyncio.Runner, stack: EndToEndStack, rate: int) -> Iterator[Figure]:
    ours, theirs = runner.run(stack.running_after_s(rate)), runner.run(stack.bare_after_s(rate))
    for percent in PERCENTILES:
        running_s, bare_s = _percentile(ours, percent), _percentile(theirs, percent)
        line = SUITE.line(_line(percent, rate))
        sizes: dict[str, float | str] = {"arrivals": RATES[rate], "per_s": rate}
        yield Figure(SUITE.name, line, running_s / bare_s, {"running_s": running_s, "bare_s": bare_s}, 1, sizes)


def _line(percent: int, rate: int) -> str:
    return f"P{percent} from POST to running over a bare workflow's, at {rate} a second"


def run(bench: Bench) -> Iterator[Figure]:
    """Yields the throughput over several rounds, then the latencies."""
    bench.say("starting the stack")
    with (
        tempfile.TemporaryDirectory(prefix=".bench-", dir=Path.cwd()) as name,
        data_folder(Path(name)) as folder,
        asyncio.Runner() as runner,
    ):
        stack = EndToEndStack(folder)
        try:
            runner.run(stack.start())
            things = {
                "workloads_per_s": lambda: runner.run(stack.workloads()),
                "bare_workflows_per_s": lambda: runner.run(stack.bare()),
            }
            found = medians(interleave(bench, things))
            felt: list[Figure] = []
            for rate in RATES:
                bench.say(f"{rate} arrivals per second")
                felt += _felt(runner, stack, rate)
        finally:
            runner.run(stack.stop())
    sizes = {"workloads": WORKLOADS, "machines": MACHINES, "clients": CLIENTS}
    ratio = found["workloads_per_s"] / found["bare_workflows_per_s"]
    yield Figure(SUITE.name, SUITE.lines[0], ratio, found, bench.rounds, sizes)
    yield from felt


SUITE = Suite(
    "end-to-end",
    (
        Line("workloads over bare workflows", 0.5, True),
        *(Line(_line(percent, rate), None) for rate in RATES for percent in PERCENTILES),
    ),
    run,
)
