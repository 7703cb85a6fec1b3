"""Whole placement runs on a real Temporal server: planned, moved, paused, resumed, and started by the schedule."""

import asyncio

import pytest
from temporalio.client import Client

from activities.lifecycle.singletons import placement_schedule, set_schedule
from domain import ids
from infra.config.data import CopySettings, NightlySettings
from infra.db import outbox
from infra.db.models import Region
from infra.db.placement_runs import PlacementPause, PlacementRun, begin_placement_run
from tests.activities.placement_runs import PLACEMENT_RUN, PlacementWorld, body, home
from tests.activities.temporal import until
from tests.activities.world import World

SLOW_BYTES_PER_S = 2000.0


@pytest.fixture
def placement_runs(world: World) -> PlacementWorld:
    """East has GPUs and no tables; its jobs read tables in west."""
    world.settings = world.settings.model_copy(update={"copies": CopySettings(link_bytes_per_s=SLOW_BYTES_PER_S)})
    made = PlacementWorld(world, at_once=2)
    for region in ("east", "west"):
        made.region(region)
    world.machine("east/c/m", 4)
    for table in ("a", "b", "c"):
        made.table(table, "west")
        made.usage(f"job-{table}", table)
    return made


def _begin(placement_runs: PlacementWorld) -> None:
    with placement_runs.world.session() as session:
        if session.get(PlacementRun, PLACEMENT_RUN) is None:
            begin_placement_run(session, PLACEMENT_RUN, 3600.0, dry_run=False)
        outbox.placement_run(session, PLACEMENT_RUN)


async def _ended(placement_runs: PlacementWorld) -> PlacementRun:
    def placement_run() -> PlacementRun | None:
        with placement_runs.world.session() as session:
            row: PlacementRun | None = session.get(PlacementRun, PLACEMENT_RUN)
            return row if row is not None and row.ended_at is not None else None

    found: PlacementRun = await until(placement_run, "the placement run ends", 90.0)
    return found


@pytest.mark.rotating
async def test_a_placement_run_from_its_plan_to_its_end(placement_runs: PlacementWorld, running: Client) -> None:
    """Tables move to the region whose GPUs run their jobs."""
    _begin(placement_runs)
    placement_run = await _ended(placement_runs)
    assert (placement_run.state, placement_run.problem) == ("ended", None)
    assert placement_runs.homes() == dict.fromkeys("abc", "east")
    assert set(placement_runs.states()) == {"done"}
    for table in "abc":
        for day in ("ds=1", "ds=2"):
            assert placement_runs.world.bucket("east").get(f"tables/{table}/{day}/part-0") == body(table, day)


async def test_a_catalogue_that_does_not_suffice(placement_runs: PlacementWorld, running: Client) -> None:
    """If the catalogue lacks a value, the placement run fails and names it."""
    placement_runs.world.alter(Region, "west", storage_bytes=None)
    _begin(placement_runs)
    placement_run = await _ended(placement_runs)
    assert placement_run.state == "failed" and str(placement_run.problem).startswith(
        "storage_bytes of region west: is not set"
    )


async def test_a_pause_stops_what_is_being_copied_and_resuming_goes_on(
    placement_runs: PlacementWorld, running: Client
) -> None:
    """No move makes progress during a pause; after it all moves are completed."""
    placement_runs.placement_run(*(home(table, "west", "east") for table in "abc"))
    with placement_runs.world.session() as session:
        session.add(PlacementPause(by="ops"))
    _begin(placement_runs)
    await asyncio.sleep(1.0)
    assert placement_runs.states() == ["waiting"] * 3
    _pause(placement_runs, False)
    await until(lambda: "copying" in placement_runs.states(), "a move begins")
    _pause(placement_runs, True)
    await asyncio.sleep(1.0)
    before = placement_runs.states()
    assert "copying" in before
    await asyncio.sleep(1.0)
    assert placement_runs.states() == before
    _pause(placement_runs, False)
    assert (await _ended(placement_runs)).state == "ended"
    assert placement_runs.homes() == dict.fromkeys("abc", "east")


def _pause(placement_runs: PlacementWorld, paused: bool) -> None:
    with placement_runs.world.session() as session:
        if paused:
            session.add(PlacementPause(by="ops"))
        else:
            session.delete(session.get_one(PlacementPause, True))
        outbox.placement_run(session, PLACEMENT_RUN)


async def test_the_schedule_is_as_the_settings_say(client: Client) -> None:
    """The schedule is created once and updated with the settings; a schedule that an operator paused stays paused."""
    nightly = NightlySettings(start="03:30", time_zone="Europe/Berlin", jitter_s=60, catch_up_s=600)
    handle = client.get_schedule_handle(ids.PLACEMENT_SCHEDULE_ID)
    try:
        await set_schedule(client, NightlySettings())
        await handle.pause(note="release")
        await set_schedule(client, nightly)
        found = (await handle.describe()).schedule
        assert found.state.paused and found.state.note == "release"
        assert (
            found.spec.time_zone_name == "Europe/Berlin"
            and found.spec.jitter == placement_schedule(nightly).spec.jitter
        )
        (calendar,) = found.spec.calendars
        assert (calendar.hour[0].start, calendar.minute[0].start) == (3, 30)
        assert found.policy.overlap.name == "SKIP" and found.policy.catchup_window.total_seconds() == 600
        await set_schedule(client, NightlySettings(start=None))
        assert (await handle.describe()).schedule.spec.calendars == []
    finally:
        await handle.delete()
