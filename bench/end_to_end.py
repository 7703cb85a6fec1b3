"""end-to-end: 500 workloads of one task from POST to finished on the embedded stack.

Against 500 bare workflows with one activity on the same Temporal server (`bench.bare`): from the start of the first to
the result of the last. The stack is `mizzen up`'s: API, worker, Postgres, Temporal and the agents of 13 machines, each
a process, on this computer; the bare workflows' worker is one more process. A workload's task is `true`; all 500 fit at
once. They are POSTed by 8 threads, and have finished when Postgres says so of the last. While one thing is measured the
others' processes wait.
"""

import asyncio
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, func, select
from temporalio.client import Client as Temporal

from bench import bare
from bench.harness import Bench, Figure, Line, Suite, Unfit, interleave, medians
from infra.config import ApiSettings, Settings, TemporalSettings
from infra.db.models import Machine, Workload
from infra.db.session import open_engine, transaction
from infra.stack.embedded import EmbeddedStack
from infra.stack.fleet import ClusterEntry, Fleet, MachineEntry, RegionEntry
from infra.stack.lock import data_folder
from infra.stack.ports import free_port
from infra.stack.supervisor import Child, dies_with_parent
from infra.temporal_client import connect
from mizzen.client import Client

WORKLOADS, CLIENTS = 500, 8
MACHINES, CPUS = 13, 4
"""40 tasks fit on a machine: as many as it has ports for the tasks that lead a job."""
_PATIENCE_S = 600.0
_MACHINES = MachineEntry(name="m", count=MACHINES, cpus=CPUS, memory=64 << 30)
FLEET = Fleet(
    regions=(RegionEntry(name="r", clusters=(ClusterEntry(name="c", machines=(_MACHINES,)),)),),
)


def document(name: str) -> dict[str, Any]:
    """A workload of one trivial task."""
    job = {"name": "main", "tasks": 1, "resources": {"cpus": 0.1, "memory": "16MiB"}, "run": "true"}
    return {"version": 1, "name": name, "tenant": "t", "jobs": [job]}


class Stack:
    """An embedded stack on a data folder, with the bare workflows' worker beside it."""

    def __init__(self, folder: Path) -> None:
        ports = [free_port() for _ in range(4)]
        self.settings = Settings(
            data_dir=folder,
            database_port=ports[0],
            temporal=TemporalSettings(port=ports[1], ui_port=ports[2]),
            api=ApiSettings(port=ports[3]),
        )
        self.embedded = EmbeddedStack(self.settings, FLEET, folder, lambda _: None)
        self.temporal: Temporal
        self.engine: Engine

    async def start(self) -> None:
        """Starts it, and waits for its machines."""
        await self.embedded.start()
        address = f"127.0.0.1:{self.settings.temporal.port}"
        command = [*dies_with_parent(), sys.executable, "-m", "bench.bare", address]
        log = self.embedded.data_dir / "run" / "log" / "bare.log"
        await self.embedded.supervisor.start(Child("bare", command, log, signal.SIGTERM))
        self.temporal = await connect(TemporalSettings(address=address))
        self.engine = open_engine(self.embedded.database_url)
        await self._until(lambda: self._count(select(Machine).where(Machine.state == "ready")) == MACHINES)
        with Client(self.embedded.api_url, self.embedded.operator_key) as client:
            await asyncio.to_thread(client.set_tenant, "t", 3, {}, None)

    async def stop(self) -> None:
        """Stops everything."""
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
                raise Unfit(f"not done after {_PATIENCE_S:.0f} s")
            await asyncio.sleep(0.05)

    async def workloads(self) -> float:
        """Workloads a second.

        Raises:
            Unfit: one did not succeed.
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
            raise Unfit(f"{succeeded} of {WORKLOADS} workloads succeeded")
        return WORKLOADS / took_s

    async def bare(self) -> float:
        """Bare workflows a second."""
        batch = uuid.uuid4().hex[:8]
        start_s = time.perf_counter()
        await asyncio.gather(
            *(
                self.temporal.execute_workflow("Bare", id=f"{batch}-{k}", task_queue=bare.QUEUE)
                for k in range(WORKLOADS)
            )
        )
        return WORKLOADS / (time.perf_counter() - start_s)


def run(bench: Bench) -> Iterator[Figure]:
    """One figure."""
    bench.say("starting the stack")
    with (
        tempfile.TemporaryDirectory(prefix=".bench-", dir=Path.cwd()) as name,
        data_folder(Path(name)) as folder,
        asyncio.Runner() as runner,
    ):
        stack = Stack(folder)
        try:
            runner.run(stack.start())
            things = {
                "workloads_per_s": lambda: runner.run(stack.workloads()),
                "bare_workflows_per_s": lambda: runner.run(stack.bare()),
            }
            found = medians(interleave(bench, things))
        finally:
            runner.run(stack.stop())
    sizes = {"workloads": WORKLOADS, "machines": MACHINES, "clients": CLIENTS}
    ratio = found["workloads_per_s"] / found["bare_workflows_per_s"]
    yield Figure(SUITE.name, SUITE.lines[0], ratio, found, bench.rounds, sizes)


SUITE = Suite("end-to-end", (Line("workloads over bare workflows", 0.3, True),), run)
