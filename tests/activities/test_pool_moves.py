"""Pools limit which workloads use their machines, and plans are carried out: drains first, few at once, and once."""

from typing import Any

import pytest
from sqlalchemy import select, text

from activities.capacity.pool_plans import PoolPlanner
from activities.lifecycle.machines import give_notice
from domain.phases import Phase
from domain.reasons import Reason, ReasonCode
from domain.task_reports import NoticeReport
from infra.config.scheduling import CapacitySettings
from infra.db.capacity import PoolRow
from infra.db.models import Cluster, Machine
from infra.db.pool_plans import PoolPlan
from tests.activities.world import StalePlan, World, job

M1, M2, M3 = "r/c/m1", "r/c/m2", "r/c/m3"
PREEMPT = {"by": "mizzen", "code": "machine_drained", "pool": "p"}


@pytest.fixture
def fleet(world: World) -> World:
    """Two machines of four slots, and a pool without machines that serves tenant `u` only."""
    world.region("r")
    world.machine(M1)
    world.machine(M2)
    world.tenant("u")
    with world.session() as session:
        session.add(PoolRow(region="r", name="p", tenants=["u"], survives_loss=False))
    return world


def _round(world: World, **settings: Any) -> None:
    """Runs one round of a new process."""
    settings = {"moving_share": 1.0, **settings}
    assert PoolPlanner(world.engine, CapacitySettings(**settings)).round() == []


def _size(world: World, gpus: int, **columns: Any) -> None:
    world.alter(PoolRow, ("r", "p"), gpus={"a100": gpus} if gpus else {}, **columns)


def _machine(world: World, machine: str) -> tuple[str, str | None, str | None]:
    """Returns the pool of a machine, the one that it gets, and the code of its cordon."""
    with world.session() as session:
        row = session.get_one(Machine, machine)
        return row.pool, row.next_pool, None if row.cordon is None else str(row.cordon["code"])


def _assign(world: World, *machines: str) -> None:
    for machine in machines:
        world.alter(Machine, machine, pool="p")


def test_only_its_tenants_use_a_pool(fleet: World) -> None:
    """Others wait with a reason that names the pool; its tenants prefer it to machines that others could use."""
    _assign(fleet, M1)
    other = fleet.submit(job(tasks=2, gpus=4))
    assert fleet.tick().awarded == 0
    assert fleet.waiting(other) == ["no_hardware r", "in_other_pools r"]
    assert fleet.reasons(other)[-1]["sentence"] == "only tenants of p may use the machines of these pools in region r"
    own = fleet.submit(job(gpus=4), tenant="u")
    assert fleet.tick().awarded == 1
    assert fleet.holdings(own).keys() == {M1}
    second = fleet.submit(job(gpus=4), tenant="u")
    assert fleet.tick().awarded == 1
    assert fleet.holdings(second).keys() == {M2}
    fleet.alter(PoolRow, ("r", "p"), tenants=["t", "u"])  # Schedulers that run hear of it.
    assert fleet.tick().awarded == 0
    assert [code for code in fleet.waiting(other) if "pools" in code] == []


def test_an_award_checks_the_pool_again(fleet: World) -> None:
    """A plan that was made before its machine got into a pool of other tenants is stale."""
    offers = [fleet.offer(fleet.submit(job(gpus=4))) for _ in range(2)]
    _assign(fleet, M1, M2)
    for offer in offers:
        with pytest.raises(StalePlan):
            fleet.accept(offer)
    fleet.alter(PoolRow, ("r", "p"), tenants=[])
    assert fleet.accept(offers[0])


def test_a_machine_is_drained_before_it_moves(fleet: World) -> None:
    """Work of other tenants leaves with the usual message, once, whichever process runs each round; names stay."""
    work = fleet.running(job(gpus=4))
    (busy,) = fleet.holdings(work)
    idle = M2 if busy == M1 else M1
    _size(fleet, 8)
    _round(fleet)
    assert _machine(fleet, idle) == ("p", None, None)
    assert _machine(fleet, busy) == ("", "p", "moves_pool")
    assert [mail["detail"] for mail in fleet.mail(work, "preempt")] == [{**PREEMPT, "machine": busy}]
    _round(fleet)
    assert _machine(fleet, busy) == ("", "p", "moves_pool")
    assert len(fleet.mail(work, "preempt")) == 1
    fleet.release(work, Phase.PREEMPTED)
    assert fleet.tick().awarded == 0
    _round(fleet)
    assert _machine(fleet, busy) == ("p", None, None)
    assert [one["kind"] for one in fleet.events(kind="machine.moved")] == ["machine.moved"] * 2
    assert "in_other_pools r" in fleet.waiting(work)
    with fleet.session() as session:
        assert session.scalars(select(Machine.id).order_by(Machine.id)).all() == [M1, M2]
        made_at = session.get_one(PoolPlan, "r").made_at
    _round(fleet)
    with fleet.session() as session:
        assert session.get_one(PoolPlan, "r").made_at == made_at  # Its own moves are no change.


def test_work_that_the_pool_serves_stays(fleet: World) -> None:
    """A machine on which only the pool's tenants run gets into the pool at once."""
    work = fleet.running(job(gpus=4), tenant="u")
    _size(fleet, 8)
    _round(fleet)
    assert {_machine(fleet, machine) for machine in (M1, M2)} == {("p", None, None)}
    assert fleet.mail(work, "preempt") == []


def test_few_machines_move_at_once(fleet: World) -> None:
    """As many as the share allows, at least one; idle ones come first."""
    for number in range(3, 9):
        fleet.machine(f"r/c/m{number}")
    busy = {next(iter(fleet.holdings(fleet.running(job(gpus=4))))) for _ in range(4)}
    _size(fleet, 32)

    def moved() -> tuple[int, int]:
        _round(fleet, moving_share=0.25)
        with fleet.session() as session:
            rows = session.scalars(select(Machine)).all()
            return sum(row.pool == "p" for row in rows), sum(row.next_pool == "p" for row in rows)

    assert [moved() for _ in range(4)] == [(2, 0), (4, 0), (4, 2), (4, 2)]
    with fleet.session() as session:
        assert {row.id for row in session.scalars(select(Machine).where(Machine.pool == ""))} == busy


def test_what_happens_during_a_move(fleet: World) -> None:
    """An operator ends a move by uncordoning the machine, for a while; a notice keeps the machine closed after it."""
    work = fleet.running(job(tasks=2, gpus=4))
    _size(fleet, 8)
    _round(fleet)
    assert {_machine(fleet, machine) for machine in (M1, M2)} == {("", "p", "moves_pool")}
    fleet.alter(Machine, M1, cordon=None)
    notice = NoticeReport("aws", "preempt", True, 0.0, 99.0, "spot")
    with fleet.session() as session:
        row = session.get_one(Machine, M2, with_for_update=True)
        give_notice(session, row, Reason(ReasonCode.PLATFORM_NOTICE, {"machine": M2, **notice.numbers()}))
    for _ in range(2):
        _round(fleet)
        assert _machine(fleet, M1) == ("", None, None)
    fleet.release(work, Phase.PREEMPTED)
    _round(fleet)
    assert _machine(fleet, M2) == ("p", None, "platform_notice")


def test_a_machine_that_is_lost_for_a_moment_moves_nothing(fleet: World) -> None:
    """It stays in its pool and in plans for some time; after that another machine takes its place."""
    fleet.machine(M3)
    _assign(fleet, M1)
    _size(fleet, 4)
    _round(fleet)
    fleet.alter(Machine, M1, state="lost", lost_at=text("now()"))
    _round(fleet)
    assert [_machine(fleet, machine)[0] for machine in (M1, M2, M3)] == ["p", "", ""]
    _round(fleet, pool_patience_s=0)
    assert [_machine(fleet, machine)[0] for machine in (M1, M2, M3)] == ["p", "p", ""]
    fleet.alter(Machine, M1, state="ready", lost_at=None)
    _round(fleet)
    assert [_machine(fleet, machine)[0] for machine in (M1, M2, M3)] == ["", "p", ""]  # It is not needed any more.
    with fleet.session() as session:
        session.add(PoolRow(region="r", name="q", gpus={"a100": 4}, survives_loss=False, kinds=["reserved"]))
    fleet.alter(PoolRow, ("r", "p"), gpus={})
    _round(fleet)
    assert _machine(fleet, M3)[0] == "q"


def test_a_smaller_pool_leaves_machines(fleet: World) -> None:
    """What a pool does not need any more, all tenants may use again; what has just moved stays for a while."""
    _size(fleet, 8)
    _round(fleet)
    _size(fleet, 4)
    _round(fleet)
    assert [_machine(fleet, machine)[0] for machine in (M1, M2)] == ["p", "p"]
    _round(fleet, pool_patience_s=0)
    assert sorted(_machine(fleet, machine)[0] for machine in (M1, M2)) == ["", "p"]
    work = fleet.submit(job(gpus=4))
    assert fleet.tick().awarded == 1
    assert len(fleet.holdings(work)) == 1


def test_without_sizes_nothing_is_in_a_pool(fleet: World) -> None:
    """When the sizes of a pool are removed, its machines leave it and its moves end."""
    fleet.running(job(gpus=4))
    _size(fleet, 8)
    _round(fleet)
    _size(fleet, 0)
    _round(fleet)
    assert {_machine(fleet, machine) for machine in (M1, M2)} == {("", None, None)}
    with fleet.session() as session:
        assert session.get(PoolPlan, "r") is None


def test_plans_are_only_shown_if_so_set(fleet: World) -> None:
    """`capacity.move_machines: false` moves nothing."""
    _size(fleet, 8)
    _round(fleet, move_machines=False)
    assert {_machine(fleet, machine) for machine in (M1, M2)} == {("", None, None)}
    with fleet.session() as session:
        assert session.get_one(PoolPlan, "r").body["move_count"] == 2


def test_machines_of_one_tenant_are_in_no_pool(fleet: World) -> None:
    """Pilots that a tenant has brought are left out."""
    with fleet.session() as session:
        session.get_one(Cluster, ("r", "c")).tenant = "t"
    _size(fleet, 8)
    _round(fleet)
    assert {_machine(fleet, machine)[0] for machine in (M1, M2)} == {""}
