"""Arrays: their elements are placed as the plain rule says, whatever ends, fails, is cancelled or lost meanwhile."""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from sqlalchemy import text

from activities.capacity.pools import read_shortages
from activities.lifecycle.housekeeping import HousekeepingActivities
from domain.phases import Phase
from domain.reasons import ReasonCode
from infra.db import published_queue
from infra.db.array_rows import counts_of, end_array, set_throttle, stop_waiting, take_element
from infra.db.models import Attempt, Workload
from infra.db.tenants import Tenant
from tests.activities.array_walk import SLOTS, ArrayWalk, array_spec, element_rows, end_arrays, placed_indexes, settle
from tests.activities.invariants import check
from tests.activities.world import World, job
from tests.depth import examples, few


@pytest.fixture
def fleet(world: World) -> World:
    """Two machines with `SLOTS` slots together."""
    world.region("east")
    for name in ("a", "b"):
        world.machine(f"east/c/{name}", SLOTS // 2)
    return world


def test_elements_get_rows_only_when_they_are_placed(fleet: World) -> None:
    """The rows of elements have the indexes, the specification of one element, the age of the array and their order."""
    array = fleet.submit(array=array_spec((5, 9, 2), (100, 10_000, 1)), labels={"a": "b"})
    before = fleet.workload(array)
    assert fleet.tick().awarded == SLOTS
    rows = element_rows(fleet, array)
    assert sorted(rows) == [5, 7, 9, 100, 101, 102]
    for position, index in enumerate(sorted(rows)):
        row = rows[index]
        assert row.id == f"{array}-{index}" and row.attempt == 1 and row.phase == Phase.PLACING
        assert row.spec == {**before.spec, "array": {**before.spec["array"], "ranges": [[index, index, 1]]}}
        assert (row.submitted_at - before.submitted_at).microseconds == position
    assert [mail["kind"] for mail in fleet.mail(f"{array}-5")] == ["awarded"]
    head = fleet.workload(array)
    assert (head.phase, head.attempt) == (Phase.PENDING, 0)
    with fleet.session() as session:
        counts = counts_of(session, [array])[array]
    assert (counts.elements, counts.waiting, counts.live) == (9904, 9898, 6)
    settle(fleet)
    assert fleet.waiting(array) == ["insufficient_capacity east"]
    with fleet.session() as session:
        assert [id_ for _, id_ in published_queue.load(session).of_tenant(None)] == [array]
    check(fleet)


def test_a_long_array_goes_on_without_a_rest(fleet: World) -> None:
    """The scheduler is woken as long as elements are awarded, because a scan ranks only some of them."""
    fleet.submit(array=array_spec((0, 99, 1)))
    before = fleet.put_out("wake")
    fleet.tick()
    assert fleet.put_out("wake") == before + 1
    fleet.tick()
    assert fleet.put_out("wake") == before + 1


def test_it_ends_with_its_last_element(fleet: World) -> None:
    """Its phase is succeeded only if all elements succeeded; the reason has the counts."""
    for ends, phase in (
        ([Phase.SUCCEEDED] * 3, Phase.SUCCEEDED),
        ([Phase.SUCCEEDED, Phase.FAILED, Phase.CANCELLED], Phase.FAILED),
        ([Phase.SUCCEEDED, Phase.CANCELLED, Phase.SUCCEEDED], Phase.CANCELLED),
    ):
        array = fleet.submit(array=array_spec((0, 2, 1)))
        settle(fleet)
        for index, end in enumerate(ends):
            end_arrays(fleet)
            assert fleet.workload(array).finished_at is None
            fleet.run(f"{array}-{index}")
            fleet.release(f"{array}-{index}", end)
        end_arrays(fleet)
        head = fleet.workload(array)
        assert (head.phase, head.finished_at is None) == (phase, False)
        assert (head.reason or {})["code"] == ReasonCode.ARRAY_ENDED
        counted = Counter(ends)
        assert (head.reason or {})["detail"] == {
            "elements": 3, "succeeded": counted[Phase.SUCCEEDED], "failed": counted[Phase.FAILED],
            "cancelled": counted[Phase.CANCELLED],
        }  # fmt: skip
        assert fleet.events(array, f"workload.{phase}")


def test_quota_counts_each_element(fleet: World) -> None:
    """Elements beyond the quota are over-quota, and give way to another tenant."""
    fleet.tenant("u", level=3, gpus=4)
    fleet.alter(Tenant, "t", quota_gpus={"a100": 2})
    array = fleet.submit(array=array_spec((0, 9, 1)))
    settle(fleet)
    assert len(placed_indexes(fleet, array)) == SLOTS
    for index in range(SLOTS):
        fleet.run(f"{array}-{index}", ago_s=100)
    other = fleet.submit(job(tasks=4), tenant="u")
    fleet.tick()
    assert fleet.workload(other).phase == Phase.PLACING
    with fleet.session() as session:
        evicted = session.scalars(text("select count(*) from attempt where evictor = :id"), {"id": other}).one()
    assert evicted == 4


def test_a_pass_that_is_late_awards_nothing_twice(fleet: World) -> None:
    """Elements that were awarded, cancelled or throttled after the scan are not awarded."""
    array = fleet.submit(array=array_spec((0, 3, 1)))
    ticket = fleet.scan()
    with fleet.session() as session:
        session.get_one(Workload, array, with_for_update=True)
        take_element(session, array, 3, 3)
        set_throttle(session, array, 2)
    assert fleet.award(ticket).awarded == 2
    assert sorted(placed_indexes(fleet, array)) == [0, 1]
    with fleet.session() as session:
        session.get_one(Workload, array, with_for_update=True)
        set_throttle(session, array, None)
    settle(fleet)
    assert sorted(placed_indexes(fleet, array)) == [0, 1, 2, 3]
    check(fleet)


def test_an_element_that_cannot_start_takes_no_place(fleet: World) -> None:
    """With a throttle of 1, other elements run while one is on hold, and while one avoids machines."""
    array = fleet.submit(array=array_spec((0, 9, 1), throttle=1))
    settle(fleet)
    assert placed_indexes(fleet, array) == [0]
    fleet.run(f"{array}-0")
    fleet.release(f"{array}-0", Phase.PENDING)
    fleet.alter(Workload, f"{array}-0", held_by="me")
    settle(fleet)
    assert placed_indexes(fleet, array) == [1]
    fleet.run(f"{array}-1")
    fleet.release(f"{array}-1", Phase.PENDING)
    outcome = {"code": "unconfirmed_failure", "detail": {"avoided": ["east/c/a", "east/c/b"]}}
    fleet.alter(Attempt, (f"{array}-1", 1), outcome=outcome)
    settle(fleet)
    assert placed_indexes(fleet, array) == [2]
    fleet.release(f"{array}-2", Phase.SUCCEEDED)
    fleet.alter(Attempt, (f"{array}-1", 1), outcome={"code": "machine_lost", "detail": {}})
    fleet.alter(Workload, f"{array}-0", held_by=None)
    settle(fleet)
    assert placed_indexes(fleet, array) == [0], "the older element comes first"
    assert fleet.queue() == []
    check(fleet)


def test_a_throttle_that_is_lowered_during_a_pass_is_kept(fleet: World) -> None:
    """Neither elements without a row nor those that are queued again exceed it."""
    array = fleet.submit(array=array_spec((0, 9, 1), throttle=5))
    settle(fleet)
    for index in range(3):
        fleet.run(f"{array}-{index}")
        fleet.release(f"{array}-{index}", Phase.PENDING)
    ticket = fleet.bid()
    assert fleet.queue() == [f"{array}-{index}" for index in range(3)]
    with fleet.session() as session:
        session.get_one(Workload, array, with_for_update=True)
        set_throttle(session, array, 3)
    assert fleet.award(ticket).awarded == 1
    assert placed_indexes(fleet, array) == [3, 4, 0]


def test_concurrent_awards_keep_the_throttle(fleet: World) -> None:
    """Of two elements that are queued again, one is placed, whichever of two processes comes first."""
    array = fleet.submit(array=array_spec((0, 1, 1)))
    settle(fleet)
    ids = [f"{array}-{index}" for index in range(2)]
    for _ in range(examples(20)):
        for id_ in ids:
            if fleet.workload(id_).phase == Phase.PLACING:
                fleet.run(id_)
                fleet.release(id_, Phase.PENDING)
        with fleet.session() as session:
            session.get_one(Workload, array, with_for_update=True)
            set_throttle(session, array, None)
        offers = [fleet.offer(id_) for id_ in ids]
        with fleet.session() as session:
            session.get_one(Workload, array, with_for_update=True)
            set_throttle(session, array, 1)
        with ThreadPoolExecutor(2) as threads:
            done = list(threads.map(fleet.award_all, [[offer.candidate] for offer in offers]))
        assert sorted(one.count for one in done) == [0, 1]
        assert len(placed_indexes(fleet, array)) == 1


def test_the_last_end_is_seen_among_concurrent_ones(fleet: World) -> None:
    """Elements end while the others are cancelled, at the same time; the array ends all the same."""
    for _ in range(examples(20)):
        array = fleet.submit(array=array_spec((0, 99, 1)))
        settle(fleet)
        for index in range(SLOTS):
            fleet.run(f"{array}-{index}")

        def stop(array: str = array) -> None:
            with fleet.session() as session:
                session.get_one(Workload, array, with_for_update=True)
                stop_waiting(session, [array], whole=False)
                end_array(session, array)

        ends: list[Callable[[], None]] = [
            partial(fleet.release, f"{array}-{index}", Phase.SUCCEEDED) for index in range(SLOTS)
        ]
        with ThreadPoolExecutor(SLOTS + 1) as threads:
            for done in [threads.submit(work) for work in [*ends, stop]]:
                done.result()
        end_arrays(fleet)
        assert fleet.workload(array).phase == Phase.CANCELLED
    check(fleet)


def test_old_elements_are_deleted_after_their_array(fleet: World) -> None:
    """Their records are kept as long as the array is live or kept, because its counts include them."""
    house = HousekeepingActivities(fleet.engine, fleet.settings)
    array = fleet.submit(array=array_spec((0, 7, 1)))
    settle(fleet)
    fleet.run(f"{array}-0")
    fleet.release(f"{array}-0", Phase.SUCCEEDED)
    long_ago = text("now() - interval '1000 days'")
    fleet.alter(Workload, f"{array}-0", finished_at=long_ago, expired_at=long_ago)
    house._delete_records()
    with fleet.session() as session:
        assert counts_of(session, [array])[array].succeeded == 1
        stop_waiting(session, [array], whole=True)
    for index in range(1, 7):
        if index in element_rows(fleet, array):
            fleet.release(f"{array}-{index}", Phase.CANCELLED)
            fleet.alter(Workload, f"{array}-{index}", finished_at=long_ago, expired_at=long_ago)
    end_arrays(fleet)
    fleet.alter(Workload, array, finished_at=long_ago, expired_at=long_ago)
    house._delete_records()
    assert element_rows(fleet, array) == {}
    house._delete_records()
    with fleet.session() as session:
        assert session.get(Workload, array) is None and counts_of(session, [array]) == {}


def test_a_pool_grows_for_all_waiting_elements(fleet: World) -> None:
    """Each element that the throttle admits is a shortage of its own."""
    array = fleet.submit(array=array_spec((0, 99, 1), throttle=30))
    settle(fleet)
    with fleet.session() as session:
        found = read_shortages(session, published_queue.Newest())
    assert [one.workload for one in found] == [f"{array}-{index}" for index in range(6, 30)]


@pytest.mark.parametrize("seed", few(range(60), 3))
def test_arrays_as_by_the_plain_rule(fleet: World, seed: int) -> None:
    """Elements are placed in their order, up to the throttle, each once at a time, and none is lost."""
    fleet.configure(min_runtime_s=1e6)  # No element evicts one of lower priority.
    walk = ArrayWalk(fleet, seed)
    steps: list[Callable[[], None]] = [
        walk.pass_, walk.pass_, walk.end_element, walk.end_element, walk.cancel_element, walk.cancel_waiting,
        walk.throttle, walk.hold, walk.hold_element, walk.lower_element,
        walk.submit, walk.decide, walk.decide,
    ]  # fmt: skip
    for _ in range(25):
        walk.chance.choice(steps)()
        end_arrays(fleet)
        walk.check()
