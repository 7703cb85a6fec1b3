"""Arrays: their elements are placed as the plain rule says, whatever ends, fails, is cancelled or lost meanwhile."""

import random
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from sqlalchemy import select, text

from activities.capacity.pools import read_shortages
from activities.lifecycle.dependencies import decide_dependencies
from activities.lifecycle.housekeeping import HousekeepingActivities
from activities.scheduling.scheduler_state import SchedulerState
from domain.array_elements import indexes
from domain.phases import TERMINAL_PHASES, Phase
from domain.reasons import Reason, ReasonCode
from domain.spec import ArraySpec, DependencySpec, LimitsSpec, WorkloadSpec
from infra.db import published_queue
from infra.db.array_rows import counts_of, end_array, set_throttle, stop_waiting, take_element
from infra.db.enqueue import enqueue
from infra.db.logs import Outbox
from infra.db.models import Attempt, Workload
from infra.db.queued_end import end_queued
from infra.db.tenants import Tenant
from tests.activities.invariants import check
from tests.activities.world import World, job
from tests.depth import examples

_SLOTS = 6


def _array(*ranges: tuple[int, int, int], throttle: int | None = None, **more: Any) -> ArraySpec:
    return ArraySpec(ranges=ranges, throttle=throttle, **more)


@pytest.fixture
def fleet(world: World) -> World:
    """Two machines with `_SLOTS` slots together."""
    world.region("east")
    for name in ("a", "b"):
        world.machine(f"east/c/{name}", _SLOTS // 2)
    return world


def _elements(world: World, array: str) -> dict[int, Workload]:
    with world.session() as session:
        rows = session.scalars(select(Workload).where(Workload.array_id == array)).all()
        return {row.array_index or 0: row for row in rows}


def _placed(world: World, array: str) -> list[int]:
    """Returns the indexes of placed elements, in the order of their awards."""
    with world.session() as session:
        return list(
            session.scalars(
                text(
                    "select w.array_index from workload as w join attempt as a on a.workload = w.id"
                    " where w.array_id = :array and a.released_at is null order by a.awarded_at, w.submitted_at"
                ),
                {"array": array},
            )
        )


def _end_arrays(world: World) -> None:
    """Delivers the mail about arrays whose last element may have ended."""
    with world.session() as session:
        found = select(Outbox).where(Outbox.kind == "array", Outbox.delivered_at.is_(None))
        for row in session.scalars(found).all():
            end_array(session, str(row.body["array"]))
            session.delete(row)


def _settle(world: World) -> None:
    """Runs passes until one places nothing, as the wakes of the scheduler do."""
    while world.tick().awarded:
        pass


def test_elements_get_rows_only_when_they_are_placed(fleet: World) -> None:
    """The rows of elements have the indexes, the specification of one element, the age of the array and their order."""
    array = fleet.submit(array=_array((5, 9, 2), (100, 10_000, 1)), labels={"a": "b"})
    before = fleet.workload(array)
    assert fleet.tick().awarded == _SLOTS
    rows = _elements(fleet, array)
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
    _settle(fleet)
    assert fleet.waiting(array) == ["insufficient_capacity east"]
    with fleet.session() as session:
        assert [id_ for _, id_ in published_queue.load(session).of_tenant(None)] == [array]
    check(fleet)


def test_a_long_array_goes_on_without_a_rest(fleet: World) -> None:
    """The scheduler is woken as long as elements are awarded, because a scan ranks only some of them."""
    fleet.submit(array=_array((0, 99, 1)))
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
        array = fleet.submit(array=_array((0, 2, 1)))
        _settle(fleet)
        for index, end in enumerate(ends):
            _end_arrays(fleet)
            assert fleet.workload(array).finished_at is None
            fleet.run(f"{array}-{index}")
            fleet.release(f"{array}-{index}", end)
        _end_arrays(fleet)
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
    array = fleet.submit(array=_array((0, 9, 1)))
    _settle(fleet)
    assert len(_placed(fleet, array)) == _SLOTS
    for index in range(_SLOTS):
        fleet.run(f"{array}-{index}", ago_s=100)
    other = fleet.submit(job(tasks=4), tenant="u")
    fleet.tick()
    assert fleet.workload(other).phase == Phase.PLACING
    with fleet.session() as session:
        evicted = session.scalars(text("select count(*) from attempt where evictor = :id"), {"id": other}).one()
    assert evicted == 4


def test_a_pass_that_is_late_awards_nothing_twice(fleet: World) -> None:
    """Elements that were awarded, cancelled or throttled after the scan are not awarded."""
    array = fleet.submit(array=_array((0, 3, 1)))
    ticket = fleet.scan()
    with fleet.session() as session:
        session.get_one(Workload, array, with_for_update=True)
        take_element(session, array, 3, 3)
        set_throttle(session, array, 2)
    assert fleet.award(ticket).awarded == 2
    assert sorted(_placed(fleet, array)) == [0, 1]
    with fleet.session() as session:
        session.get_one(Workload, array, with_for_update=True)
        set_throttle(session, array, None)
    _settle(fleet)
    assert sorted(_placed(fleet, array)) == [0, 1, 2, 3]
    check(fleet)


def test_an_element_that_cannot_start_takes_no_place(fleet: World) -> None:
    """With a throttle of 1, other elements run while one is on hold, and while one avoids machines."""
    array = fleet.submit(array=_array((0, 9, 1), throttle=1))
    _settle(fleet)
    assert _placed(fleet, array) == [0]
    fleet.run(f"{array}-0")
    fleet.release(f"{array}-0", Phase.PENDING)
    fleet.alter(Workload, f"{array}-0", held_by="me")
    _settle(fleet)
    assert _placed(fleet, array) == [1]
    fleet.run(f"{array}-1")
    fleet.release(f"{array}-1", Phase.PENDING)
    outcome = {"code": "unconfirmed_failure", "detail": {"avoided": ["east/c/a", "east/c/b"]}}
    fleet.alter(Attempt, (f"{array}-1", 1), outcome=outcome)
    _settle(fleet)
    assert _placed(fleet, array) == [2]
    fleet.release(f"{array}-2", Phase.SUCCEEDED)
    fleet.alter(Attempt, (f"{array}-1", 1), outcome={"code": "machine_lost", "detail": {}})
    fleet.alter(Workload, f"{array}-0", held_by=None)
    _settle(fleet)
    assert _placed(fleet, array) == [0], "the older element comes first"
    assert fleet.queue() == []
    check(fleet)


def test_a_throttle_that_is_lowered_during_a_pass_is_kept(fleet: World) -> None:
    """Neither elements without a row nor those that are queued again exceed it."""
    array = fleet.submit(array=_array((0, 9, 1), throttle=5))
    _settle(fleet)
    for index in range(3):
        fleet.run(f"{array}-{index}")
        fleet.release(f"{array}-{index}", Phase.PENDING)
    ticket = fleet.bid()
    assert fleet.queue() == [f"{array}-{index}" for index in range(3)]
    with fleet.session() as session:
        session.get_one(Workload, array, with_for_update=True)
        set_throttle(session, array, 3)
    assert fleet.award(ticket).awarded == 1
    assert _placed(fleet, array) == [3, 4, 0]


def test_concurrent_awards_keep_the_throttle(fleet: World) -> None:
    """Of two elements that are queued again, one is placed, whichever of two processes comes first."""
    array = fleet.submit(array=_array((0, 1, 1)))
    _settle(fleet)
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
        assert len(_placed(fleet, array)) == 1


def test_the_last_end_is_seen_among_concurrent_ones(fleet: World) -> None:
    """Elements end while the others are cancelled, at the same time; the array ends all the same."""
    for _ in range(examples(20)):
        array = fleet.submit(array=_array((0, 99, 1)))
        _settle(fleet)
        for index in range(_SLOTS):
            fleet.run(f"{array}-{index}")

        def stop(array: str = array) -> None:
            with fleet.session() as session:
                session.get_one(Workload, array, with_for_update=True)
                stop_waiting(session, [array], whole=False)
                end_array(session, array)

        ends: list[Callable[[], None]] = [
            partial(fleet.release, f"{array}-{index}", Phase.SUCCEEDED) for index in range(_SLOTS)
        ]
        with ThreadPoolExecutor(_SLOTS + 1) as threads:
            for done in [threads.submit(work) for work in [*ends, stop]]:
                done.result()
        _end_arrays(fleet)
        assert fleet.workload(array).phase == Phase.CANCELLED
    check(fleet)


def test_old_elements_are_deleted_after_their_array(fleet: World) -> None:
    """Their records are kept as long as the array is live or kept, because its counts include them."""
    house = HousekeepingActivities(fleet.engine, fleet.settings)
    array = fleet.submit(array=_array((0, 7, 1)))
    _settle(fleet)
    fleet.run(f"{array}-0")
    fleet.release(f"{array}-0", Phase.SUCCEEDED)
    long_ago = text("now() - interval '1000 days'")
    fleet.alter(Workload, f"{array}-0", finished_at=long_ago, expired_at=long_ago)
    house._delete_records()
    with fleet.session() as session:
        assert counts_of(session, [array])[array].succeeded == 1
        stop_waiting(session, [array], whole=True)
    for index in range(1, 7):
        if index in _elements(fleet, array):
            fleet.release(f"{array}-{index}", Phase.CANCELLED)
            fleet.alter(Workload, f"{array}-{index}", finished_at=long_ago, expired_at=long_ago)
    _end_arrays(fleet)
    fleet.alter(Workload, array, finished_at=long_ago, expired_at=long_ago)
    house._delete_records()
    assert _elements(fleet, array) == {}
    house._delete_records()
    with fleet.session() as session:
        assert session.get(Workload, array) is None and counts_of(session, [array]) == {}


def test_a_pool_grows_for_all_waiting_elements(fleet: World) -> None:
    """Each element that the throttle admits is a shortage of its own."""
    array = fleet.submit(array=_array((0, 99, 1), throttle=30))
    _settle(fleet)
    with fleet.session() as session:
        found = read_shortages(session, published_queue.Newest())
    assert [one.workload for one in found] == [f"{array}-{index}" for index in range(6, 30)]


@dataclass
class _Plain:
    """What must be true of an array, by the plain rule."""

    indexes: list[int]
    throttle: int | None
    waiting: list[int] = field(default_factory=list)
    queued: set[int] = field(default_factory=set)
    stopped: set[int] = field(default_factory=set)
    """Elements with a row that are on hold."""
    lowered: set[int] = field(default_factory=set)
    """Elements with a row whose priority is lower."""
    begun: set[int] = field(default_factory=set)
    """Elements that have run."""
    on: list[tuple["_Plain", str]] = field(default_factory=list)
    """Arrays on whose elements of the same index it depends, each with the condition."""
    keeps: bool = False
    """Whether elements that wait in vain stay."""
    placed: set[int] = field(default_factory=set)
    ended: dict[int, Phase] = field(default_factory=dict)
    held: bool = False
    cancelled: bool = False

    def __post_init__(self) -> None:
        self.waiting = list(self.indexes)

    def state(self, index: int, condition: str) -> str:
        """Returns the state of a condition on an element."""
        end = self.ended.get(index)
        met = {"ended": end is not None, "started": index in self.begun}.get(condition, end == condition)
        return "met" if met else "waiting" if end is None else "never"

    def depends(self, index: int) -> set[str]:
        """Returns the states of the dependencies of an element."""
        return {plain.state(index, condition) for plain, condition in self.on}

    def in_vain(self) -> list[int]:
        """Returns the elements that end because they wait in vain."""
        return [] if self.keeps else [index for index in self.waiting if "never" in self.depends(index)]

    def next(self) -> int | None:
        """Returns the element that is placed next, if there is room. An element with a row has a hold of its own."""
        if self.throttle is not None and len(self.placed) >= self.throttle:
            return None
        ready = [index for index in self.waiting if self.depends(index) <= {"met"}]
        found = [*(self.queued - self.stopped), *(() if self.held else ready)]
        return min(found, key=lambda index: (index in self.lowered, self.indexes.index(index)), default=None)

    def place(self, index: int) -> None:
        if index in self.queued:
            self.queued.remove(index)
        else:
            self.waiting.remove(index)
        self.placed.add(index)

    def end(self, index: int, phase: Phase) -> None:
        for state in (self.queued, self.placed):
            state.discard(index)
        self.ended[index] = phase

    @property
    def phase(self) -> Phase:
        """The phase of the head."""
        if self.waiting or self.queued or self.placed:
            return Phase.PENDING
        if self.cancelled:
            return Phase.CANCELLED
        ends = set(self.ended.values())
        return next((p for p in (Phase.FAILED, Phase.CANCELLED) if p in ends), Phase.SUCCEEDED)


class _Walk:
    """Random operations on two arrays, each also done by the plain rule."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.chance = random.Random(seed)
        self.arrays: dict[str, _Plain] = {}
        for _ in range(2):
            self.submit()

    def submit(self) -> None:
        """Submits an array. It may depend on elements of an earlier one, of which it has some of the indexes."""
        if len(self.arrays) == 4:
            return
        chance = self.chance
        first, step, size = 7, chance.choice([1, 3]), chance.randrange(1, 14)
        on = [one for one in self.arrays.items() if chance.random() < 0.5]
        if on:
            common = sorted(set.intersection(*(set(plain.indexes) for _, plain in on)))
            if not common:
                return
            ranges = tuple((index, index, 1) for index in chance.sample(common, chance.randrange(1, len(common) + 1)))
        else:
            ranges = ((first, first + step * (size - 1), step if size > 1 else 1),)
        conditions = [chance.choice(["succeeded", "succeeded", "ended", "failed", "started"]) for _ in on]
        after = tuple(
            DependencySpec(workload="p", id=id_, condition=condition, same_index=True)
            for (id_, _), condition in zip(on, conditions, strict=True)
        )
        throttle, keeps = chance.choice([None, 1, 2, 4]), chance.random() < 0.3
        spec = WorkloadSpec(
            name="w", tenant="t", jobs=(job(),), array=_array(*ranges, throttle=throttle), after=after,
            limits=LimitsSpec(retries=1), if_never="keep" if keeps else "end",
        )  # fmt: skip
        with self.world.session() as session:
            array = enqueue(session, spec, "key").id
        plain = self.arrays[array] = _Plain(list(indexes(ranges)), throttle, keeps=keeps)
        plain.on = [(other, condition) for (_, other), condition in zip(on, conditions, strict=True)]

    def decide(self) -> None:
        """Ends the elements that wait in vain, of which there may be more when others have ended."""
        decide_dependencies(self.world.engine)
        for plain in self.arrays.values():  # An array depends only on earlier ones.
            for index in plain.in_vain():
                plain.waiting.remove(index)
                plain.end(index, Phase.CANCELLED)

    def pass_(self) -> None:
        before = len(self._awards())
        _settle(self.world)
        free = _SLOTS - sum(len(plain.placed) for plain in self.arrays.values())
        # Of equal rank, the older array comes first. Lowered elements come after all others.
        placed: list[str] = []
        for is_lowered in (False, True):
            for array, plain in self.arrays.items():
                while free and (index := plain.next()) is not None and (index in plain.lowered) <= is_lowered:
                    plain.place(index)
                    placed.append(f"{array}-{index}")
                    free -= 1
        assert self._awards()[before:] == placed

    def _awards(self) -> list[str]:
        """Returns the workloads of all awards, in order."""
        mail = text("select workload from outbox where kind = 'mail' and body ->> 'kind' = 'awarded' order by id")
        with self.world.session() as session:
            return list(session.scalars(mail))

    def end_element(self) -> None:
        for array, plain in self.arrays.items():
            for index in sorted(plain.placed):
                if self.chance.random() < 0.5:
                    continue
                id_ = f"{array}-{index}"
                if self.world.workload(id_).phase == Phase.PLACING:
                    self.world.run(id_)
                    plain.begun.add(index)
                phase = self.chance.choice([Phase.SUCCEEDED, Phase.SUCCEEDED, Phase.FAILED, Phase.PENDING,
                                            Phase.PREEMPTED])  # fmt: skip
                self.world.release(id_, phase)
                if phase in TERMINAL_PHASES:
                    plain.end(index, phase)
                else:  # A lost machine, or a preemption.
                    plain.placed.remove(index)
                    plain.queued.add(index)

    def cancel_element(self) -> None:
        array, plain = self.chance.choice(list(self.arrays.items()))
        ready = [index for index in plain.waiting if plain.depends(index) <= {"met"}]
        if ready and not plain.held:
            index = self.chance.choice(ready)
            with self.world.session() as session:
                session.get_one(Workload, array, with_for_update=True)
                take_element(session, array, plain.indexes.index(index), index)
                reason = Reason(ReasonCode.CANCELLED_BY_USER, {"by": "me"})
                end_queued(session, Phase.CANCELLED, {f"{array}-{index}": (reason, {})})
            plain.waiting.remove(index)
            plain.end(index, Phase.CANCELLED)

    def cancel_waiting(self) -> None:
        array, plain = self.chance.choice(list(self.arrays.items()))
        if self.chance.random() < 0.3 and plain.phase == Phase.PENDING:
            plain.cancelled = plain.cancelled or self.chance.random() < 0.5
            with self.world.session() as session:
                session.get_one(Workload, array, with_for_update=True)
                stop_waiting(session, [array], whole=plain.cancelled)
                end_array(session, array)
            for index in list(plain.waiting):
                plain.waiting.remove(index)
                plain.end(index, Phase.CANCELLED)

    def throttle(self) -> None:
        array, plain = self.chance.choice(list(self.arrays.items()))
        plain.throttle = self.chance.choice([None, 1, 3, 5])
        with self.world.session() as session:
            session.get_one(Workload, array, with_for_update=True)
            set_throttle(session, array, plain.throttle)

    def hold(self) -> None:
        array, plain = self.chance.choice(list(self.arrays.items()))
        if plain.phase == Phase.PENDING:
            plain.held = not plain.held
            self.world.alter(Workload, array, held_by="me" if plain.held else None)

    def hold_element(self) -> None:
        array, plain = self.chance.choice(list(self.arrays.items()))
        if plain.queued:
            index = self.chance.choice(sorted(plain.queued))
            plain.stopped ^= {index}
            self.world.alter(Workload, f"{array}-{index}", held_by="me" if index in plain.stopped else None)

    def lower_element(self) -> None:
        array, plain = self.chance.choice(list(self.arrays.items()))
        if plain.queued or plain.placed:
            index = self.chance.choice(sorted(plain.queued | plain.placed))
            plain.lowered.add(index)
            self.world.alter(Workload, f"{array}-{index}", level=5)

    def check(self) -> None:
        for array, plain in self.arrays.items():
            rows = _elements(self.world, array)
            found: dict[str, set[int]] = {"queued": set(), "placed": set()}
            for index, row in rows.items():
                if row.finished_at is None:
                    kind = "queued" if row.phase in (Phase.PENDING, Phase.PREEMPTED) else "placed"
                    found[kind].add(index)
                else:
                    assert plain.ended[index] == row.phase
            assert (found["queued"], found["placed"]) == (plain.queued, plain.placed)
            assert sorted(_placed(self.world, array)) == sorted(plain.placed)
            with self.world.session() as session:
                counts = counts_of(session, [array])[array]
            ends = Counter(plain.ended.values())
            assert counts.waiting == len(plain.waiting)
            assert counts.blocked == sum(not plain.depends(index) <= {"met"} for index in plain.waiting)
            assert (counts.succeeded, counts.failed, counts.cancelled) == (
                ends[Phase.SUCCEEDED], ends[Phase.FAILED], ends[Phase.CANCELLED],
            )  # fmt: skip
            assert self.world.workload(array).phase == plain.phase
        check(self.world)
        # A scheduler that follows the changes sees what a new one reads.
        followed, fresh = self.world.scheduler_state, SchedulerState(self.world.engine, self.world.settings.scheduler)
        with followed.current(), fresh.current():
            assert followed.queue.elements == fresh.queue.elements
            for name in ("id", "at_s"):
                one, other = (getattr(state.queue.queue.pending, name).tolist() for state in (followed, fresh))
                assert one == other


@pytest.mark.parametrize("seed", range(examples(60)))
def test_arrays_as_by_the_plain_rule(fleet: World, seed: int) -> None:
    """Elements are placed in their order, up to the throttle, each once at a time, and none is lost."""
    fleet.configure(min_runtime_s=1e6)  # No element evicts one of lower priority.
    walk = _Walk(fleet, seed)
    steps: list[Callable[[], None]] = [
        walk.pass_, walk.pass_, walk.end_element, walk.end_element, walk.cancel_element, walk.cancel_waiting,
        walk.throttle, walk.hold, walk.hold_element, walk.lower_element,
        walk.submit, walk.decide, walk.decide,
    ]  # fmt: skip
    for _ in range(25):
        walk.chance.choice(steps)()
        _end_arrays(fleet)
        walk.check()
