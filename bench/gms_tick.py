"""gms-tick: a tick from the change log to awards in Postgres, 100,000 pending, 1% changed, 200 awarded (MAST 4.2, 4.3).

The baseline is the same tick after reading all rows by COPY, as in a process that has just started. A tick is the work
of one round of the workflow, in one process as in the embedded stack: the scan, and for the first batch of 200
workloads the bids of five regions and the awards; all 200 are awarded. Neither line has a bar, because the figures
depend on the disk. The baseline of the second line follows the change log too, but first fetches the same 100,000 rows
by COPY and discards them.

Before each tick 500 workloads are submitted, 300 are cancelled, 200 change their level, and the awarded workloads of
the tick before end; the schedulers that follow the change log catch up with earlier changes. The 500 tenants and the
submission times are from `bench.queues`. Every fifth tenant has no quota, the others have more than they use. A
workload has 1 to 4 tasks (50, 25, 15, 10%) of 8 GPUs, each on its own machine; each region has 200 machines of 8 GPUs.
"""

import itertools
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import psycopg
from sqlalchemy import Engine

from activities.scheduling.auction import AuctionActivities
from activities.scheduling.bids import RegionActivities
from activities.scheduling.decision_rows import SnapshotReader
from activities.scheduling.scheduler_state import SchedulerState
from bench import queues
from bench.harness import Bench, Figure, InvalidBenchmark, Line, Suite, interleave, medians, seconds
from bench.postgres import postgres
from domain.protocol.scheduling import AwardRequest, BidRequest
from domain.spec import JobSpec, ResourceSpec, WorkloadSpec
from infra.config.scheduling import SchedulerSettings
from infra.config.settings import Settings
from infra.db.migrate import upgrade
from infra.db.session import open_engine, transaction

PENDING, TENANTS, AWARDS = 100_000, 500, 200
SUBMITTED, CANCELLED, ALTERED = 500, 300, 200
REGIONS, MACHINES, GPUS = 5, 200, 8
SETTINGS = Settings(data_dir=Path("unused"), scheduler=SchedulerSettings(batch=AWARDS))
_TASKS, _SHARES = (1, 2, 3, 4), (0.5, 0.25, 0.15, 0.1)
_GIB = 1 << 30


def _spec(tasks: int) -> str:
    resources = ResourceSpec(gpus=GPUS, gpu_types=("a100",), cpus_milli=64_000, memory_bytes=512 * _GIB)
    job = JobSpec(name="main", role="main", tasks=tasks, resources=resources, argv=("true",))
    return WorkloadSpec(name="bench", tenant="t000", jobs=(job,)).model_dump_json()


_SPECS = {tasks: _spec(tasks) for tasks in _TASKS}


class Schedulers:
    """The schedulers of one process as in the embedded stack, with their state and activities."""

    def __init__(self, engine: Engine) -> None:
        self.held = SchedulerState(engine, SETTINGS.scheduler)
        self._auction = AuctionActivities(engine, SETTINGS, self.held, [f"r{r}" for r in range(REGIONS)])
        self._region = RegionActivities(engine, self.held)

    def tick(self) -> None:
        """Runs a scan, the bids of all regions on the first batch, and the awards.

        Raises:
            InvalidBenchmark: not all workloads of the batch were awarded.
        """
        ticket = self._auction.scan()
        for region in ticket.regions:
            self._region.bid(BidRequest(region, ticket.scan, 0))
        result = self._auction.award(AwardRequest(ticket.scan, 0, [], 30.0))
        if result.awarded != AWARDS:
            raise InvalidBenchmark(f"{result.awarded} of {AWARDS} workloads were awarded, must be all")


class TickInstallation:
    """An installation whose queue changes from tick to tick."""

    def __init__(self, url: str) -> None:
        self.engine: Engine = open_engine(url)
        upgrade(self.engine)
        self._connection = psycopg.connect(url, autocommit=True)
        self._rng = np.random.default_rng(1)
        self._numbers = itertools.count()
        self._now = datetime.now(UTC)
        self._fill()

    def close(self) -> None:
        """Closes the connections."""
        self._connection.close()
        self.engine.dispose()

    def _fill(self) -> None:
        run = self._connection.execute
        levels = self._rng.choice(7, TENANTS, p=queues.LEVEL_SHARES / queues.LEVEL_SHARES.sum()) + 1
        for t in range(TENANTS):
            quota = "{}" if t % 5 == 4 else '{"a100": 1000000000}'
            run("insert into tenant (name, level, quota_gpus) values (%s, %s, %s)", (f"t{t:03}", int(levels[t]), quota))
        for r in range(REGIONS):
            run("insert into region (name, bucket_url) values (%s, 'file:///unused')", (f"r{r}",))
            run("insert into cluster (region, name) values (%s, 'c')", (f"r{r}",))
        run(
            "insert into machine (id, region, cluster, rack, gpu_type, gpus, cpus_milli, memory_bytes, free_cpus_milli,"
            " free_memory_bytes, state, incarnation, public_key, address)"
            " select format('r%%s/c/m%%s', r, lpad(m::text, 4, '0')), format('r%%s', r), 'c', format('k%%s', m / 16),"
            " 'a100', %s, 96000, %s, 96000, %s, 'ready', 'boot', '', '127.0.0.1'"
            " from generate_series(0, %s) as r, generate_series(0, %s) as m",
            (GPUS, 1024 * _GIB, 1024 * _GIB, REGIONS - 1, MACHINES - 1),
        )
        self._submit(PENDING)
        run("analyze")

    def _submit(self, workloads: int) -> None:
        drawn = queues.draw(self._rng, workloads, TENANTS)
        tasks = self._rng.choice(_TASKS, workloads, p=_SHARES)
        with (
            self._connection.cursor() as cursor,
            cursor.copy("copy workload (id, tenant, name, spec, submitted_at, level) from stdin") as copy,
        ):
            rows = zip(
                drawn.tenant.tolist(), drawn.submitted_at_s.tolist(), drawn.requested_level.tolist(), tasks, strict=True
            )
            for tenant, at_s, requested_level, task in rows:
                id_ = f"wl-{next(self._numbers):016x}"
                at = self._now - timedelta(seconds=queues.NOW_S - at_s)
                copy.write_row((id_, f"t{tenant:03}", id_, _SPECS[int(task)], at, 6 if requested_level else None))

    def copy_and_tick(self, schedulers: Schedulers) -> None:
        """Fetches all rows and discards them, then runs a tick."""
        with transaction(self.engine) as session:
            for _ in SnapshotReader(session).queue():
                pass
        schedulers.tick()

    def change(self) -> None:
        """Changes 1% of the queue, and ends the awarded workloads."""
        run = self._connection.execute
        with self._connection.transaction():
            run("update allocation set released_at = now(), stopped_at = now() where released_at is null")
            run("update attempt set released_at = now() where released_at is null")
            run("update workload set phase = 'succeeded', finished_at = now() where phase = 'placing'")
        waiting = "select id from workload where phase = 'pending' and finished_at is null"
        ids = sorted(row[0] for row in run(waiting).fetchall())
        lot = self._rng.choice(len(ids), CANCELLED + ALTERED, replace=False).tolist()
        gone, altered = [ids[k] for k in lot[:CANCELLED]], [ids[k] for k in lot[CANCELLED:]]
        run("update workload set phase = 'cancelled', finished_at = now() where id = any(%s)", (gone,))
        run("update workload set level = case level when 6 then 7 else 6 end where id = any(%s)", (altered,))
        self._submit(PENDING - len(ids) + CANCELLED)


def run(bench: Bench) -> Iterator[Figure]:
    """Runs the suite, and yields its two figures."""
    bench.say(f"starting Postgres, and inserting {PENDING:,} workloads")
    with postgres() as url:
        installation = TickInstallation(url)
        following = Schedulers(installation.engine)

        def changed(what: Callable[[Schedulers], None], schedulers: Schedulers) -> float:
            if schedulers is following:
                with schedulers.held.current():
                    pass
            installation.change()
            return seconds(lambda: what(schedulers))

        things = {
            "tick_s": lambda: changed(Schedulers.tick, following),
            "reading_all_s": lambda: changed(Schedulers.tick, Schedulers(installation.engine)),
            "copy_and_tick_s": lambda: changed(installation.copy_and_tick, following),
        }
        try:
            found = medians(interleave(bench, things))
        finally:
            installation.close()
    sizes = {"pending": PENDING, "changed": SUBMITTED + CANCELLED + ALTERED, "awarded": AWARDS, "regions": REGIONS}
    for line, name in zip(SUITE.lines, ("reading_all_s", "copy_and_tick_s"), strict=True):
        absolute = {"tick_s": found["tick_s"], name: found[name]}
        yield Figure(SUITE.name, line, found[name] / found["tick_s"], absolute, bench.rounds, sizes)


_LINES = Line("times faster than reading all", None), Line("times faster than a COPY and a tick", None)
SUITE = Suite("gms-tick", _LINES, run)
