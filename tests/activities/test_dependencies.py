"""Dependencies on Postgres: random graphs against a plain reference, and concurrent ends and submissions."""

import random
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from sqlalchemy import func, text

from activities.lifecycle.dependencies import decide_dependencies
from activities.lifecycle.progress import expire_pending
from domain.phases import Phase
from domain.spec import ArraySpec, DependencySpec, LimitsSpec
from infra.db.array_rows import counts_of
from infra.db.dependencies import dependencies_of
from infra.db.enqueue import enqueue
from infra.db.models import Workload
from infra.db.phases import enter_phase
from tests.activities.dependency_graphs import LATER, GraphOffice, after, cancel, small, submit
from tests.activities.test_races import waits_for_a_lock
from tests.activities.world import World
from tests.depth import few

AN_HOUR_AGO = func.now() - timedelta(hours=1)


@pytest.fixture
def place(world: World) -> World:
    """An installation with a machine on which every workload of these tests has room, and a table."""
    world.region("r")
    world.machine("r/c/m")
    world.table("days", 1, "r")
    return world


@pytest.mark.parametrize("seed", few(range(23), 1))
def test_random_graphs(place: World, seed: int) -> None:
    """After each of many random events, every workload is blocked, queued or ended as in the plain reference."""
    office = GraphOffice(place, random.Random(seed))
    for _ in range(150):
        office.step()
    assert office.plain.keys() - office.deleted and office.deleted


def _ended(world: World, workload: str, phase: Phase = Phase.SUCCEEDED) -> None:
    world.run(workload)
    world.release(workload, phase)


@pytest.mark.parametrize("others", [1, 7])
def test_predecessors_that_end_at_the_same_time(place: World, others: int) -> None:
    """The last one lets the dependent in, although none of their transactions sees those of the others."""
    first, *rest = (submit(place) for _ in range(1 + others))
    dependent = submit(place, *map(after, (first, *rest)))
    place.tick()
    for workload in (first, *rest):
        place.run(workload)
    with ThreadPoolExecutor(others) as pool:
        with place.session() as session:
            enter_phase(session, first, Phase.SUCCEEDED, {"code": "completed"})
            ends = [pool.submit(place.release, workload, Phase.SUCCEEDED) for workload in rest]
            assert waits_for_a_lock(place, lambda: all(end.done() for end in ends))
            assert place.workload(dependent).blocked == "waiting"
        for end in ends:
            end.result(20)
    assert place.workload(dependent).blocked is None
    place.scan()
    assert place.queue() == [dependent]


def test_an_end_during_a_submission_is_not_missed(place: World) -> None:
    """A submission waits for the end of the predecessor that is being committed, and an end for a submission."""
    early, late = submit(place), submit(place)
    with ThreadPoolExecutor(1) as pool:
        with place.session() as session:
            session.get_one(Workload, early, with_for_update=True)
            enter_phase(session, early, Phase.CANCELLED, {"code": "cancelled_by_user"})
            submitted = pool.submit(submit, place, after(early, "ended"))
            assert waits_for_a_lock(place, submitted.done)
        assert place.workload(submitted.result(20)).blocked is None

        with place.session() as session:
            dependent = enqueue(session, small(after(late, "ended")), "key").id
            ended = pool.submit(cancel, place, late)
            assert waits_for_a_lock(place, ended.done)
        ended.result(20)
    assert place.workload(dependent).blocked is None


def test_the_wait_for_dependencies_does_not_count(place: World) -> None:
    """As in Slurm, the age that counts begins when all dependencies hold; so does the limit of the wait."""
    first = submit(place)
    dependent = submit(place, after(first), not_before=LATER, limits=LimitsSpec(max_pending_s=60.0))
    place.alter(Workload, dependent, submitted_at=AN_HOUR_AGO, held_at=AN_HOUR_AGO)
    assert decide_dependencies(place.engine) == [] and expire_pending(place.engine) == []
    place.tick()
    _ended(place, first)
    assert place.workload(dependent).blocked == "waiting"
    with place.session() as session:
        session.execute(text("update dependency set due_at = now() where due_at is not null"))
    assert decide_dependencies(place.engine) == [] and expire_pending(place.engine) == []
    row = place.workload(dependent)
    assert row.blocked is None and row.held_at is None and 3600 <= row.paused_s < 3700
    assert [e["kind"] for e in place.events(dependent)] == ["workload.pending", "workload.eligible"]
    assert place.put_out("wake") >= 1


def test_a_hold_goes_on_after_the_dependencies(place: World) -> None:
    """A workload that is held when its last dependency holds stays on hold, and its pause goes on."""
    first = submit(place)
    dependent = submit(place, after(first, "ended"))
    place.alter(Workload, dependent, held_by="somebody")
    cancel(place, first)
    row = place.workload(dependent)
    assert row.blocked is None and row.held_at is not None and row.paused_s == 0
    place.scan()
    assert place.queue() == []


def test_a_long_chain_ends_with_its_first(place: World) -> None:
    """The end of the first is one short transaction. The round ends all others, each with its own reason."""
    chain = [submit(place)]
    for _ in range(60):
        chain.append(submit(place, after(chain[-1])))
    spared = submit(place, after(chain[-1], "ended"))
    kept = submit(place, after(chain[0]), if_never="keep")
    cancel(place, chain[0])
    assert place.workload(chain[2]).blocked == "waiting"
    assert decide_dependencies(place.engine) == chain[1:]
    row = place.workload(chain[60])
    assert row.phase == Phase.CANCELLED and row.reason is not None and row.reason["code"] == "dependency_never"
    assert row.reason["detail"]["workload"] == chain[59]
    assert place.workload(spared).blocked is None
    assert (place.workload(kept).phase, place.workload(kept).blocked) == (Phase.PENDING, "never")
    assert decide_dependencies(place.engine) == []


def test_arrays_wait_and_are_waited_for(place: World) -> None:
    """No element of a blocked array is placed; an array has started with its first element."""
    elements = ArraySpec(ranges=((0, 2, 1),), throttle=1)
    first = submit(place)
    array = submit(place, after(first), array=elements)
    on_start, on_end = submit(place, after(array, "started")), submit(place, after(array))
    assert place.tick().awarded == 1
    _ended(place, first)
    assert place.tick().awarded == 1
    assert place.workload(on_start).blocked == "waiting"
    place.run(f"{array}-0")
    assert (place.workload(on_start).blocked, place.workload(on_end).blocked) == (None, "waiting")
    assert place.workload(submit(place, after(array, "started"))).blocked is None


def test_an_array_that_waits_in_vain_ends_with_all_elements(place: World) -> None:
    """Its elements are counted as cancelled."""
    first = submit(place)
    array = submit(place, after(first), array=ArraySpec(ranges=((0, 2, 1),)))
    place.tick()
    _ended(place, first, Phase.FAILED)
    assert decide_dependencies(place.engine) == [array]
    assert place.workload(array).phase == Phase.CANCELLED
    with place.session() as session:
        counts = counts_of(session, [array])[array]
    assert (counts.waiting, counts.cancelled, counts.is_cancelled) == (0, 3, True)


def test_an_end_of_an_element_during_a_submission_is_not_missed(place: World) -> None:
    """A submission waits for the end of an element that is being committed, and an end for a submission."""
    elements = ArraySpec(ranges=((0, 1, 1),))
    first = submit(place, array=elements)
    assert place.tick().awarded == 2
    for index in range(2):
        place.run(f"{first}-{index}")
    on = DependencySpec(workload="p", id=first, same_index=True)
    with ThreadPoolExecutor(1) as pool:
        with place.session() as session:
            enter_phase(session, f"{first}-0", Phase.SUCCEEDED, {"code": "completed"})
            submitted = pool.submit(submit, place, on, array=elements)
            assert waits_for_a_lock(place, submitted.done)
        early = submitted.result(20)
        with place.session() as session:
            late = enqueue(session, small(on, array=elements), "key").id
            ended = pool.submit(place.release, f"{first}-1", Phase.SUCCEEDED)
            assert waits_for_a_lock(place, ended.done)
        ended.result(20)
    with place.session() as session:
        assert [counts.blocked for counts in counts_of(session, [early, late]).values()] == [0, 0]


def test_what_was_decided_outlives_the_record(place: World) -> None:
    """If the record of a predecessor is deleted, its dependents know what became of it."""
    first = submit(place)
    dependent = submit(place, after(first), not_before=LATER)
    place.tick()
    _ended(place, first)
    with place.session() as session:
        session.delete(session.get_one(Workload, first))
    with place.session() as session:
        (one, time) = dependencies_of(session, [dependent])[dependent]
    assert (one.row.state, one.row.predecessor, one.phase) == ("met", first, "succeeded") and one.reason() is None
    assert time.row.state == "waiting" and place.workload(dependent).blocked == "waiting"
