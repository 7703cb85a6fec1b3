"""Random damage around a placement run, judged by the buckets: the last good copy is never deleted, and every home is
repaired.

One campaign has tables with random homes and replicas, all verified. Objects are deleted, truncated and flipped before,
during and after a placement run of random moves; every partition always keeps one good copy. A complete scrub, repairs,
a second placement run and the judgement follow. `make chaos-copies` runs 20 campaigns of 10 damages each.
"""

import os
import random
from collections import Counter
from collections.abc import Iterator

import pytest
from sqlalchemy import select, update
from temporalio.client import Client
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from activities.data.removal import RemovalActivities
from activities.data.scrub import ScrubActivities
from domain.phases import Phase
from domain.placement_runs import MoveOrder, NextMove
from domain.protocol.data import ReplicateTable, Scrub
from domain.protocol.workloads import StageRequest
from infra.db import integrity
from infra.db.logs import Outbox
from infra.db.placement_runs import PlacementRun
from infra.db.tables import Replica, Table
from tests.activities.damages import DAMAGES
from tests.activities.placement_runs import DAYS, PlacementWorld, body, home
from tests.activities.world import World, job

ROUNDS = int(os.environ.get("MIZZEN_CHAOS_ROUNDS", "0"))
CAMPAIGNS = 2 * ROUNDS or 1
DAMAGES_EACH = 10
TABLES = 6
REGIONS = ("east", "north", "west")


class Campaign:
    """One installation, its damages, and the checks after each step."""

    def __init__(self, placement_runs: PlacementWorld, client: Client, seed: int) -> None:
        self.placement_runs, self.world, self.client = placement_runs, placement_runs.world, client
        self.rng = random.Random(seed)
        self.done: Counter[str] = Counter()
        self.violations: list[str] = []
        self._known_wrong: set[tuple[str, str]] = set()
        """Copies that were damaged when the last scrub read them, and have not been repaired since."""
        for region in REGIONS:
            placement_runs.region(region)
            self.world.machine(f"{region}/c/m", 62)
        for number in range(TABLES):
            order = self.rng.sample(REGIONS, 3)
            placement_runs.table(f"t{number}", *order[: self.rng.randint(2, 3)])
        with self.world.session() as session:
            session.execute(update(Replica).values(made_by="placement_run"))
        self.scrub()

    # ------------------------------------------------------------------------------------------ contents of buckets

    def good(self, table: str, day: str, region: str) -> bool:
        """Returns whether a bucket holds a partition, byte for byte."""
        store, key = self.world.bucket(region), f"tables/{table}/{day}/part-0"
        return store.size(key) is not None and store.get(key) == body(table, day)

    def copies(self, table: str, day: str) -> list[str]:
        """Returns the regions whose buckets hold a partition, byte for byte."""
        return [region for region in REGIONS if self.good(table, day, region)]

    def judge(self, after: str) -> None:
        """Records a violation if a partition has lost its last good copy."""
        for table in self.tables():
            for day in DAYS:
                if not self.copies(table, day):
                    self.violations.append(f"{table}/{day}: the last good copy is gone after {after}")

    # ------------------------------------------------------------------------------------------------------- damage

    def damage(self, when: str) -> None:
        """Damages one random object, if fewer than `DAMAGES_EACH` damages were made and another good copy remains."""
        if self.done.total() >= DAMAGES_EACH:
            return
        table, day = self.rng.choice(self.tables()), self.rng.choice(DAYS)
        copies = self.copies(table, day)
        if len(copies) < 2:
            return
        region, damage = self.rng.choice(copies), self.rng.choice(DAMAGES)
        damage(self.world.bucket(region), f"tables/{table}/{day}/part-0")
        self.done[f"{damage.__name__} {when} in a {'home' if self.homes()[table] == region else 'replica'}"] += 1

    # --------------------------------------------------------------------------------------------- actions of mizzen

    def tables(self) -> list[str]:
        return sorted(self.homes())

    def homes(self) -> dict[str, str]:
        return self.placement_runs.homes()

    def scrub(self) -> None:
        """Runs a complete scrub of all regions."""
        with self.world.session() as session:
            asked_at = integrity.clock(session)
            session.execute(update(Replica).values(verify_asked_at=asked_at))
        before = {(t, r) for t in self.tables() for r in REGIONS if not all(self.good(t, d, r) for d in DAYS)}
        for region in REGIONS:
            ActivityEnvironment().run(ScrubActivities(self.world.engine, self.world.settings).scrub, Scrub(region))
        self._known_wrong = before

    def repair(self) -> None:
        """Runs the requested copies; a copy that fails is tried again."""
        for _ in range(3):
            with self.world.session() as session:
                mails = session.scalars(select(Outbox).where(Outbox.kind == "replicate")).all()
                due = sorted({(m.body["table"], m.body["target"]) for m in mails if m.delivered_at is None})
            for table, target in due:
                self.copy(ReplicateTable(table, "", target), "a repair")
        with self.world.session() as session:
            session.execute(update(Outbox).where(Outbox.kind == "replicate").values(delivered_at=Outbox.created_at))

    def copy(self, request: ReplicateTable, what: str, damaged: bool = False) -> str | None:
        """Copies a table, and may damage objects meanwhile; returns the error message, or None."""
        environment = ActivityEnvironment()

        def beat(*_: object) -> None:
            if damaged and self.rng.random() < 0.5:
                self.damage("during a copy")

        environment.on_heartbeat = beat
        try:
            environment.run(self.placement_runs.copies.copy_table, request)
        except ApplicationError as error:
            return error.message
        finally:
            self.judge(what)
        return None

    async def remove(self) -> None:
        """Runs one round of housekeeping's deletions."""
        await ActivityEnvironment().run(RemovalActivities(self.world.engine, self.client).remove)
        self.judge("a round of deletions")

    def placement_run(self, name: str, damaged: bool) -> None:
        """Runs a placement run of random moves, one after the other."""
        moves = []
        for table, at in sorted(self.homes().items()):
            kind = self.rng.choice(["home", "home", "drop", "replica", None])
            target = self.rng.choice([region for region in REGIONS if region != at])
            if kind is not None:
                moves.append({**home(table, at, target), "kind": kind})
        self.placement_runs.placement_run(*moves, placement_run=name)
        while not (order := self.placement_runs.moves.next_move(NextMove(name, 0))).over:
            self._move(name, order, damaged)
        with self.world.session() as session:
            session.get_one(PlacementRun, name).state = "ended"

    def _move(self, name: str, order: MoveOrder, damaged: bool) -> None:
        for _ in range(20):
            if damaged:
                self.damage("in a placement run")
            request = ReplicateTable(order.table, order.source_region, order.target_region, "nightly")
            problem = self.copy(request, "a move's copy", damaged)
            if damaged and self.rng.random() < 0.3:
                self.damage("before a switch")
            finished = self.placement_runs.finish(order, problem, placement_run=name)
            self.judge("a switch")
            if finished:
                return
        self.violations.append(f"{order.table}: its move does not end")

    def start_jobs(self) -> None:
        """Starts a job for each table; none may start on a copy that the last scrub found damaged."""
        started = {self.world.submit(job(), tables=(table,)): table for table in self.tables()}
        self.world.tick()
        for workload, table in started.items():
            row = self.world.workload(workload)
            if row.region is None:
                continue
            self.world.launch.stage(StageRequest(workload, row.attempt))
            whole = all(self.good(table, day, row.region) for day in DAYS)
            if not whole and (table, row.region) in self._known_wrong:
                self.violations.append(f"{table}: a job started on the wrong copy in {row.region}")
            self.world.run(workload)
            self.world.release(workload, Phase.SUCCEEDED)


@pytest.fixture
def campaign(world: World, client: Client, seed: int) -> Iterator[Campaign]:
    yield Campaign(PlacementWorld(world, grace_s=0.0), client, seed)


@pytest.mark.rotating
@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(CAMPAIGNS))
async def test_damage_never_costs_the_last_good_copy(campaign: Campaign, seed: int) -> None:
    """Random damage around a placement run never deletes the last good copy, and after two placement runs all homes are
    good.
    """
    while campaign.done.total() < DAMAGES_EACH // 3:
        campaign.damage("before a placement run")
    campaign.placement_run("run-1", damaged=True)
    for _ in range(40):
        campaign.damage("after a placement run")
    await campaign.remove()
    campaign.scrub()
    campaign.start_jobs()
    for _ in range(2):
        campaign.repair()
        await campaign.remove()
    campaign.start_jobs()
    campaign.placement_run("run-2", damaged=False)
    campaign.repair()
    await campaign.remove()
    print(f"seed {seed}: {dict(sorted(campaign.done.items()))}")
    assert campaign.done.total() == DAMAGES_EACH
    with campaign.world.session() as session:
        for row in session.scalars(select(Table).order_by(Table.name)):
            replica = session.get_one(Replica, (row.name, row.home_region))
            wrong = [day for day in DAYS if not campaign.good(row.name, day, row.home_region)]
            if wrong or replica.wrong_since is not None:
                campaign.violations.append(
                    f"{row.name}: its home {row.home_region} is wrong after two placement runs: {wrong}"
                )
    assert campaign.violations == []
