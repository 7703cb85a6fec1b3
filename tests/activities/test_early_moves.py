"""Jobs that leave lent machines before their owners ask: which ones do, what they are told, and where they go."""

import time
from typing import Any

import pytest
from sqlalchemy import select, text

from activities.reclaim.early import EarlyMover
from domain.phases import Phase
from domain.protocol import MailKind, ReleaseRequest
from domain.reasons import Reason, ReasonCode
from domain.serving import ServingSpec
from domain.spec import LimitsSpec
from infra.db.buckets import BucketState, publish_bucket
from infra.db.logs import Event, Outbox, Waiting
from infra.db.models import Attempt, Cluster, Machine, Workload
from infra.db.reclaim import SiteHazard
from infra.db.silent import SilentRegion, publish_silent
from infra.db.tenants import Tenant
from reclaim.hazard import HazardModel
from tests.activities.departures import departs_each_hour, paces
from tests.activities.world import World, job

C = 1_500_000_000
DAYS = LimitsSpec(max_runtime_s=4 * 86400.0)


@pytest.fixture
def campus(world: World) -> World:
    """A region with the lent buildings `hall`, whose owners come about every hour, and `lab`, and a reserved machine.

    `lab` takes no work until `_runs` has placed a workload.
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
    assert world.holdings(workload)
    world.alter(Attempt, (workload, 1), checkpoint_bytes=C, checkpoint_write_s=30.0, checkpoint_s=0.5)
    world.alter(Machine, "r/lab/m", draining=False)
    return workload


def _moves(world: World) -> list[str]:
    """Searches once; returns the workloads that were told to move."""
    return [one.workload for one in _mover(world).round()]


def _mover(world: World) -> EarlyMover:
    return EarlyMover(world.engine, world.settings.reclaim, HazardModel())


def _mail(world: World) -> list[tuple[str | None, dict[str, Any]]]:
    with world.session() as session:
        rows = session.scalars(select(Outbox).where(Outbox.kind == "mail").order_by(Outbox.id)).all()
        return [(row.workload, row.body) for row in rows if row.body["kind"] == MailKind.PREEMPT]


def _told(world: World, workload: str) -> Reason:
    """Returns why a workload was told to move."""
    with world.session() as session:
        told = select(Event).where(Event.kind == "workload.moves_early", Event.workload == workload)
        event = session.scalars(told).one()
        assert event.reason is not None
        return Reason.from_json(event.reason)


def _leave(world: World, workload: str) -> None:
    """Releases the workload as its workflow does: its tasks still save on its machines, for at most 30 s."""
    reason = _told(world, workload).to_json()
    machines = list(world.holdings(workload))
    request = ReleaseRequest(workload, 1, Phase.PREEMPTED.value, reason, [], None, machines, flushing_s=30.0)
    world.workloads.release(request)


def _expected(world: World, machine: str, hours: float) -> float:
    """Returns the departures of a machine that the model of hazards expects."""
    with world.session() as session:
        model, row = HazardModel(), session.get_one(SiteHazard, "r")
        states = [model.from_json(counts) for counts in (row.counts, row.noticed) if counts is not None]
    found = [model.expected(state, state.now_s, hours * 3600)[state.nodes.index(machine)] for state in states]
    assert len(found) == 2
    return float(sum(found))


def test_a_job_leaves_the_building_whose_owners_come_often(campus: World) -> None:
    """It is told once, with the reason; after its release it goes to the cluster for which it left."""
    workload = _runs(campus)
    (left,) = campus.holdings(workload)
    assert _moves(campus) == [workload]
    reason = _told(campus, workload)
    assert (reason.code, reason.detail["cluster"], reason.detail["hours"]) == (ReasonCode.MOVED_EARLY, "r/lab", 94)
    assert reason.detail["departures"] == pytest.approx(_expected(campus, left, 94), rel=0.02)
    assert reason.detail["departures_there"] == pytest.approx(_expected(campus, "r/lab/m", 94), rel=0.02)
    assert " departures of its machines are expected in the next 94 h, and " in reason.sentence
    ((told, mail),) = _mail(campus)
    assert (told, mail["attempt"], mail["detail"]["code"]) == (workload, 1, "moved_early")
    campus.change(workload, Phase.CHECKPOINTING)
    assert _moves(campus) == [] and len(_mail(campus)) == 1, "it was told before"
    _leave(campus, workload)
    assert _moves(campus) == []
    assert campus.tick().awarded == 1
    assert list(campus.holdings(workload, 2)) == ["r/lab/m"]


def test_the_departures_of_all_machines_of_a_gang_count(campus: World) -> None:
    """Two tasks on two machines would get one machine in `lab`."""
    for here, other in (("m1", "m2"), ("m2", "m1")):
        campus.alter(Machine, f"r/hall/{other}", draining=True)
        ends_soon = campus.running(job(gpus=2), capacity=("voluntary",), limits=LimitsSpec(max_runtime_s=7500.0))
        assert list(campus.holdings(ends_soon)) == [f"r/hall/{here}"]
        campus.alter(Machine, f"r/hall/{other}", draining=False)
    gang = _runs(campus, job(gpus=2, tasks=2))
    machines = list(campus.holdings(gang))
    assert machines == ["r/hall/m1", "r/hall/m2"]
    assert _moves(campus) == [gang]
    detail = _told(campus, gang).detail
    assert detail["departures"] == pytest.approx(sum(_expected(campus, one, 94) for one in machines), rel=0.02)
    assert detail["departures_there"] == pytest.approx(_expected(campus, "r/lab/m", 94), rel=0.02)


def test_a_job_moves_within_its_cluster(campus: World) -> None:
    """To the machine there whose owner comes rarely; plans leave out the others, although their ids come first."""
    campus.machine("r/hall/m0")
    campus.machine("r/hall/m3")
    paces(campus)
    for machine in ("m0", "m1", "m3"):
        campus.alter(Machine, f"r/hall/{machine}", draining=True)
    workload = campus.running(job(), capacity=("voluntary",), limits=DAYS, ago_s=7200.0)
    assert list(campus.holdings(workload)) == ["r/hall/m2"]
    campus.alter(Attempt, (workload, 1), checkpoint_bytes=C, checkpoint_write_s=30.0, checkpoint_s=0.5)
    for machine in ("m1", "m3"):
        campus.alter(Machine, f"r/hall/{machine}", draining=False)
    assert _moves(campus) == [workload]
    assert _told(campus, workload).detail["cluster"] == "r/hall"
    _leave(campus, workload)
    assert campus.tick().awarded == 1
    assert list(campus.holdings(workload, 2)) == ["r/hall/m3"]


def test_a_job_whose_place_was_taken_evicts_nobody(campus: World) -> None:
    """It waits until it has saved, and goes back. Later it is placed like any other workload."""
    workload = _runs(campus, job(gpus=4), capacity=("voluntary", "reserved"))
    (left,) = campus.holdings(workload)
    assert _moves(campus) == [workload]
    low = [campus.running(job(gpus=4), capacity=("voluntary", "reserved"), level=6) for _ in range(3)]
    assert [len(campus.holdings(one)) for one in low] == [1, 1, 1], "the fleet is full"
    _leave(campus, workload)
    result = campus.tick()
    assert result.awarded == 0 and result.rest_s is not None and result.rest_s <= 300.0
    assert "evicts_later r" in campus.waiting(workload)
    with campus.session() as session:
        old = text("update attempt set released_at = now() - interval '301 s' where workload = :w and attempt = 1")
        session.execute(old, {"w": workload})
    assert campus.tick().awarded == 1, "it evicts a workload of lower priority"
    assert left not in campus.holdings(workload, 2)


STAYS = {
    "has just started": {"ago_s": 1800.0},
    "ends soon": {"limits": LimitsSpec(max_runtime_s=7500.0)},
    "is not queued again": {"one_attempt": True},
    "needs more than is free": {"jobs": (job(gpus=2), job("b", gpus=3))},
    "is in two buildings": {"jobs": (job(gpus=4), job("b", gpus=4), job("c", gpus=2)), "open": True},
    "is partly on a machine that is not lent": {
        "jobs": (job(gpus=4), job("b", gpus=4), job("c", gpus=2)),
        "capacity": ("voluntary", "reserved"),
    },
    "serves": {"serving": ServingSpec(port=8080)},
}


@pytest.mark.parametrize("case", STAYS.values(), ids=list(STAYS))
def test_a_job_that_stays(campus: World, case: dict[str, Any]) -> None:
    case = dict(case)
    if case.pop("open", False):
        campus.alter(Machine, "r/lab/m", draining=False)
    workload = _runs(campus, *case.pop("jobs", ()), **case)
    assert _moves(campus) == [] and _mail(campus) == []
    assert campus.workload(workload).phase == Phase.RUNNING


@pytest.mark.parametrize(
    "case",
    [
        "off", "other type", "lab is not lent", "as busy there", "noticed", "moved often", "saves too slowly",
        "slow once", "no bucket", "silent region", "tenant over its quota", "was stopped meanwhile",
    ],
)  # fmt: skip
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
    if case == "saves too slowly":
        campus.alter(Attempt, (workload, 1), checkpoint_write_s=119.0)
    if case == "slow once":
        campus.alter(Attempt, (workload, 1), saves=[[C, 30.0], [C, 300.0], [C, 30.0]])
    if case == "no bucket":
        with campus.session() as session:
            publish_bucket(session, "r", BucketState("file:///gone", failing_since_s=time.time() - 600, error="gone"))
    if case == "silent region":
        with campus.session() as session:
            publish_silent(session, {"r": SilentRegion(time.time() - 600, False)})
    if case == "tenant over its quota":
        other = campus.running(job(), capacity=("voluntary",))
        campus.alter(Attempt, (other, 1), rank=8)
    if case == "was stopped meanwhile":
        mover = _mover(campus)
        tell = mover._tell

        def late(*given: Any) -> bool:
            campus.change(workload, Phase.CHECKPOINTING)
            return tell(*given)

        mover._tell = late  # type: ignore[method-assign]
        assert mover.round() == []
    assert _moves(campus) == [] and _mail(campus) == []


@pytest.mark.parametrize("code", [None, "insufficient_capacity", "refused_like", "reserved", "waiting_for_capacity"])
def test_no_job_moves_while_another_waits_for_capacity(campus: World, code: str | None) -> None:
    """What is free is meant for workloads that wait. None: no pass has looked at the workload yet."""
    workload = _runs(campus)
    waiting = campus.submit(job(gpus=4), capacity=("voluntary",))
    if code is not None:
        with campus.session() as session:
            session.add(Waiting(workload=waiting, reasons={"reasons": [{"code": code, "detail": {}, "sentence": ""}]}))
    assert _moves(campus) == []
    with campus.session() as session:
        session.merge(Waiting(workload=waiting, reasons={"reasons": [{"code": "quota_exceeded", "detail": {}}]}))
    assert _moves(campus) == [workload], "what waits for quota does not wait for capacity"


def test_a_workload_on_hold_does_not_wait_for_capacity(campus: World) -> None:
    workload = _runs(campus)
    campus.alter(Workload, campus.submit(job(gpus=4), capacity=("voluntary",)), held_by="u")
    assert _moves(campus) == [workload]


def test_two_jobs_do_not_move_into_the_same_room(campus: World) -> None:
    """`lab` has room for one of them. That with the larger gain goes: it departs as often, and saves more rarely. Until
    it is there, the next search tells nobody.
    """
    first = campus.running(job(gpus=3), capacity=("voluntary",), limits=DAYS, ago_s=7200.0)
    second = _runs(campus, job(gpus=3))
    campus.alter(Attempt, (first, 1), checkpoint_bytes=3 * C, checkpoint_write_s=90.0, checkpoint_s=0.5)
    assert _moves(campus) == [first]
    campus.change(first, Phase.CHECKPOINTING)
    campus.alter(Attempt, (first, 1), checkpoint_bytes=None)
    assert _moves(campus) == []
    assert [workload for workload, _ in _mail(campus)] == [first] != [second]


@pytest.mark.parametrize("stall_s", [1e6, 1e300])
def test_a_reported_stall_buys_nothing(campus: World, stall_s: float) -> None:
    """No save stalls a job for longer than it takes."""
    workload = _runs(campus)
    campus.alter(Attempt, (workload, 1), checkpoint_s=stall_s)
    assert _moves(campus) == [workload]
    assert _told(campus, workload).detail["gain_s"] < DAYS.max_runtime_s  # type: ignore[operator]


def test_a_search_is_due_once_an_hour(campus: World) -> None:
    """Control periods are shorter; a mover that has just looked does not look again."""
    mover = _mover(campus)
    workload = _runs(campus)
    campus.alter(Machine, "r/lab/m", draining=True)
    assert mover.round() == []
    campus.alter(Machine, "r/lab/m", draining=False)
    assert mover.round() == []
    assert _moves(campus) == [workload]
