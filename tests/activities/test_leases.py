"""Leases of elements by runners: each element is done by one attempt, however runners stop, fail or are lost."""

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from sqlalchemy import text

from activities.lifecycle.leases import LeaseActivities
from domain.ids import runner_id
from domain.phases import Phase
from domain.protocol.leases import ElementResult, LeasedElement, LeaseRequest
from domain.protocol.workloads import ReleaseRequest
from domain.reasons import Reason, ReasonCode
from domain.spec import LimitsSpec, RunnersSpec
from infra.db.array_rows import set_throttle
from infra.db.models import Workload
from tests.activities.array_walk import SLOTS, array_spec, end_arrays, settle
from tests.activities.world import World

NOW_S = 1_750_000_000.0


class Runners:
    """An array with runners on a fleet of `SLOTS` slots."""

    def __init__(self, world: World, elements: int, throttle: int | None = None, retries: int = 0, **more: Any) -> None:
        self.world = world
        spec = array_spec((0, elements - 1, 1), throttle=throttle, runners=RunnersSpec(**more))
        self.array = world.submit(array=spec, limits=LimitsSpec(retries=retries))
        self._leases = LeaseActivities(world.engine)

    def runner(self, number: int) -> str:
        """Returns the id of a runner."""
        return runner_id(self.array, number)

    def place(self) -> None:
        """Places and starts what can be placed."""
        settle(self.world)
        for row in self._rows("array_index is null and phase = 'placing'"):
            self.world.run(row["id"])

    def lease(
        self, number: int, results: Iterable[ElementResult] = (), took_s: float = 0.0, attempt: int | None = None
    ) -> list[LeasedElement]:
        """Leases the next chunk of a runner."""
        runner = self.runner(number)
        attempt = attempt or self.world.workload(runner).attempt
        return self._leases.lease(LeaseRequest(runner, attempt, list(results), took_s))

    def end(self, number: int, phase: Phase, code: ReasonCode, results: Iterable[ElementResult] = ()) -> None:
        """Releases the attempt of a runner, of whose elements `results` are known."""
        runner = self.runner(number)
        attempt, why = self.world.workload(runner).attempt, Reason(code, {"machine": "east/c/a", "by": "u"}).to_json()
        self.world.workloads.release(ReleaseRequest(runner, attempt, phase.value, why, elements=list(results)))

    def phases(self) -> dict[int, str]:
        """Returns the phases of the elements with a row, by index."""
        return {row["array_index"]: row["phase"] for row in self._rows("array_index is not null")}

    def placed(self) -> list[str]:
        """Returns the runners that hold slots."""
        rows = self._rows("array_index is null and finished_at is null and phase not in ('pending', 'preempted')")
        return [row["id"] for row in rows]

    def throttle(self, most: int | None) -> None:
        """Changes the throttle."""
        with self.world.session() as session:
            session.get_one(Workload, self.array, with_for_update=True)
            set_throttle(session, self.array, most)

    def finish(self) -> None:
        """Runs runners until the array has ended; each element that is leased succeeds."""
        for _ in range(100):
            self.place()
            for runner in self.placed():
                number = int(runner.rpartition("-r")[2])
                leased = self.lease(number)
                while leased:
                    leased = self.lease(number, map(good, leased), 1.0)
                self.end(number, Phase.SUCCEEDED, ReasonCode.COMPLETED)
            end_arrays(self.world)
            if self.world.workload(self.array).finished_at is not None:
                return
        raise AssertionError(f"the array does not end: {self.phases()}")

    def _rows(self, condition: str) -> Iterator[Any]:
        with self.world.session() as session:
            found = session.execute(
                text(f"select * from workload where array_id = :id and {condition} order by submitted_at"),
                {"id": self.array},
            )
            return iter(found.mappings().all())


@pytest.fixture
def fleet(world: World) -> World:
    """Two machines with `SLOTS` slots together."""
    world.region("east")
    for name in ("a", "b"):
        world.machine(f"east/c/{name}", SLOTS // 2)
    return world


def good(one: LeasedElement) -> ElementResult:
    """Returns the result of an element that succeeded."""
    return ElementResult(one.index, one.attempt, 0, began_s=NOW_S, ended_s=NOW_S + 1)


def begun(one: LeasedElement) -> ElementResult:
    """Returns what a heartbeat says about an element that runs."""
    return ElementResult(one.index, one.attempt, began_s=NOW_S)


def test_runners_share_the_elements(fleet: World) -> None:
    """A chunk is leased once: the same request returns it again, and other runners get other elements."""
    runners = Runners(fleet, 100, throttle=2)
    runners.place()
    assert runners.placed() == [runners.runner(0), runners.runner(1)]
    first, second = runners.lease(0), runners.lease(1)
    assert [one.index for one in first + second] == list(range(8)) and runners.lease(0) == first
    third = runners.lease(0, [*map(good, first[:3]), ElementResult(3, 1, 1, began_s=NOW_S, ended_s=NOW_S + 1)], 0.1)
    assert third[0] == LeasedElement(8, 1) and len(third) > 4
    assert [runners.phases()[index] for index in range(5)] == ["succeeded"] * 3 + ["failed", "running"]
    # A late repeat of the request changes nothing, nor does a result of another lease.
    assert runners.lease(0, map(good, first), 0.1) == third
    assert runners.lease(0, [ElementResult(8, 2, 0, began_s=NOW_S, ended_s=NOW_S)], 0.1)[0] == third[0]
    runners.finish()
    assert runners.phases() == dict.fromkeys(range(100), "succeeded") | {3: "failed"}
    assert fleet.workload(runners.array).phase == "failed"


def test_a_lost_machine_repeats_what_was_not_done(fleet: World) -> None:
    """Of a chunk on a lost machine, the elements whose end was reported are done; all others are leased again."""
    runners = Runners(fleet, 8, throttle=1)
    runners.place()
    chunk = runners.lease(0)
    assert len(chunk) == 4
    runners.end(0, Phase.PENDING, ReasonCode.MACHINE_LOST, [good(chunk[0]), begun(chunk[1])])
    assert runners.phases() == {0: "succeeded", 1: "pending", 2: "pending", 3: "pending"}
    # The lost attempt is fenced: what it says later changes nothing, and it gets nothing more.
    assert runners.lease(0, map(good, chunk), 1.0, attempt=1) == []
    assert runners.phases()[2] == "pending"
    runners.place()
    again = runners.lease(0)
    assert [(one.index, one.attempt) for one in again] == [(1, 2), (2, 2), (3, 2), (4, 1)]
    runners.finish()
    assert runners.phases() == dict.fromkeys(range(8), "succeeded")
    assert fleet.workload(runners.array).phase == "succeeded"
    assert [fleet.workload(f"{runners.array}-{k}").attempt for k in (0, 1, 4)] == [1, 2, 1]


def test_at_most_once(fleet: World) -> None:
    """With `at_most_once`, an element that may have been started fails, and one that was surely not is leased again."""
    runners = Runners(fleet, 4, throttle=1, at_most_once=True)
    runners.place()
    (one,) = runners.lease(0)
    runners.end(0, Phase.PENDING, ReasonCode.MACHINE_LOST)
    reason = fleet.workload(f"{runners.array}-{one.index}").reason
    assert reason is not None and reason["code"] == "at_most_once" and runners.phases() == {0: "failed"}
    runners.place()
    (one,) = runners.lease(0)
    runners.end(0, Phase.PREEMPTED, ReasonCode.EVICTED, [ElementResult(one.index, one.attempt)])
    assert runners.phases() == {0: "failed", 1: "preempted"}
    runners.finish()
    assert runners.phases() == dict.fromkeys(range(4), "succeeded") | {0: "failed"}


def test_the_throttle_limits_runners_while_it_changes(fleet: World) -> None:
    """A higher throttle places more runners, a lower one none until fewer hold slots; elements are not lost."""
    runners = Runners(fleet, 40, throttle=1)
    runners.place()
    runners.lease(0)
    assert len(runners.placed()) == 1
    runners.throttle(3)
    runners.place()
    assert len(runners.placed()) == 3
    runners.throttle(1)
    runners.end(2, Phase.PREEMPTED, ReasonCode.EVICTED)
    runners.place()
    assert runners.placed() == [runners.runner(0), runners.runner(1)]
    runners.throttle(None)
    runners.place()
    assert len(runners.placed()) == SLOTS
    runners.finish()
    assert runners.phases() == dict.fromkeys(range(40), "succeeded")


def test_no_more_runners_than_elements(fleet: World) -> None:
    """A runner is placed only if there is an element that it could lease, also if it waits in the queue."""
    runners = Runners(fleet, 4)
    runners.place()
    assert len(runners.placed()) == 4
    for number in (1, 2, 3):
        runners.end(number, Phase.PREEMPTED, ReasonCode.EVICTED)
    chunk = runners.lease(0)
    assert [one.index for one in chunk] == [0, 1, 2, 3][: len(chunk)]
    chunk = runners.lease(0, map(good, chunk), 0.001)
    left = 4 - len(runners.phases())
    runners.place()
    assert len(runners.placed()) == 1 + left
    runners.finish()
    assert {row.phase for row in map(fleet.workload, map(runners.runner, range(4)))} <= {"succeeded", "cancelled"}
    assert runners.phases() == dict.fromkeys(range(4), "succeeded")


def test_a_held_array_leases_nothing(fleet: World) -> None:
    """While the array is on hold, its runners finish their chunk and end; after the release it goes on."""
    runners = Runners(fleet, 20, throttle=2)
    runners.place()
    chunk = runners.lease(0)
    fleet.alter(Workload, runners.array, held_by="someone")
    assert runners.lease(0, map(good, chunk), 1.0) == []
    assert runners.phases() == dict.fromkeys(range(4), "succeeded")
    fleet.alter(Workload, runners.array, held_by=None)
    runners.end(0, Phase.SUCCEEDED, ReasonCode.COMPLETED)
    runners.finish()
    assert runners.phases() == dict.fromkeys(range(20), "succeeded")


def test_runners_that_cannot_start_end_the_array(fleet: World) -> None:
    """A runner that fails before it has leased fails one element: such runners do not follow each other for ever."""
    runners = Runners(fleet, 2, throttle=1)
    for number in (0, 1):
        runners.place()
        runners.end(number, Phase.FAILED, ReasonCode.SETUP_FAILED)
    end_arrays(fleet)
    assert runners.phases() == {0: "failed", 1: "failed"} and fleet.workload(runners.array).phase == "failed"


def test_retries_count_for_each_element(fleet: World) -> None:
    """An element that fails is leased again as often as `limits.retries` says, with its attempts and events."""
    runners = Runners(fleet, 1, throttle=1, retries=1)
    runners.place()
    again = runners.lease(0)
    for number in (1, 2):
        assert again == [LeasedElement(0, number)]
        again = runners.lease(0, [ElementResult(0, number, 7, began_s=NOW_S, ended_s=NOW_S + 1)], 1.0)
    assert again == [] and runners.phases() == {0: "failed"}
    assert len(fleet.events(f"{runners.array}-0", "workload.pending")) == 1
    assert len(fleet.events(f"{runners.array}-0", "workload.failed")) == 1
