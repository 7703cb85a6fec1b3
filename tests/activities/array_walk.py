"""Random operations on arrays on a real database, and a plain reference for what happens to their elements."""

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import select, text

from activities.lifecycle.dependencies import decide_dependencies
from activities.scheduling.scheduler_state import SchedulerState
from domain.array_elements import indexes
from domain.phases import TERMINAL_PHASES, Phase
from domain.reasons import Reason, ReasonCode
from domain.spec import ArraySpec, DependencySpec, LimitsSpec, WorkloadSpec
from infra.db.array_rows import counts_of, end_array, set_throttle, stop_waiting, take_element
from infra.db.enqueue import enqueue
from infra.db.logs import Outbox
from infra.db.models import Workload
from infra.db.queued_end import end_queued
from tests.activities.invariants import check
from tests.activities.world import World, job

SLOTS = 6
"""The slots of all machines together."""


def array_spec(*ranges: tuple[int, int, int], throttle: int | None = None, **more: Any) -> ArraySpec:
    """Returns an array with these ranges of indexes."""
    return ArraySpec(ranges=ranges, throttle=throttle, **more)


def element_rows(world: World, array: str) -> dict[int, Workload]:
    """Returns the elements that have a row, by index."""
    with world.session() as session:
        rows = session.scalars(select(Workload).where(Workload.array_id == array)).all()
        return {row.array_index or 0: row for row in rows}


def placed_indexes(world: World, array: str) -> list[int]:
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


def end_arrays(world: World) -> None:
    """Delivers the messages about arrays whose last element may have ended."""
    with world.session() as session:
        found = select(Outbox).where(Outbox.kind == "array", Outbox.delivered_at.is_(None))
        for row in session.scalars(found).all():
            end_array(session, str(row.body["array"]))
            session.delete(row)


def settle(world: World) -> None:
    """Runs passes until one places nothing, as the wakes of the scheduler do."""
    while world.tick().awarded:
        pass


@dataclass
class PlainArray:
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
    on: list[tuple["PlainArray", str]] = field(default_factory=list)
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


class ArrayWalk:
    """Random operations on two arrays, each also done by the plain rule."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.chance = random.Random(seed)
        self.arrays: dict[str, PlainArray] = {}
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
            name="w", tenant="t", jobs=(job(),), array=array_spec(*ranges, throttle=throttle), after=after,
            limits=LimitsSpec(retries=1), if_never="keep" if keeps else "end",
        )  # fmt: skip
        with self.world.session() as session:
            array = enqueue(session, spec, "key").id
        plain = self.arrays[array] = PlainArray(list(indexes(ranges)), throttle, keeps=keeps)
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
        settle(self.world)
        free = SLOTS - sum(len(plain.placed) for plain in self.arrays.values())
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
            rows = element_rows(self.world, array)
            found: dict[str, set[int]] = {"queued": set(), "placed": set()}
            for index, row in rows.items():
                if row.finished_at is None:
                    kind = "queued" if row.phase in (Phase.PENDING, Phase.PREEMPTED) else "placed"
                    found[kind].add(index)
                else:
                    assert plain.ended[index] == row.phase
            assert (found["queued"], found["placed"]) == (plain.queued, plain.placed)
            assert sorted(placed_indexes(self.world, array)) == sorted(plain.placed)
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
