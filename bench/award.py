"""award: awards/s of 16 slots in 8 regions concurrently, on Postgres with fsync on (MAST 4.3; one transaction each).

The baseline is commits/s of one row on 8 connections of the same server: each connection, in its own thread, inserts
and commits one short row after the other with a prepared statement. The awards are those of
`activities.scheduling.awards`: an award locks the workload and its machines, checks them, writes the attempt, the
allocations, the phase, its event and the outbox message to the workflow, and commits. Every workload has 16 tasks with
one GPU each, on two machines of 8 GPUs. Each region has its own thread. One award in ten is stale at first: its plan
uses machines that the award before it took, so it is refused, and a second plan is awarded. In a round, each region
awards 64 new workloads on 128 new machines, one transaction each; then 8 connections commit 4,000 rows; then each
region awards 64 others in batches as the auction does: all that are left in one transaction, up to the first stale one.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import psycopg
from sqlalchemy import Engine, insert

from activities.scheduling.awards import Awarded, AwardFailure, PlannedAward, award, connected
from bench.harness import Bench, Figure, InvalidBenchmark, Line, Measured, Suite, interleave, medians
from bench.postgres import postgres
from domain.criteria import PlanQuality
from domain.reasons import Reason, ReasonCode
from domain.scheduling import JobPlacement, Plan
from domain.spec import JobSpec, ResourceSpec, WorkloadSpec
from infra.db.migrate import upgrade
from infra.db.models import Cluster, Machine, Region, Workload
from infra.db.session import open_engine, transaction
from infra.db.tenants import Tenant

REGIONS, AWARDS, GPUS, TASKS = 8, 64, 8, 16
STALE_EVERY = 10
COMMITS = 4000
_GIB = 1 << 30
_RESOURCES = ResourceSpec(gpus=1, gpu_types=("a100",), cpus_milli=4000, memory_bytes=32 * _GIB)
_JOB = JobSpec(name="main", role="main", tasks=TASKS, resources=_RESOURCES, argv=("true",))
_SPEC = WorkloadSpec(name="bench", tenant="t", jobs=(_JOB,))
STALE_NOW = Awarded(0, AwardFailure.STALE)
AwardPlans = list[list[Plan]]
"""The plans of a round, by region."""


def at_once(works: Sequence[Callable[[], None]]) -> float:
    """Runs each function in its own thread, and returns the seconds until all have ended.

    Raises:
        Exception: the first exception of a function.
    """
    ready = threading.Barrier(len(works) + 1)
    errors: list[BaseException] = []

    def thread(work: Callable[[], None]) -> None:
        ready.wait()
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=thread, args=(work,), daemon=True) for work in works]
    for one in threads:
        one.start()
    ready.wait()
    start_s = time.perf_counter()
    try:
        for one in threads:
            one.join()
    except KeyboardInterrupt:
        for one in threads:  # The threads end soon, and need the server until then.
            one.join()
        raise
    took_s = time.perf_counter() - start_s
    if errors:
        raise errors[0]
    return took_s


class AwardInstallation:
    """An installation with 8 regions, to which every round adds workloads and machines."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.engine: Engine = open_engine(url, pool_size=REGIONS)
        upgrade(self.engine)
        self._rounds = 0
        with transaction(self.engine) as session:
            session.add(Tenant(name="t", level=3, quota_gpus={"a100": 1_000_000}))
            session.add_all(Region(name=f"r{r}", bucket_url="file:///unused") for r in range(REGIONS))
            session.flush()
            session.add_all(Cluster(region=f"r{r}", name="c") for r in range(REGIONS))

    def close(self) -> None:
        """Closes the connections."""
        self.engine.dispose()

    def next_round(self) -> AwardPlans:
        """Inserts new machines and workloads, and returns a plan for each workload."""
        self._rounds += 1
        machines, workloads = [], []
        plans: AwardPlans = [[] for _ in range(REGIONS)]
        reason = Reason(ReasonCode.SCAN_PENDING).to_json()
        spec = _SPEC.model_dump(mode="json")
        for r in range(REGIONS):
            for number in range(AWARDS):
                names = [f"r{r}/c/m{self._rounds:03}-{number:03}-{k}" for k in range(TASKS // GPUS)]
                id_ = f"wl-{self._rounds:03}-{r}-{number:03}"
                machines += [_machine(name, f"r{r}") for name in names]
                workloads.append({"id": id_, "tenant": "t", "name": id_, "spec": spec, "reason": reason})
                placement = JobPlacement("main", "c", "a100", tuple((name, GPUS) for name in names))
                quality = PlanQuality(racks=1, machines=len(names))
                plans[r].append(Plan(id_, f"r{r}", (placement,), (), quality))
        with transaction(self.engine) as session:
            session.execute(insert(Machine), machines)
            session.execute(insert(Workload), workloads)
        return plans

    def one_by_one(self, plans: Sequence[Plan]) -> None:
        """Awards one region's plans, one transaction each; before every tenth, a stale plan for it is tried.

        Raises:
            InvalidBenchmark: an award does not have the expected result.
        """
        with connected(self.engine) as connection:
            for late, plan in _tried(plans):
                if late is not None and _award(connection, [late]) != STALE_NOW:
                    raise InvalidBenchmark(f"{late.workload} was awarded machines that another workload holds")
                if _award(connection, [plan]) != Awarded(1):
                    raise InvalidBenchmark(f"{plan.workload} was not awarded")

    def batched(self, plans: Sequence[Plan]) -> None:
        """Awards one region's plans in batches as the auction does: all that are left, up to the first stale one.

        Raises:
            InvalidBenchmark: an award does not have the expected result.
        """
        tried = _tried(plans)
        at = 0
        with connected(self.engine) as connection:
            while at < len(tried):
                done = _award(connection, [late or plan for late, plan in tried[at:]])
                at += done.count
                if done.verdict is None:
                    continue
                late, plan = tried[at]
                if late is None or done.verdict is not AwardFailure.STALE:
                    raise InvalidBenchmark(f"{plan.workload} was not awarded: {done.verdict}")
                tried[at] = (None, plan)


def _award(connection: psycopg.Connection[Any], plans: Iterable[Plan]) -> Awarded:
    return award(connection, (PlannedAward(plan, 3, _SPEC.requests()) for plan in plans))


def _tried(plans: Sequence[Plan]) -> list[tuple[Plan | None, Plan]]:
    """Returns (stale plan, plan) pairs. Every tenth pair has a stale plan, with the machines of the plan before."""
    out: list[tuple[Plan | None, Plan]] = []
    for number, plan in enumerate(plans):
        stale = number % STALE_EVERY == STALE_EVERY - 1
        late = Plan(plan.workload, plan.region, plans[number - 1].jobs, (), plan.quality) if stale else None
        out.append((late, plan))
    return out


def _machine(name: str, region: str) -> dict[str, object]:
    return {
        "id": name, "region": region, "cluster": "c", "rack": "k", "gpu_type": "a100", "gpus": GPUS,
        "cpus_milli": 96_000, "memory_bytes": 1024 * _GIB, "free_cpus_milli": 96_000, "free_memory_bytes": 1024 * _GIB,
        "state": "ready", "incarnation": "boot", "public_key": "", "address": "127.0.0.1",
    }  # fmt: skip


class Commits:
    """The baseline: commits of one row each on 8 connections."""

    def __init__(self, url: str) -> None:
        self._connections = [psycopg.connect(url, autocommit=True) for _ in range(REGIONS)]
        self._connections[0].execute(
            "create table bench (id bigint generated always as identity primary key, body text)"
        )

    def close(self) -> None:
        """Closes the connections."""
        for connection in self._connections:
            connection.close()

    def __call__(self) -> float:
        """Returns the commits per second."""
        return COMMITS / at_once([partial(self._insert, c) for c in self._connections])

    @staticmethod
    def _insert(connection: psycopg.Connection) -> None:
        with connection.cursor() as cursor:
            for _ in range(COMMITS // REGIONS):
                cursor.execute("insert into bench (body) values ('one row')", prepare=True)


def run(bench: Bench) -> Iterator[Figure]:
    """Runs the suite, and yields its two figures."""
    bench.say("starting Postgres")
    with postgres() as url:
        installation, commits = AwardInstallation(url), Commits(url)

        def awards(how: Callable[[Sequence[Plan]], None]) -> float:
            plans = installation.next_round()
            return REGIONS * AWARDS / at_once([partial(how, p) for p in plans])

        things: dict[str, Measured] = {
            "awards_per_s": lambda: awards(installation.one_by_one),
            "commits_per_s": commits,
            "batched_awards_per_s": lambda: awards(installation.batched),
        }
        try:
            found = medians(interleave(bench, things))
        finally:
            commits.close()
            installation.close()
    sizes = {"regions": REGIONS, "awards": REGIONS * AWARDS, "slots": TASKS, "stale": 1 / STALE_EVERY}
    for line, name in zip(SUITE.lines, ("awards_per_s", "batched_awards_per_s"), strict=True):
        absolute = {key: found[key] for key in (name, "commits_per_s")}
        yield Figure(SUITE.name, line, found[name] / found["commits_per_s"], absolute, bench.rounds, sizes)


SUITE = Suite("award", (Line("one transaction each", None), Line("batched", None)), run)
