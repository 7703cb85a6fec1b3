"""Instances from request to end, on a real Temporal server, a real Postgres and a simulated cloud."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import Engine, func, select
from temporalio.client import Client

from activities.capacity.keeper import PoolKeeper
from activities.capacity.ledger import record_refusal
from activities.capacity.pools import Pools, request_instance
from activities.lifecycle.unattended import Suspects
from capacity.offers import Offer, Shape
from capacity.pools import Pool
from capacity.provider import FoundMachine, LaunchRefused, LaunchRequest, Refusal
from capacity.providers.registry import STATIC
from capacity.providers.static import StaticProvider
from capacity.providers.trace.provider import TraceProvider
from capacity.providers.trace.settings import TraceProviderSettings
from domain import ids
from domain.capacity import CapacityKind
from domain.lifecycle.instances import InstancePhase
from domain.phases import Phase
from domain.reasons import Reason, ReasonCode
from infra.db.capacity import PoolRow
from infra.db.models import Cluster, ClusterPrice, Machine, Workload
from tests.activities.world import World, job
from tests.capacity.site import CLOUD, Site
from tests.capacity.unreliable import Unreliable


async def test_a_pool_grows_and_shrinks(site: Site) -> None:
    """A pool launches the cheapest offers first; when it shrinks, machines, their rows and their workflows end."""
    site.pool(4)
    await site.rounds_until(lambda: site.phases().get("ready") == 4, "four machines are ready")
    there = site.rows()
    assert sorted(row.zone for row in there if row.phase == "ready") == ["za", "za", "za", "zb"]
    assert site.natives() == {row.native_id for row in there if row.phase == "ready"}
    assert site.machines() == {row.machine for row in there if row.phase == "ready"}
    with site.world.session() as session:
        assert set(session.scalars(select(Machine.pool))) == {"burst"}
    site.pool(1)
    await site.rounds_until(lambda: len(site.machines()) == 1, "three machines have left")
    (left,) = site.rows(InstancePhase.READY)
    assert site.natives() == {left.native_id}
    assert {row.reason["code"] for row in site.rows(InstancePhase.GONE) if row.native_id and row.reason} == {
        "pool_shrinks"
    }
    for row in site.rows(InstancePhase.GONE):
        described = await site.client.get_workflow_handle(ids.instance_workflow_id(row.id)).describe()
        assert described.status is not None
        assert described.status.name == "COMPLETED"


async def test_a_refusal_is_a_fact_and_the_next_offer_is_asked(site: Site) -> None:
    """A refused launch is recorded and the next offer is tried; without offers the pool gives the reason."""
    site.pool(6, kinds=["spot"])
    await site.rounds_until(lambda: site.why_short() == "capacity_refused", "the pool gives its reason")
    assert len(site.natives()) == 3
    refused = [row for row in site.rows(InstancePhase.GONE) if row.reason]
    assert {row.reason["code"] for row in refused if row.reason} == {"capacity_refused"}
    site.pool(5, kinds=[])
    await site.rounds_until(lambda: site.phases().get("ready") == 5, "the other zone has launched machines")
    site.pool(6, kinds=["voluntary"])
    await site.rounds_until(lambda: site.why_short() == "no_offer", "the pool has the reason no_offer")


@pytest.mark.rotating
async def test_lost_answers_launch_nothing_twice(site: Site) -> None:
    """If a provider's response is lost, the repeated request has the same token and launches no second machine."""
    losing = ["launch", "launch", "terminate", "describe", "offers"]

    def fault(method: str) -> str:
        return "lost" if method in losing and not losing.remove(method) else ""  # type: ignore[func-returns-value]

    site.provider.faults = fault
    site.pool(2)
    await site.rounds_until(lambda: site.phases().get("ready") == 2, "two machines are ready")
    assert len(site.natives()) == 2
    site.pool(0)
    await site.rounds_until(lambda: site.phases() == {"gone": 2}, "both instances are gone")
    assert losing == []
    assert site.natives() == set()
    assert site.events("instance.without_owner") == []


async def test_a_launch_without_an_answer_says_so(site: Site) -> None:
    """An instance whose launch is not confirmed has the provider's error as its reason, until it is."""
    site.provider.faults = lambda method: "away" if method == "launch" else ""
    site.pool(1)

    def codes() -> list[str]:
        return [str((row.reason or {}).get("code")) for row in site.rows()]

    await site.rounds_until(lambda: codes() == ["launch_unconfirmed"], "the instance gives its reason")
    site.provider.faults = lambda _: ""
    await site.rounds_until(lambda: codes() == ["joined"], "the machine is ready")


async def test_an_end_without_an_answer_says_so(site: Site) -> None:
    """An instance that its provider does not end has the provider's error as its reason, until it is gone."""
    site.pool(1)
    await site.rounds_until(lambda: site.phases().get("ready") == 1, "a machine is ready")
    site.provider.faults = lambda method: "away" if method == "terminate" else ""
    site.pool(0)

    def codes() -> list[str]:
        return [str(row.reason["code"]) for row in site.rows() if row.reason]

    await site.rounds_until(lambda: codes() == ["end_unconfirmed"], "the instance gives its reason")
    site.provider.faults = lambda method: ""
    await site.rounds_until(lambda: codes() == ["pool_shrinks"], "the instance is gone, for its own reason")
    assert site.phases() == {"gone": 1}


async def test_a_second_machine_is_ended_and_counted(site: Site) -> None:
    """If a provider ignores client tokens, a duplicate machine is found by its tag, terminated and recorded."""
    site.provider.knows_tokens = False
    losing = ["launch"]
    site.provider.faults = lambda method: "lost" if losing and method == losing[0] and losing.pop() else ""
    site.pool(1)
    keeper = site.keeper()
    await site.rounds_until(lambda: site.phases().get("ready") == 1, "one instance is ready", keeper)
    await site.rounds_until(lambda: len(site.natives()) == 1, "the duplicate is terminated", keeper)
    (row,) = site.rows()
    assert site.natives() == {row.native_id}
    (told,) = site.events("instance.without_owner")
    assert (told["instance"], told["why"]) == (row.id, "second")


async def test_what_nobody_owns_is_ended_when_it_is_found_again(site: Site) -> None:
    """A machine without an owner is terminated only when it is found twice, because a provider's list may lag."""
    offer: Offer = site.provider.behind.offers()[0]
    site.provider.behind.launch(LaunchRequest("in-stranger", "west/c/m", offer, "file:///b", "t", "key"))
    keeper = site.keeper()
    await keeper.round()
    assert len(site.natives()) == 1
    await asyncio.sleep(site.settings.capacity.interval_s)
    await keeper.round()
    assert site.natives() == set()
    (told,) = site.events("instance.without_owner")
    assert told == {"provider": "sim", "native_id": "tr-in-stranger", "instance": "in-stranger", "why": "stray"}


async def test_two_providers_of_one_account(site: Site) -> None:
    """Machines that another provider launched are not without an owner, although both providers list them."""
    twin = TraceProvider("twin", TraceProviderSettings.model_validate(CLOUD), site.cloud)
    keeper = PoolKeeper(site.world.engine, site.settings, site.client, {"twin": twin, "sim": site.provider})
    site.pool(2, providers=["sim"])
    await site.rounds_until(lambda: site.phases().get("ready") == 2, "two machines are ready", keeper)
    there = site.natives()
    for _ in range(3):
        await keeper.round()
        await asyncio.sleep(site.settings.capacity.interval_s)
    assert (site.natives(), site.events("instance.without_owner")) == (there, [])


async def test_what_the_provider_took_is_lost_and_replaced(site: Site) -> None:
    """A machine that the provider no longer lists is lost immediately, before its agent times out, and replaced."""
    site.pool(1)
    await site.rounds_until(lambda: site.phases().get("ready") == 1, "one instance is ready")
    (first,) = site.rows()
    assert first.machine is not None
    site.cloud.end(str(first.native_id))
    await site.rounds_until(lambda: site.phases() == {"ready": 1, "gone": 1}, "another instance is ready")
    gone, _ = site.rows()
    assert gone.reason is not None
    assert gone.reason["code"] == "not_at_provider"
    await site.rounds_until(
        lambda: first.machine not in site.machines(), "the machine of the first instance is deleted"
    )


async def test_one_whose_agent_never_comes_is_ended_and_replaced(
    database: Engine, database_url: str, client: Client, tmp_path: Path
) -> None:
    """An instance whose agent does not join within `join_s` is terminated and replaced."""
    async with Site.open(database, database_url, client, tmp_path, join_s=1.0) as site:
        site.agents.silent = True
        site.pool(1)
        await site.rounds_until(lambda: len(site.rows()) == 2, "another instance is requested")
        site.agents.silent = False
        await site.rounds_until(lambda: site.phases().get("ready") == 1, "another instance is ready")
        first, *_ = site.rows()
        assert first.reason is not None
        assert first.reason["code"] == "never_joined"
        await site.rounds_until(lambda: len(site.natives()) == 1, "the first instance is terminated")


async def test_one_whose_agent_is_away_is_ended_and_replaced(site: Site) -> None:
    """An instance whose machine is lost and does not return in time is terminated and replaced."""
    site.pool(1)
    await site.rounds_until(lambda: site.phases().get("ready") == 1, "one instance is ready")
    (first,) = site.rows()
    assert first.machine is not None
    site.agents.silent = True
    site.world.machines.lost(site.world.attend(first.machine, "boot-1"))
    await site.rounds_until(lambda: site.natives().isdisjoint({first.native_id}), "the first instance is terminated")
    site.agents.silent = False
    await site.rounds_until(lambda: site.phases() == {"ready": 1, "gone": 1}, "another instance is ready")
    (gone,) = site.rows(InstancePhase.GONE)
    assert gone.reason is not None
    assert gone.reason["code"] == "agent_away"


@pytest.mark.rotating
async def test_one_that_is_to_end_waits_for_what_runs_there(site: Site) -> None:
    """A machine is drained before its instance ends, and terminated only when no task holds slots or is saving."""
    site.pool(1)
    await site.rounds_until(lambda: site.phases().get("ready") == 1, "one instance is ready")
    (row,) = site.rows()
    site.world.tenant()
    workload = site.world.submit(job())
    await asyncio.to_thread(site.world.tick)
    assert list(site.world.holdings(workload)) == [row.machine]
    site.pool(0)
    await site.rounds_until(lambda: site.phases() == {"draining": 1}, "the instance is draining")
    await site.rounds_until(lambda: "preempt" in site.mails(workload), "the workload gets a preempt message")
    await asyncio.sleep(1.5)
    assert site.natives() == {row.native_id}
    # The attempt is released, but its agent did not respond: its tasks may still be saving.
    site.world.release(workload, Phase.PREEMPTED, silent=[str(row.machine)])
    await asyncio.sleep(1.5)
    assert site.natives() == {row.native_id}
    site.world.machines.ready(site.world.attend(str(row.machine), stop=[f"{workload}.1"]))
    await site.rounds_until(lambda: site.phases() == {"gone": 1}, "the instance is gone")
    assert site.natives() == set()


async def test_a_workflow_that_is_gone_is_started_again_from_the_ledger(site: Site) -> None:
    """If Temporal's state is lost in any phase, the workflow is restarted from the ledger."""
    site.agents.silent = True
    site.pool(2)
    await site.rounds_until(lambda: site.phases() == {"joining": 2}, "two instances are launched")
    await _lose_workflows(site)
    site.agents.silent = False
    await site.rounds_until(lambda: site.phases() == {"ready": 2}, "both instances are ready")
    await _lose_workflows(site)
    site.pool(0)
    await site.rounds_until(lambda: site.phases() == {"gone": 2}, "both instances are gone")
    assert site.natives() == set()


async def _lose_workflows(site: Site) -> None:
    for row in site.rows():
        workflow = site.client.get_workflow_handle(ids.instance_workflow_id(row.id))
        await workflow.terminate(reason="lost")


async def test_a_provider_that_does_not_answer_holds_up_nothing_for_good(site: Site) -> None:
    """While a provider is unavailable nothing is launched twice or given up; afterwards the work continues."""
    site.pool(1)
    await site.rounds_until(lambda: site.phases().get("ready") == 1, "one instance is ready")
    site.provider.faults = lambda _: "away"
    site.pool(0)
    await site.rounds_until(lambda: site.phases() == {"draining": 1}, "the instance is draining")
    await asyncio.sleep(1.0)
    assert len(site.natives()) == 1
    site.provider.faults = lambda _: ""
    await site.rounds_until(lambda: site.phases() == {"gone": 1}, "the instance is gone")
    assert site.natives() == set()


@pytest.mark.rotating
async def test_a_pool_grows_for_what_waits_and_shrinks_when_nothing_does(site: Site) -> None:
    """A pool grows once for a waiting gang, but not for over-quota or held ones, and shrinks when it is idle."""
    site.world.tenant(gpus=8)
    site.pool(0, max_size=4, idle_s=1.0)
    waits = site.world.submit(job(tasks=2, gpus=4))
    over = site.world.submit(job(tasks=3, gpus=4))
    await asyncio.to_thread(site.world.tick)
    await site.rounds_until(lambda: site.phases().get("ready") == 2, "two machines are ready")
    assert [[*row.wanted_by] for row in site.rows()] == [[waits]] * len(site.rows())
    assert len(site.rows()) == 2
    await asyncio.to_thread(site.world.tick)
    assert set(site.world.holdings(waits)) == {row.machine for row in site.rows()}
    assert site.world.workload(over).phase == "pending"
    keeper = site.keeper()
    for _ in range(8):
        await keeper.round()
        await asyncio.sleep(0.2)
    assert site.phases() == {"ready": 2}
    site.world.release(waits, Phase.SUCCEEDED)
    site.world.alter(Workload, over, held_by="somebody")
    await site.rounds_until(lambda: site.phases() == {"gone": 2}, "both idle instances are terminated")
    assert {row.reason["code"] for row in site.rows() if row.reason} == {"idle"}
    assert site.natives() == set()


async def test_one_that_its_platform_takes_is_ended_and_replaced(site: Site) -> None:
    """An instance with a platform notice is terminated and replaced, even if the platform does not reclaim it."""
    site.pool(1)
    await site.rounds_until(lambda: site.phases().get("ready") == 1, "one instance is ready")
    (first,) = site.rows()
    reason = Reason(ReasonCode.PLATFORM_NOTICE, {"platform": "file", "machine": str(first.machine)})
    site.world.alter(Machine, first.machine, notice=reason.to_json())
    await site.rounds_until(lambda: site.phases() == {"ready": 1, "gone": 1}, "another instance is ready")
    (gone,) = site.rows(InstancePhase.GONE)
    assert gone.reason is not None
    assert (gone.id, gone.reason["code"]) == (first.id, "platform_notice")
    assert first.native_id not in site.natives()


async def test_a_machine_that_takes_no_work_is_no_help_to_what_waits(site: Site) -> None:
    """A cordoned machine does not count as capacity: another one is launched, and the cordoned one ends when idle."""
    site.world.tenant()
    site.pool(0, max_size=3, idle_s=2.0)
    first = site.world.submit(job(gpus=4))
    await asyncio.to_thread(site.world.tick)
    await site.rounds_until(lambda: site.phases().get("ready") == 1, "one instance is ready")
    (cordoned,) = site.rows()
    site.world.alter(Machine, cordoned.machine, cordon=Reason(ReasonCode.CORDONED_BY_OPERATOR, {"by": "k"}).to_json())
    await asyncio.to_thread(site.world.tick)
    await site.rounds_until(lambda: len(site.rows()) == 2, "another instance is launched")
    assert [row.wanted_by for row in site.rows()] == [{}, {first: [1]}]
    await site.rounds_until(lambda: site.rows()[0].phase == "gone", "the cordoned instance is terminated")


async def test_one_providers_mistake_is_not_the_others(site: Site) -> None:
    """A provider that raises an unexpected error is skipped in that round; the others are handled."""

    class Broken(Unreliable):
        def describe(self) -> list[FoundMachine]:
            raise KeyError("a zone that was removed")

    keeper = site.keeper()
    keeper._providers = {"broken": Broken(site.provider.behind), **keeper._providers}
    keeper._without_owner["broken"] = keeper._missing["broken"] = Suspects(0.0)
    site.pool(1)
    await site.rounds_until(lambda: site.phases().get("ready") == 1, "one instance is ready", keeper)


def test_the_dearest_machine_makes_a_clusters_price(database: Engine, tmp_path: Path) -> None:
    """If machine types with one GPU type share a cluster, its price is always that of the more expensive type."""
    world = World(database, tmp_path)
    world.region("west")
    small = Offer("sim", "west", "za", CapacityKind.SPOT, Shape("small", 4, "a100", 1000, 1), 4.0, 30.0)
    large = replace(small, shape=replace(small.shape, machine_type="large", gpus=8), usd_per_h=16.0)
    with world.session() as session:
        session.add(PoolRow(region="west", name="burst", size=0, max_size=4))
        for offer in (small, large):
            request_instance(session, Pool("west", "burst", 2), offer)
    pools = Pools(database, world.settings)
    written = []
    for _ in range(3):
        pools.round([small, large])
        with world.session() as session:
            assert session.get_one(Cluster, ("west", "burst-sim-za-spot")).prices == {"a100": 2.0}
            written.append(session.scalar(select(func.count()).select_from(ClusterPrice)))
    assert written[0] == written[2]


def test_a_pool_that_cannot_grow_says_so(database: Engine, tmp_path: Path) -> None:
    """A growing pool of which every offer was refused shows the newest refusal, although nothing is below its size."""
    world = World(database, tmp_path)
    world.region("west")
    small = Offer("sim", "west", "za", CapacityKind.SPOT, Shape("small", 4, "a100", 1000, 1), 4.0, 30.0)
    other = replace(small, zone="zb")
    with world.session() as session:
        session.add(PoolRow(region="west", name="burst", size=0, max_size=4))
        instance = request_instance(session, Pool("west", "burst", 0), small)
        record_refusal(session, instance, small, LaunchRefused(Refusal.REQUEST, "Invalid partition name"))
    pools, said = Pools(database, world.settings), []
    for offers in ([small], [small, other]):
        pools.round(offers)
        with world.session() as session:
            reason = session.get_one(PoolRow, ("west", "burst")).reason
            said.append(reason and reason["detail"]["words"])
    assert said == ["Invalid partition name", None]


async def test_a_pool_says_that_its_provider_does_not_answer(site: Site) -> None:
    """While the provider is silent, its pool has that reason, also if the pool only grows for workloads."""
    site.provider.faults = lambda method: "away" if method == "describe" else ""
    site.pool(0, max_size=2)
    await site.rounds_until(lambda: site.why_short() == "provider_silent", "the pool gives its reason")
    site.provider.faults = lambda _: ""
    await site.rounds_until(lambda: site.why_short() is None, "the pool has no reason any more")


async def test_a_pool_says_what_does_not_work_at_its_provider(site: Site) -> None:
    """A provider that answers, but lacks a right, does its work; its pools name the right."""
    site.provider.impaired = "watching pods is refused"
    site.pool(1)
    await site.rounds_until(lambda: site.why_short() == "provider_impaired", "the pool gives its reason")
    await site.rounds_until(lambda: len(site.rows()) == 1, "the pool has its machine")
    site.provider.impaired = ""
    await site.rounds_until(lambda: site.why_short() is None, "the pool has no reason any more")


async def test_a_pool_without_any_provider_says_so(site: Site) -> None:
    """Without a provider that launches machines, a pool gets the reason `no_offer`."""
    keeper = PoolKeeper(site.world.engine, site.settings, site.client, {STATIC: StaticProvider(STATIC)})
    await keeper.round()
    site.pool(1)
    await site.rounds_until(lambda: site.why_short() == "no_offer", "the pool gives its reason", keeper)
    assert site.rows() == []
