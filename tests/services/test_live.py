"""Services on spot and on-demand machines: real workflows, ledger and scheduler, simulated machines."""

import asyncio
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from math import inf
from typing import Any

import pytest
from sqlalchemy import select, text

from capacity.provider import LaunchRefused, LaunchRequest, Refusal
from domain import ids
from domain.lifecycle.instances import InstancePhase
from domain.protocol.machines import TaskExit
from domain.protocol.workload_messages import MessageKind
from infra.db import outbox
from infra.db.capacity import InstanceRow
from infra.db.endpoints import Endpoint
from infra.db.logs import Event
from infra.db.models import Workload
from infra.db.services import BalancerReport, ServiceRow
from tests.activities.temporal import until
from tests.services.live import SHARED, Live, service
from tests.services.recording import Recording

_HOLD = """
create function hold() returns trigger language plpgsql as $$ begin
    new.held_by := 'operator';
    return new;
end $$;
create trigger hold before insert on workload for each row when (new.spec->>'name' = 'chat-0') execute function hold()
"""


def _zones(endpoints: list[Endpoint]) -> list[str]:
    return sorted(str(one.zone) for one in endpoints)


def _kinds(live: Live) -> list[str]:
    return sorted(one.kind for one in live.endpoints())


def _decided_s(live: Live) -> float:
    state = live.row().state
    assert state is not None
    return float(state["decided_at_s"])


async def test_a_service_comes_up_and_goes_down(live: Live) -> None:
    """Replicas get machines of their own in all zones; the end of the service ends them all."""
    live.up(service())
    await until(lambda: _zones(live.endpoints()) == ["za", "zb", "zc"], "a replica is ready in each zone", 40.0)
    assert len(live.site.natives()) >= 3
    live.down()
    await until(lambda: live.row().ended_at is not None, "the service has ended")
    assert live.site.natives() == set()
    assert live.endpoints() == []
    assert all(one.ended_at is not None for one in live.replicas())


@pytest.mark.long
async def test_a_lost_replica_is_replaced_elsewhere(live: Live) -> None:
    """A machine that is taken without notice costs one replica: another one is launched, and the zone is remembered."""
    live.up(service())
    first = await live.ready(3)
    taken = live.machine_of(first[0].replica)
    live.take(taken)
    await until(
        lambda: first[0].replica not in {e.replica for e in live.endpoints()}, "the lost replica is no endpoint"
    )
    await until(lambda: live.replicas()[first[0].replica].ended_at is not None, "the lost replica has ended")
    await live.ready(3)
    lost = live.replicas()[first[0].replica]
    assert (lost.cause, lost.ended_at is not None) == ("preempted", True)
    assert first[0].zone is not None
    state = live.row().state
    assert state is not None and state["policy"]["preempting"] == [f"west/{first[0].zone}"]


@pytest.mark.rotating
async def test_a_notice_starts_the_replacement_at_once(live: Live) -> None:
    """A replica whose machine is reclaimed with notice drains while its replacement starts."""
    live.up(service())
    first = await live.ready(3)
    leaving = first[0].replica
    live.notice(live.machine_of(leaving))
    await until(lambda: leaving in {e.replica for e in live.endpoints("draining")}, "the replica drains")
    await live.ready(3)
    await until(lambda: live.replicas()[leaving].ended_at is not None, "the replica has ended")
    assert live.replicas()[leaving].cause == "preempted"
    assert live.phase(leaving) == ("failed", "platform_notice")


@pytest.mark.rotating
async def test_a_service_lives_through_an_outage_of_spot(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """All zones lose their spot machines together: on-demand machines stand in until spot machines are back.

    The policy of the live service decides as the same policy without a database does on the same observations.
    """
    recorded = Recording()
    monkeypatch.setattr("activities.services.service_plan.make_policy", recorded.make)
    live.up(service())
    await until(lambda: _kinds(live) == ["spot"] * 3, "spot replicas are ready", 40.0)
    live.capacity(0)
    await until(lambda: _kinds(live) == ["on_demand"] * 2, "two on-demand replicas are ready", 40.0)
    assert {one.cause for one in live.replicas() if one.ended_at and one.kind == "spot"} == {"preempted", "refused"}
    live.capacity(3)
    await until(lambda: _kinds(live) == ["spot"] * 3, "spot replicas took over", 60.0)
    assert recorded.agrees()


@pytest.mark.rotating
async def test_what_was_granted_partly_is_kept(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """No zone has machines for all replicas. `spothedge+` keeps each machine that it gets until it has enough.

    The live policy decides as the same policy without a database does on the same observations. On a busy computer,
    replicas start late, so no launch counts as late here, and a replica may be placed late.
    """
    recorded = Recording()
    monkeypatch.setattr("activities.services.service_plan.make_policy", recorded.make)
    monkeypatch.setattr("services.spot.spothedge_plus._LATE", inf)
    patient = live.site.settings.services.model_copy(update={"placement_s": 300.0, "unready_s": 300.0})
    object.__setattr__(live.site.settings, "services", patient)
    live.capacity(1)
    live.up(service(placer="spothedge+", num_overprovision=0, min_replicas=3, max_replicas=3))
    zones = {"za", "zb", "zc"}
    await until(lambda: zones <= set(_zones(live.endpoints())), "a spot replica is ready in each zone", 80.0)
    spot = [one for one in live.replicas() if one.kind == "spot" and one.ended_at is not None]
    assert "scaled_down" not in {one.cause for one in spot}
    await until(lambda: len(recorded.seen) > 10, "enough decisions to compare", 60.0)
    assert recorded.agrees()


@pytest.mark.long
async def test_failed_replicas_are_launched_again_after_a_pause(live: Live) -> None:
    """A replica whose command fails is replaced; its workload is not queued again."""
    live.up(service(num_overprovision=0, min_replicas=1, max_replicas=1))
    (one,) = await live.ready(1)
    live.agents[live.machine_of(one.replica)].ends = TaskExit("server", 0, exit_code=3)
    await until(lambda: live.replicas()[one.replica].ended_at is not None, "the replica has ended")
    (other,) = await live.ready(1)
    assert other.replica != one.replica
    assert live.replicas()[one.replica].cause == "failed"
    assert live.phase(one.replica) == ("failed", "retries_exhausted")


@pytest.mark.long
async def test_a_service_without_spot_runs_on_shared_machines(live: Live) -> None:
    """Its replica is an ordinary workload; its workload may not run on machines of another service."""
    await live.shared_machine()
    live.up(service(placer=None, num_overprovision=0, min_replicas=1, max_replicas=1))
    (one,) = await live.ready(1)
    assert (live.machine_of(one.replica), one.kind) == (SHARED, "on_demand")
    assert live.site.natives() == set()


async def test_a_place_is_obeyed_without_spot(live: Live) -> None:
    """A replica that names a provider or zone gets machines of its own there; without one, it is not launched."""
    await live.shared_machine()
    spec = service(placer=None, num_overprovision=0, min_replicas=1, max_replicas=1)
    option = spec.options[0].model_copy(update={"spot": False})

    def options(*places: dict[str, object]) -> Any:
        return spec.model_copy(update={"options": tuple(option.model_copy(update=place) for place in places)})

    live.up(options({"zone": "nowhere"}))
    await until(lambda: "no_machine_fits" in live.row().notes, "the service says that no machine fits")
    live.update(options({"zone": "zd"}))
    (one,) = await live.ready(1)
    assert (str(one.zone), one.kind, len(live.site.natives())) == ("zd", "on_demand", 1)
    large = option.resources.model_copy(update={"gpus": 99})
    live.update(options({"zone": "nowhere"}, {"resources": large}, {}))
    await until(
        lambda: [live.machine_of(e.replica) for e in live.endpoints()] == [SHARED], "it runs on the shared machine"
    )


@pytest.mark.rotating
async def test_a_new_workflow_goes_on(live: Live) -> None:
    """If Temporal loses the service's workflow, a new one continues from Postgres, and launches nothing twice."""
    live.up(service(dynamic_ondemand_fallback=False))
    before = await live.ready(3)
    handle = live.site.client.get_workflow_handle(ids.service_workflow_id(live.service))
    await handle.terminate()
    live.take(live.machine_of(before[0].replica))
    await until(lambda: live.replicas()[before[0].replica].ended_at is not None, "the replica has ended")
    await live.ready(3)
    assert len(live.replicas()) == 4


@pytest.mark.long
async def test_a_replica_keeps_the_machine_on_which_it_runs(live: Live) -> None:
    """The auction may place a replica on a machine that was launched for another one: it is then its own."""
    live.up(service(num_overprovision=0))
    one, other = await live.ready(2)
    taken = live.machine_of(one.replica)
    with live.world.session() as session:
        mine, theirs = (
            session.scalars(select(InstanceRow).where(InstanceRow.workload == live.replicas()[n].workload)).one()
            for n in (one.replica, other.replica)
        )
        mine.workload, theirs.workload = theirs.workload, mine.workload
    with live.world.session() as session:
        outbox.message(session, live.replicas()[one.replica].workload, MessageKind.CANCEL, 0, by="test")
    await until(lambda: live.replicas()[one.replica].ended_at is not None, "the replica has ended")
    await live.ready(2)
    assert live.replicas()[other.replica].ended_at is None
    (mine,) = [row for row in live.site.rows() if row.machine == taken]
    await until(lambda: mine.id in {row.id for row in live.site.rows(InstancePhase.GONE)}, "its machine is gone")


async def test_a_replica_whose_machine_is_refused_keeps_the_machine_on_which_it_runs(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The auction may place it on the machine of another replica before the service sees the refusal. Then the other
    replica, which is not placed, ends as refused.

    The test holds the lock of the service until the replica is placed, so that the service decides afterwards.
    """
    launch, is_locked = live.site.provider.launch, threading.Event()

    def refuse_first(request: LaunchRequest) -> str:
        assert is_locked.wait(60.0)
        with live.world.session() as session:
            owner = session.get_one(InstanceRow, request.instance).workload
        if owner == live.replicas()[0].workload:
            raise LaunchRefused(Refusal.CAPACITY, "no such machine now")
        return launch(request)

    monkeypatch.setattr(live.site.provider, "launch", refuse_first)
    spec = service(num_overprovision=0, dynamic_ondemand_fallback=False)
    live.up(spec.model_copy(update={"options": (spec.options[0].model_copy(update={"zone": "za"}),)}))
    await until(lambda: len(live.replicas()) == 2, "two replicas are launched")
    first, second = live.replicas()
    live.capacity(1)
    with live.world.session() as session:
        session.get_one(ServiceRow, live.service, with_for_update=True)
        is_locked.set()
        await until(lambda: live.world.holdings(first.workload), "the first replica is placed")
        gone = InstancePhase.GONE
        await until(lambda: [r.workload for r in live.site.rows(gone)] == [first.workload], "its machine is refused")
        assert live.world.holdings(second.workload) == {}
    await until(lambda: live.replicas()[1].ended_at is not None, "the second replica has ended")
    (one,) = await live.ready(1)
    assert (live.replicas()[1].cause, one.replica, live.replicas()[0].leaving_at) == ("refused", 0, None)
    assert len(live.site.natives()) == 1


@pytest.mark.long
async def test_a_replica_of_two_machines_ends_with_either(live: Live) -> None:
    """Both machines are in one zone. If one is lost, the replica ends, and its other machine is ended, too."""
    alone = service(num_overprovision=0, min_replicas=1, max_replicas=1, dynamic_ondemand_fallback=False)
    live.up(alone.model_copy(update={"machines": 2}))
    (one,) = await live.ready(1)
    there = live.site.rows(InstancePhase.READY)
    assert len(there) == 2 and len({row.zone for row in there}) == 1
    machines = set(live.world.holdings(live.replicas()[one.replica].workload))
    assert machines == {row.machine for row in there}
    live.take(sorted(machines)[1])
    await until(lambda: live.replicas()[one.replica].ended_at is not None, "the replica has ended")
    assert live.replicas()[one.replica].cause == "preempted"
    (other,) = await live.ready(1)
    gone = {row.machine for row in live.site.rows(InstancePhase.GONE)}
    await until(lambda: machines <= {row.machine for row in live.site.rows(InstancePhase.GONE)}, "both are gone")
    assert other.replica != one.replica and gone <= machines


@pytest.mark.long
async def test_no_machine_stays_without_a_replica(live: Live) -> None:
    """A machine that belongs to a replica that has ended is ended, however it came to that, and the service can end."""
    live.up(service(num_overprovision=0, dynamic_ondemand_fallback=False))
    one, other = await live.ready(2)
    with live.world.session() as session:
        assert {row.level for row in session.scalars(select(Workload))} == {None}  # They must not evict each other.
        outbox.message(session, live.replicas()[one.replica].workload, MessageKind.CANCEL, 0, by="test")
    await until(lambda: live.replicas()[one.replica].ended_at is not None, "the replica has ended")
    await live.ready(2)
    ended, kept = (live.replicas()[number].workload for number in (one.replica, other.replica))
    with live.world.session() as session:
        instance = session.scalars(select(InstanceRow).where(InstanceRow.workload == kept)).one()
        instance.workload = ended
    live.down()
    await until(lambda: live.row().ended_at is not None, "the service has ended")
    assert live.site.natives() == set()


@pytest.mark.long
async def test_offers_that_vanish_cost_no_replica(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """A provider that offers no spot machines for a moment does not take them away."""
    live.up(service())
    await until(lambda: _kinds(live) == ["spot"] * 3, "spot replicas are ready", 40.0)
    launched = len(live.replicas())
    monkeypatch.setattr("activities.services.offers._KEPT_S", 0.0)
    monkeypatch.setattr(live.site.provider, "offers", list)
    for _ in range(2):
        decided_s = _decided_s(live)
        await until(lambda since_s=decided_s: _decided_s(live) > since_s, "another decision was taken")
    assert (_kinds(live), len(live.replicas())) == (["spot"] * 3, launched)


@pytest.fixture
def first_is_held(live: Live) -> Iterator[None]:
    """The first replica is put on hold as soon as it is inserted."""
    with live.world.session() as session:
        session.execute(text(_HOLD))
    yield
    with live.world.session() as session:
        session.execute(text("drop function hold cascade"))


@pytest.mark.long
@pytest.mark.usefixtures("first_is_held")
async def test_a_replica_that_is_not_placed_costs_no_machine_for_ever(live: Live) -> None:
    """A replica on hold: its machine is ready, and ended after `placement_s`, and another replica is launched."""
    live.up(service(num_overprovision=0, min_replicas=1, max_replicas=1, dynamic_ondemand_fallback=False))
    (one,) = await live.ready(1)
    first = live.replicas()[0]
    assert (first.cause, first.ended_at is not None, one.replica > 0) == ("refused", True, True)
    gone = {row.workload for row in live.site.rows(InstancePhase.GONE)}
    assert first.workload in gone


async def test_a_tenant_has_a_limit_on_machines(live: Live) -> None:
    """Replicas beyond `tenant_machines` are not launched, and the status says so."""
    few = live.site.settings.services.model_copy(update={"tenant_machines": 2})
    object.__setattr__(live.site.settings, "services", few)
    live.up(service(min_replicas=3, max_replicas=3))
    await live.ready(2)
    assert "machine_limit" in live.row().notes
    assert len(live.site.natives()) == 2


@pytest.mark.long
async def test_a_replica_on_shared_machines_gets_machines_of_its_own(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica that was launched while no provider offered machines waits for shared ones only until one does."""
    monkeypatch.setattr("activities.services.offers._KEPT_S", 0.0)
    offers = live.site.provider.offers
    monkeypatch.setattr(live.site.provider, "offers", list)
    live.up(service(num_overprovision=0, min_replicas=1, max_replicas=1))
    await until(lambda: len(live.replicas()) == 1 and live.replicas()[0].cluster is None, "a replica waits")
    assert "no_spot_zones" in live.row().notes
    monkeypatch.setattr(live.site.provider, "offers", offers)
    await until(lambda: _kinds(live) == ["spot"], "a spot replica is ready", 40.0)
    assert live.replicas()[0].ended_at is not None


@pytest.mark.rotating
async def test_a_replica_that_balancers_eject_is_replaced(live: Live) -> None:
    """Only if all balancers eject it. Events say which replica and why, and it no longer counts as ready."""
    for number in range(3):
        await live.shared_machine(f"west/owned/m{number}")
    live.up(service(placer=None, num_overprovision=0, min_replicas=2, max_replicas=2))
    sick, other = sorted(one.replica for one in await live.ready(2))

    def report(balancer: str, ejected_s: float | None) -> None:
        one = {"replica": sick, "ongoing": 1, "ejected_s": ejected_s, "why": "the last 3 requests failed"}
        with live.world.session() as session:
            session.merge(
                BalancerReport(service=live.service, balancer=balancer, reported_at=datetime.now(UTC), replicas=[one])
            )
            outbox.service(session, live.service)

    report("b1", 0.1)
    report("b2", None)
    await asyncio.sleep(2.5)
    assert live.replicas()[sick].ejected_at is None and live.replicas()[sick].ended_at is None
    report("b2", 0.1)
    await until(lambda: live.replicas()[sick].ended_at is not None, "the replica is ended", 40.0)
    assert live.replicas()[sick].cause == "failing" and live.replicas()[other].ended_at is None
    assert {one.replica for one in await live.ready(2)} == {other, sick + 2}
    with live.world.session() as session:
        event = session.scalar(select(Event).where(Event.kind == "service.replica_ejected"))
        assert event is not None and (event.detail["replica"], event.detail["why"]) == (
            sick, "the last 3 requests failed",
        )  # fmt: skip


async def test_one_waiting_request_wakes_a_service_from_zero(live: Live) -> None:
    """Although `upscale_delay_s` is long, and no second was counted."""
    await live.shared_machine()
    live.up(
        service(
            placer=None, num_overprovision=0, min_replicas=0, max_replicas=2, target_qps_per_replica=1.0,
            upscale_delay_s=300.0,
        )
    )  # fmt: skip
    await until(lambda: live.row().state is not None, "a decision")
    assert live.row().target == 0 and live.replicas() == []
    with live.world.session() as session:
        session.add(BalancerReport(service=live.service, balancer="b1", waiting=1))
        outbox.service(session, live.service)
    await live.ready(1)
    assert live.row().target == 1
