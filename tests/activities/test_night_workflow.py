"""Whole nights on a real Temporal server: planned, moved, paused, resumed, and started by the schedule."""

import asyncio

import pytest
from temporalio.client import Client

from activities.data.night_schedule import night_schedule, set_schedule
from domain import ids
from infra.config import CopySettings, NightlySettings
from infra.db import outbox
from infra.db.models import Region
from infra.db.nights import Night, NightPause, begin_night
from tests.activities.nights import NIGHT, NightWorld, body, home
from tests.activities.temporal import until
from tests.activities.world import World

SLOW_BYTES_PER_S = 2000.0


@pytest.fixture
def nights(world: World) -> NightWorld:
    """East has GPUs and no tables; its jobs read tables in west."""
    world.settings = world.settings.model_copy(update={"copies": CopySettings(link_bytes_per_s=SLOW_BYTES_PER_S)})
    made = NightWorld(world, at_once=2)
    for region in ("east", "west"):
        made.region(region)
    world.machine("east/c/m", 4)
    for table in ("a", "b", "c"):
        made.table(table, "west")
        made.usage(f"job-{table}", table)
    return made


def _begin(nights: NightWorld) -> None:
    with nights.world.session() as session:
        if session.get(Night, NIGHT) is None:
            begin_night(session, NIGHT, 3600.0, dry_run=False)
        outbox.night(session, NIGHT)


async def _ended(nights: NightWorld) -> Night:
    def night() -> Night | None:
        with nights.world.session() as session:
            row: Night | None = session.get(Night, NIGHT)
            return row if row is not None and row.ended_at is not None else None

    found: Night = await until(night, "the night ends", 90.0)
    return found


async def test_a_night_from_its_plan_to_its_end(nights: NightWorld, running: Client) -> None:
    """Tables move to the region whose GPUs run their jobs."""
    _begin(nights)
    night = await _ended(nights)
    assert (night.state, night.problem) == ("ended", None)
    assert nights.homes() == dict.fromkeys("abc", "east")
    assert set(nights.states()) == {"done"}
    for table in "abc":
        for day in ("ds=1", "ds=2"):
            assert nights.world.bucket("east").get(f"tables/{table}/{day}/part-0") == body(table, day)


async def test_a_catalogue_that_does_not_suffice(nights: NightWorld, running: Client) -> None:
    """If the catalogue lacks a value, the night fails and names it."""
    nights.world.alter(Region, "west", storage_bytes=None)
    _begin(nights)
    night = await _ended(nights)
    assert night.state == "failed" and str(night.problem).startswith("storage_bytes of region west: is not set")


async def test_a_pause_stops_what_is_being_copied_and_resuming_goes_on(nights: NightWorld, running: Client) -> None:
    """No move makes progress during a pause; after it all moves are completed."""
    nights.night(*(home(table, "west", "east") for table in "abc"))
    with nights.world.session() as session:
        session.add(NightPause(by="ops"))
    _begin(nights)
    await asyncio.sleep(1.0)
    assert nights.states() == ["waiting"] * 3
    _pause(nights, False)
    await until(lambda: "copying" in nights.states(), "a move begins")
    _pause(nights, True)
    await asyncio.sleep(1.0)
    before = nights.states()
    assert "copying" in before
    await asyncio.sleep(1.0)
    assert nights.states() == before
    _pause(nights, False)
    assert (await _ended(nights)).state == "ended"
    assert nights.homes() == dict.fromkeys("abc", "east")


def _pause(nights: NightWorld, paused: bool) -> None:
    with nights.world.session() as session:
        if paused:
            session.add(NightPause(by="ops"))
        else:
            session.delete(session.get_one(NightPause, True))
        outbox.night(session, NIGHT)


async def test_the_schedule_is_as_the_settings_say(client: Client) -> None:
    """The schedule is created once and updated with the settings; a schedule that an operator paused stays paused."""
    nightly = NightlySettings(start="03:30", time_zone="Europe/Berlin", jitter_s=60, catch_up_s=600)
    handle = client.get_schedule_handle(ids.NIGHT_SCHEDULE_ID)
    try:
        await set_schedule(client, NightlySettings())
        await handle.pause(note="release")
        await set_schedule(client, nightly)
        found = (await handle.describe()).schedule
        assert found.state.paused and found.state.note == "release"
        assert found.spec.time_zone_name == "Europe/Berlin" and found.spec.jitter == night_schedule(nightly).spec.jitter
        (calendar,) = found.spec.calendars
        assert (calendar.hour[0].start, calendar.minute[0].start) == (3, 30)
        assert found.policy.overlap.name == "SKIP" and found.policy.catchup_window.total_seconds() == 600
        await set_schedule(client, NightlySettings(start=None))
        assert (await handle.describe()).schedule.spec.calendars == []
    finally:
        await handle.delete()
