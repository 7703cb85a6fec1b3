"""Workers are killed at random during a placement run's moves: every table always has a complete copy at its home."""

import os
import random
from pathlib import Path

import pytest
from sqlalchemy import select
from temporalio.client import Client
from temporalio.testing import ActivityEnvironment

from activities.data.removal import RemovalActivities
from activities.lifecycle.housekeeping import HousekeepingActivities
from infra.config.data import CopySettings
from infra.db import outbox
from infra.db.placement_runs import PlacementRun, begin_placement_run
from infra.db.tables import Replica, Table
from mizzen.objects import ObjectStore
from tests.activities.placement_runs import PlacementWorld, body, home
from tests.activities.victims import victim
from tests.activities.world import World

ROUNDS = int(os.environ.get("MIZZEN_CHAOS_ROUNDS", "0"))
KILLS = 20 * ROUNDS
TABLES = 6 * ROUNDS
REGIONS = ("east", "north", "west")
LINK_BYTES_PER_S = 40_000.0
LONGEST_RUN_S = 3.0


@pytest.fixture
def placement_runs(world: World, temporal_address: str, database_url: str) -> PlacementWorld:
    """Three regions, and tables for the placement runs to move."""
    temporal = world.settings.temporal.model_copy(update={"address": temporal_address})
    copies = CopySettings(link_bytes_per_s=LINK_BYTES_PER_S, keep_unfinished_s=0.001)
    world.settings = world.settings.model_copy(
        update={"temporal": temporal, "copies": copies, "database": database_url}
    )  # fmt: skip
    made = PlacementWorld(world, at_once=8, grace_s=0.0, start=None)
    for region in REGIONS:
        made.region(region)
    for number in range(TABLES):
        made.table(f"t{number}", REGIONS[number % 3])
    return made


def _begin(placement_runs: PlacementWorld, placement_run: str, rng: random.Random) -> None:
    """Begins a placement run in which every table moves to another region."""
    homes = placement_runs.homes()
    moves = [
        home(table, homes[table], rng.choice([r for r in REGIONS if r != homes[table]])) for table in sorted(homes)
    ]
    placement_runs.placement_run(*moves, placement_run=placement_run)
    with placement_runs.world.session() as session:
        outbox.placement_run(session, placement_run)


def _over(placement_runs: PlacementWorld, placement_run: str) -> bool:
    with placement_runs.world.session() as session:
        return bool(session.get_one(PlacementRun, placement_run).state == "ended")


def _judge(placement_runs: PlacementWorld, days: dict[str, list[str]]) -> None:
    """Checks that each table's home holds every byte of every partition."""
    with placement_runs.world.session() as session:
        found = {row.name: row.home_region for row in session.scalars(select(Table))}
        ready = set(session.execute(select(Replica.data_table, Replica.region).where(Replica.state == "ready")).all())
    assert set(found) == set(days)
    for table, region in found.items():
        assert (table, region) in ready
        bucket = placement_runs.world.bucket(region)
        for day in days[table]:
            assert bucket.get(f"tables/{table}/{day}/part-0") == body(table, day)


def _names(store: ObjectStore) -> set[str]:
    """Returns the paths of all files, including those that a listing omits."""
    root = Path(store.uri("").removeprefix("file://"))
    return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}


@pytest.mark.chaos
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not ROUNDS, reason="takes minutes; run `make chaos`")
async def test_moves_that_are_killed_lose_nothing_and_leave_nothing(
    placement_runs: PlacementWorld, client: Client, checkout: Path
) -> None:
    """Workers are killed while tables move and grow: no byte is lost, and the next run leaves no stray file."""
    rng = random.Random(ROUNDS)
    days = {table: ["ds=1", "ds=2"] for table in placement_runs.homes()}
    placement_run, kills, done = 0, 0, 0
    with victim(placement_runs.world.settings, REGIONS, checkout) as run:
        while kills < KILLS:
            placement_run += 1
            _begin(placement_runs, f"run-{placement_run}", rng)
            while kills < KILLS and not _over(placement_runs, f"run-{placement_run}"):
                run(rng.random() * LONGEST_RUN_S)
                kills += 1
                table = rng.choice(sorted(days))
                days[table].append(f"ds={kills + 2}")
                placement_runs.append(table, days[table][-1])
                _judge(placement_runs, days)
            done += placement_runs.states(f"run-{placement_run}").count("done")
        run(None, lambda: _over(placement_runs, f"run-{placement_run}"))
        _judge(placement_runs, days)
        assert done or placement_runs.states(f"run-{placement_run}").count("done")
        with placement_runs.world.session() as session:
            begin_placement_run(session, "next", 3600.0, dry_run=False)
            outbox.placement_run(session, "next")
        run(None, lambda: _over(placement_runs, "next"))
        _judge(placement_runs, days)
    house = HousekeepingActivities(placement_runs.world.engine, placement_runs.world.settings)
    ActivityEnvironment().run(house.expire)
    removal = RemovalActivities(placement_runs.world.engine, client)
    for _ in range(2):  # the first round may end a workflow that is still copying
        await ActivityEnvironment().run(removal.remove)
    with placement_runs.world.session() as session:
        kept = session.execute(select(Replica.data_table, Replica.region, Replica.state)).all()
    assert {state for *_, state in kept} == {"ready"}
    for region in REGIONS:
        expected = {f"tables/{t}/{day}/part-0" for t, r, _ in kept if r == region for day in days[t]}
        assert {name for name in _names(placement_runs.world.bucket(region)) if name.startswith("tables/")} == expected
