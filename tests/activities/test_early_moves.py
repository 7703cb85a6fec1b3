"""Jobs that leave lent machines before their owners ask: which ones do, what they are told, and where they go."""

from typing import Any

import pytest
from sqlalchemy import select, text

from activities.reclaim.early import EarlyMove, EarlyMover
from domain.phases import Phase
from domain.protocol import MailKind
from domain.reasons import Reason, ReasonCode
from domain.spec import LimitsSpec
from infra.db.logs import Event, Outbox
from infra.db.models import Attempt, Cluster, Machine, Workload
from infra.db.tenants import Tenant
from reclaim.hazard import HazardModel
from tests.activities.departures import departs_each_hour, paces
from tests.activities.world import World, job

C = 1_500_000_000
DAYS = LimitsSpec(max_runtime_s=4 * 86400.0)


@pytest.fixture
def campus(world: World) -> World:
    """A region with the lent buildings `hall`, whose owners come about every hour, and `lab`, and a reserved machine.

    `lab` is full until `_opens`.
    """
    world.region("r")
    for machine in ("r/hall/m1", "r/hall/m2", "r/lab/m", "r/own/m"):
        world.machine(machine)
    for cluster in ("hall", "lab"):
        world.alter(Cluster, ("r", cluster), capacity="voluntary")
    reclaim = world.settings.reclaim.model_copy(update={"forecasts": True})
    world.settings = world.settings.model_copy(update={"reclaim": reclaim})
    paces(world)
    departs_each_hour(world, "r/hall/m1", "r/hall/m2")
    world.alter(Machine, "r/lab/m", draining=True)
    return world


def _runs(world: World, *jobs: Any, ago_s: float = 7200.0, **more: Any) -> str:
    """Runs a workload in `hall`, which has saved a checkpoint. Then the machine in `lab` takes work, too."""
    more = {"capacity": ("voluntary",), "limits": DAYS} | more
    workload = world.running(*(jobs or (job(),)), ago_s=ago_s, **more)
    assert {machine.split("/")[1] for machine in world.holdings(workload)} <= {"hall", "own"}
    world.alter(Attempt, (workload, 1), checkpoint_bytes=C, checkpoint_write_s=30.0, checkpoint_s=0.5)
    world.alter(Machine, "r/lab/m", draining=False)
    return workload


def _moves(world: World) -> list[EarlyMove]:
    return EarlyMover(world.engine, world.settings.reclaim, HazardModel()).round()


def _mail(world: World) -> list[tuple[str | None, dict[str, Any]]]:
    with world.session() as session:
        rows = session.scalars(select(Outbox).where(Outbox.kind == "mail").order_by(Outbox.id)).all()
        return [(row.workload, row.body) for row in rows if row.body["kind"] == MailKind.PREEMPT]


def test_a_job_leaves_the_building_whose_owners_come_often(campus: World) -> None:
    """It is told once, with the reason; after its release it goes to the cluster for which it left."""
    workload = _runs(campus)
    (move,) = _moves(campus)
    assert (move.workload, move.attempt, move.region) == (workload, 1, "r")
    assert move.reason.detail["cluster"] == "r/lab"
    assert move.reason.detail["hours"] == 94
    assert move.reason.detail["departures"] > 3 * move.reason.detail["departures_there"]  # type: ignore[operator]
    assert "before an owner asks" in move.reason.sentence
    ((told, mail),) = _mail(campus)
    assert (told, mail["attempt"], mail["detail"]["code"]) == (workload, 1, "moved_early")
    with campus.session() as session:
        (event,) = session.scalars(select(Event).where(Event.kind == "workload.moves_early")).all()
        assert (event.workload, event.attempt, event.reason) == (workload, 1, move.reason.to_json())
    assert _moves(campus) == [] and len(_mail(campus)) == 1, "it was told before"
    campus.release(workload, Phase.PREEMPTED)
    campus.alter(Attempt, (workload, 1), outcome=move.reason.to_json())
    assert campus.tick().awarded == 1
    assert list(campus.holdings(workload, 2)) == ["r/lab/m"]


def test_a_job_whose_place_was_taken_goes_back(campus: World) -> None:
    """It waits for nothing: the machine that it left is still there."""
    workload = _runs(campus)
    (move,) = _moves(campus)
    campus.release(workload, Phase.PREEMPTED)
    campus.alter(Attempt, (workload, 1), outcome=move.reason.to_json())
    campus.alter(Machine, "r/lab/m", draining=True)
    assert campus.tick().awarded == 1
    (machine,) = campus.holdings(workload, 2)
    assert machine.startswith("r/hall/")


STAYS = {
    "has just started": {"ago_s": 1800.0},
    "ends soon": {"limits": LimitsSpec(max_runtime_s=7500.0)},
    "is not queued again": {"one_attempt": True},
    "needs more than is free": {"jobs": (job(gpus=2), job("b", gpus=3))},
}


@pytest.mark.parametrize("case", STAYS.values(), ids=list(STAYS))
def test_a_job_that_stays(campus: World, case: dict[str, Any]) -> None:
    case = dict(case)
    workload = _runs(campus, *case.pop("jobs", ()), **case)
    assert _moves(campus) == [] and _mail(campus) == []
    assert campus.workload(workload).phase == Phase.RUNNING


@pytest.mark.parametrize("case", ["off", "other type", "lab is not lent", "as busy there", "noticed", "moved often"])
def test_no_move(campus: World, case: str) -> None:
    """What is asked of the fleet and of the job before it moves."""
    if case == "off":
        reclaim = campus.settings.reclaim.model_copy(update={"forecasts": False})
        campus.settings = campus.settings.model_copy(update={"reclaim": reclaim})
    if case == "other type":
        with campus.session() as session:
            session.get_one(Tenant, "t").quota_gpus = {"a100": 8, "h100": 8}
        campus.machine("r/lab/m", gpu_type="h100")
        campus.alter(Machine, "r/lab/m", draining=True)
    if case == "as busy there":
        departs_each_hour(campus, "r/lab/m")
    gpus = {"types": ("a100", "h100")} if case == "other type" else {}
    workload = _runs(campus, job(**gpus))
    if case == "lab is not lent":
        campus.alter(Cluster, ("r", "lab"), capacity="spot")
    if case == "noticed":
        campus.alter(Attempt, (workload, 1), notice={"kind": "preempt"})
    if case == "moved often":
        moved = Reason(ReasonCode.MOVED_EARLY, {"cluster": "r/lab"}).to_json()
        with campus.session() as session:
            session.execute(
                text(
                    "insert into attempt (workload, attempt, region, plan, gpu_types, cpus_milli, outcome, released_at)"
                    " select workload, -n, region, plan, gpu_types, cpus_milli, cast(:moved as jsonb), now()"
                    " from attempt, generate_series(1, 4) as n where workload = :workload"
                ),
                {"workload": workload, "moved": str(moved).replace("'", '"')},
            )
    assert _moves(campus) == []


def test_no_job_moves_while_another_waits_for_capacity(campus: World) -> None:
    """What is free is meant for workloads that wait. One that is on hold does not wait for capacity."""
    _runs(campus)
    waiting = campus.submit(job(gpus=4), job("b", gpus=4), job("c", gpus=4), capacity=("voluntary",))
    assert _moves(campus) == [], "no pass has looked at it"
    assert campus.tick().awarded == 0
    assert _moves(campus) == [], "it waits"
    campus.alter(Workload, waiting, held_by="u")
    assert len(_moves(campus)) == 1


def test_two_jobs_do_not_move_into_the_same_room(campus: World) -> None:
    """`lab` has room for one of them. That with the larger gain goes: it departs as often, and saves more rarely."""
    first = campus.running(job(gpus=3), capacity=("voluntary",), limits=DAYS, ago_s=7200.0)
    second = _runs(campus, job(gpus=3))
    campus.alter(Attempt, (first, 1), checkpoint_bytes=4 * C, checkpoint_write_s=120.0, checkpoint_s=0.5)
    assert [move.workload for move in _moves(campus)] == [first]
    assert [workload for workload, _ in _mail(campus)] == [first]
    assert second != first


def test_a_search_is_due_once_an_hour(campus: World) -> None:
    """Control periods are shorter; a mover that has just looked does not look again."""
    mover = EarlyMover(campus.engine, campus.settings.reclaim, HazardModel())
    _runs(campus)
    campus.alter(Machine, "r/lab/m", draining=True)
    assert mover.round() == []
    campus.alter(Machine, "r/lab/m", draining=False)
    assert mover.round() == []
    assert len(_moves(campus)) == 1
