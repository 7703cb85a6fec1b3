"""Random graphs of workloads with dependencies on a real database, and a plain reference for their states."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal

from sqlalchemy import delete, select, text

from activities.lifecycle.dependencies import decide_dependencies
from domain.phases import PLACED_PHASES, TERMINAL_PHASES, Phase
from domain.reasons import Reason, ReasonCode
from domain.spec import DependencySpec, WorkloadSpec
from infra.db.enqueue import enqueue
from infra.db.models import Workload
from infra.db.queued_end import end_queued
from infra.db.tables import Partition
from tests.activities.world import World, job

LATER = datetime(2999, 1, 1, tzinfo=UTC)
State = Literal["met", "waiting", "never"]


def after(predecessor: str, condition: str = "succeeded") -> DependencySpec:
    """Returns a dependency on a workload."""
    return DependencySpec(workload="p", id=predecessor, condition=condition)


def small(*on: DependencySpec, **more: Any) -> WorkloadSpec:
    """Returns the specification of one small task with these dependencies."""
    return WorkloadSpec(name="w", tenant="t", jobs=(job(gpus=0, cpus_milli=1),), after=on, **more)


def submit(world: World, *on: DependencySpec, **more: Any) -> str:
    """Submits a small task as the API does; returns the id of the workload."""
    with world.session() as session:
        return enqueue(session, small(*on, **more), "key").id


def cancel(world: World, workload: str) -> None:
    """Cancels a workload that was never placed."""
    with world.session() as session:
        session.get_one(Workload, workload, with_for_update=True)
        end_queued(session, Phase.CANCELLED, {workload: (Reason(ReasonCode.CANCELLED_BY_USER, {"by": "x"}), {})})


@dataclass
class Plain:
    """A workload of the reference. Whether a condition holds follows from what has happened to the others."""

    on: list[Callable[[], State]]
    ends: bool
    phase: Phase = Phase.PENDING
    has_run: bool = False

    def state(self, condition: str) -> State:
        """Returns the state of a condition on this workload."""
        over = self.phase in TERMINAL_PHASES
        holds = {"ended": over, "started": self.has_run}.get(condition, self.phase == condition)
        return "met" if holds else "never" if over else "waiting"

    @property
    def blocked(self) -> str | None:
        """Returns what `workload.blocked` must be as long as the workload has not ended."""
        states = {one() for one in self.on}
        return "never" if "never" in states else "waiting" if "waiting" in states else None


@dataclass
class GraphOffice:
    """An installation and its reference, to which the same happens."""

    world: World
    chance: random.Random
    plain: dict[str, Plain] = field(default_factory=dict)
    deleted: set[str] = field(default_factory=set)
    due: set[str] = field(default_factory=set)
    days: int = 0

    def some(self, *phases: Phase) -> list[str]:
        found = [w for w, one in self.plain.items() if one.phase in phases]
        return self.chance.sample(found, min(1, len(found)))

    def submit(self) -> None:
        specs: list[DependencySpec] = []
        on: list[Callable[[], State]] = []
        known = sorted(self.plain.keys() - self.deleted)
        for predecessor in self.chance.sample(known, min(len(known), self.chance.choice([0, 0, 1, 1, 2, 3]))):
            condition = self.chance.choice(["succeeded", "succeeded", "ended", "failed", "started"])
            specs.append(after(predecessor, condition))
            on.append(partial(self.plain[predecessor].state, condition))
        if self.chance.random() < 0.2:
            day = max(1, self.days + self.chance.choice([0, 1]))
            specs.append(DependencySpec(table="days", partition=f"d{day}", condition="ready"))
            on.append(lambda: "met" if day <= self.days else "waiting")
        is_late = self.chance.random() < 0.2
        ends = self.chance.random() < 0.8
        id_ = submit(self.world, *specs, if_never="end" if ends else "keep", not_before=LATER if is_late else None)
        if is_late:
            on.append(lambda: "met" if id_ in self.due else "waiting")
        self.plain[id_] = Plain(on, ends)

    def tick(self) -> None:
        eligible = {
            w for w, one in self.plain.items() if one.phase in (Phase.PENDING, Phase.PREEMPTED) and not one.blocked
        }
        result = self.world.tick()
        assert set(self.world.queue()) == eligible and result.awarded == len(eligible)
        for workload in eligible:
            self.plain[workload].phase = Phase.PROVISIONING

    def run(self) -> None:
        for workload in self.some(Phase.PROVISIONING):
            self.world.run(workload)
            self.plain[workload].phase, self.plain[workload].has_run = Phase.RUNNING, True

    def stop(self) -> None:
        for workload in self.some(Phase.RUNNING, Phase.PROVISIONING):
            phases = [Phase.PREEMPTED, Phase.FAILED, Phase.CANCELLED]
            phase = self.chance.choice(
                [*phases, *[Phase.SUCCEEDED] * 4 * (self.plain[workload].phase == Phase.RUNNING)]
            )
            self.world.release(workload, phase)
            self.plain[workload].phase = phase

    def cancel(self) -> None:
        for workload in self.some(Phase.PENDING):
            cancel(self.world, workload)
            self.plain[workload].phase = Phase.CANCELLED

    def time_passes(self) -> None:
        with self.world.session() as session:
            sooner = text(
                "update dependency set due_at = now() where due_at > now() and random() < 0.5 returning workload"
            )
            self.due |= set(session.scalars(sooner))
        self.decide()

    def decide(self) -> None:
        ended = set(decide_dependencies(self.world.engine))
        expected: set[str] = set()
        while more := {w for w, one in self.plain.items()
                       if one.ends and one.phase is Phase.PENDING and one.blocked == "never"}:  # fmt: skip
            expected |= more
            for workload in more:
                self.plain[workload].phase = Phase.CANCELLED
        assert ended == expected

    def append(self) -> None:
        self.days += 1
        with self.world.session() as session:
            session.add(Partition(data_table="days", name=f"d{self.days}", location=f"d/{self.days}/", size_bytes=1))

    def delete(self) -> None:
        for workload in self.some(*TERMINAL_PHASES):
            with self.world.session() as session:
                session.execute(delete(Workload).where(Workload.id == workload))
            self.deleted.add(workload)

    def step(self) -> None:
        """Does something at random, and compares all states."""
        weights = {
            self.submit: 8, self.tick: 4, self.run: 6, self.stop: 6, self.cancel: 1, self.time_passes: 2,
            self.decide: 2, self.append: 1, self.delete: 2,
        }  # fmt: skip
        self.chance.choices(list(weights), list(weights.values()))[0]()
        self.check()

    def check(self) -> None:
        with self.world.session() as session:
            rows = {row.id: row for row in session.scalars(select(Workload))}
        assert rows.keys() == self.plain.keys() - self.deleted
        for id_, row in rows.items():
            one = self.plain[id_]
            if one.phase in PLACED_PHASES:
                assert Phase(row.phase) in PLACED_PHASES and row.blocked is None
            else:
                assert row.phase == one.phase
            if one.phase not in TERMINAL_PHASES:
                assert row.blocked == one.blocked, id_
                assert (row.held_at is not None) == (one.blocked is not None)
