"""Transactions of a pass that Postgres refuses: nothing of them stays in the scheduler's memory."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest
from sqlalchemy.exc import DBAPIError

from domain.phases import Phase
from infra.db.models import Workload
from tests.activities.test_scheduler_state import agree
from tests.activities.world import World, job
from tests.sql_faults import CLASSES, failing

_ERRORS = (DBAPIError, psycopg.Error)


@contextmanager
def _fails(world: World, table: str, sqlstate: str, **more: object) -> Iterator[None]:
    url = world.engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
    with failing(url, table, sqlstate, **more):  # type: ignore[arg-type]
        yield


@pytest.fixture
def idle(world: World) -> World:
    """An idle region of four GPUs, and a gang of two tasks that fits."""
    world.region("r")
    world.machine("r/c/m", gpus=4)
    world.submit(job(tasks=2, gpus=2), id_="gang")
    return world


@pytest.mark.rotating
def test_an_award_that_fails_leaves_the_region_idle(idle: World) -> None:
    """After an award transaction ended with an error of any class, the next pass places the gang on the idle region."""
    for attempt, sqlstate in enumerate(CLASSES, 1):
        ticket = idle.bid()
        with _fails(idle, "attempt", sqlstate):
            if sqlstate.startswith("23"):
                assert idle.award(ticket).awarded == 0, "a violated constraint is a plan that does not hold any more"
            else:
                with pytest.raises(_ERRORS):
                    idle.award(ticket)
        assert idle.masks("r/c/m") == (0, 0)
        assert idle.tick().awarded == 1 and idle.waiting("gang") == [], CLASSES[sqlstate]
        assert idle.workload("gang").attempt == attempt
        idle.release("gang", Phase.PREEMPTED)
    agree(idle, idle.scheduler_state)


@pytest.mark.parametrize("sqlstate", ["53100", "57P01", "40001"])
def test_an_award_that_fails_at_its_commit_leaves_the_region_idle(idle: World, sqlstate: str) -> None:
    """The same for an error of the commit."""
    ticket = idle.bid()
    with _fails(idle, "attempt", sqlstate, at_commit=True), pytest.raises(_ERRORS):
        idle.award(ticket)
    assert idle.tick().awarded == 1
    agree(idle, idle.scheduler_state)


@pytest.mark.parametrize("sqlstate", ["40P01", "57P01"])
def test_of_a_long_batch_the_awards_before_the_error_stay(world: World, sqlstate: str) -> None:
    """If a later transaction of a batch fails, the earlier ones stay, and the next pass places the others."""
    world.region("r")
    for number in range(3):
        world.machine(f"r/c/m{number}", gpus=16)
    names = [world.submit(job(gpus=1)) for _ in range(40)]
    ticket = world.bid()
    with _fails(world, "attempt", sqlstate, skips=16), pytest.raises(_ERRORS):
        world.award(ticket)
    placed = [name for name in names if world.workload(name).attempt]
    assert placed == names[:16]
    agree(world, world.scheduler_state)
    assert world.tick().awarded == 24


@pytest.mark.parametrize(("table", "when"), [("outbox", "new.kind = 'wake'"), ("waiting", "true")])
@pytest.mark.parametrize("sqlstate", ["53100", "57P01"])
def test_an_error_after_the_awards_starts_the_pass_again(world: World, table: str, when: str, sqlstate: str) -> None:
    """Whatever fails after an award, the next try wakes the scheduler: what the award made possible is not missed."""
    world.region("r")
    world.machine("r/c/m", gpus=8)
    world.tenant("own", level=3, gpus=4)
    low = world.running(job(gpus=4), tenant="own")
    world.alter(Workload, low, level=6)
    # The award of `high` makes `low` over-quota, so that `other` may evict it.
    high = world.submit(job(gpus=4), tenant="own")
    world.tenant("last", level=7)
    other = world.submit(job(gpus=4), tenant="last")
    ticket = world.bid()
    with _fails(world, table, sqlstate, when=when), pytest.raises(_ERRORS):
        world.award(ticket)
    wakes = world.put_out("wake")
    assert world.workload(high).attempt == 1
    result = world.award(ticket)
    assert result.over and world.put_out("wake") == wakes + 1
    agree(world, world.scheduler_state)
    world.tick()
    assert (other, low) in {(evictor, victim) for evictor, _, victim, _ in world.evictions()}


@pytest.mark.parametrize("sqlstate", ["53100", "57P01"])
def test_a_scan_that_fails_probes_no_region(world: World, sqlstate: str) -> None:
    """A silent region whose probe was not sent, because the scan failed, is probed by the next scan."""
    for region in ("east", "west"):
        world.region(region)
        world.machine(f"{region}/c/m", gpus=4)
    world.submit(job(gpus=8))
    world.configure(silent_backoff_s=0.3)
    world.tick("west")
    time.sleep(0.3)
    with _fails(world, "scan_batch", sqlstate), pytest.raises(_ERRORS):
        world.scan()
    assert world.scan().probed == ["west"]


def test_a_block_that_raises_is_read_anew(idle: World) -> None:
    """Any exception in a decision makes the next one read everything."""
    state = idle.scheduler_state
    with state.current():
        reads = state.full_reads
    with pytest.raises(KeyboardInterrupt), state.current():
        state.regions["r"].drop_machine("r/c/m")
        raise KeyboardInterrupt
    agree(idle, state)
    assert state.full_reads == reads + 1
