"""Training and serving on one fleet: one scheduler, one queue, the same machines."""

import asyncio
from datetime import UTC, datetime

import pytest

from domain.phases import Phase
from domain.service import ResourceOption
from domain.spec import ResourceSpec
from infra.db import outbox
from infra.db.models import Workload
from infra.db.services import BalancerReport
from infra.db.tenants import Tenant
from tests.activities.temporal import until
from tests.activities.world import job
from tests.services.live import Live, service

MACHINES = [f"west/owned/m{number}" for number in range(3)]


class _Day:
    """Writes the counts of a balancer, so many requests in each second, until it is cancelled."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self.per_s = 0.0

    async def run(self) -> None:
        while True:
            await asyncio.to_thread(self._live.count, self.per_s, 1)
            await asyncio.sleep(0.5)


@pytest.mark.rotating
async def test_a_service_takes_what_opportunistic_training_held(live: Live) -> None:
    """By day a service scales up, and evicts training of a lower level; at night the training comes back.

    Urgent training trims the service by one replica: only those beyond the least number give way to it.
    No GPU is ever held by both: the allocation guard would refuse it.
    """
    live.world.tenant("lab", level=6)
    for machine in MACHINES:
        await live.shared_machine(machine)
    spec = service(
        placer=None, num_overprovision=0, min_replicas=1, max_replicas=3, target_qps_per_replica=0.02,
        upscale_delay_s=0.5, downscale_delay_s=0.5,
    )  # fmt: skip
    live.up(spec)
    await live.ready(1)
    training = [live.world.submit(job(gpus=1), tenant="lab") for _ in range(2)]

    def phases() -> list[str]:
        with live.world.session() as session:
            return sorted(session.get_one(Workload, one).phase for one in training)

    await until(lambda: phases() == [Phase.RUNNING, Phase.RUNNING], "both trainings run", 40.0)
    day = _Day(live)
    counting = asyncio.create_task(day.run())
    try:
        day.per_s = 2.0  # In the window of 60 s, few seconds of it are enough for three replicas.
        await live.ready(3)
        await until(lambda: phases() == [Phase.PREEMPTED, Phase.PREEMPTED], "both trainings wait")
        assert {live.machine_of(one.replica) for one in live.endpoints()} == set(MACHINES)
        base = {one.number for one in live.replicas() if one.is_base and one.ended_at is None}
        live.world.tenant("urgent", level=3)
        urgent = live.world.submit(job(gpus=1), tenant="urgent")
        await until(lambda: live.world.workload(urgent).phase == Phase.RUNNING, "the urgent training runs", 40.0)
        assert len(base) == 1 and base <= {one.replica for one in live.endpoints()}
        assert len(live.endpoints()) == 2
        day.per_s = 0.0
        with live.world.session() as session:  # The hour in which the window of requests empties has passed.
            session.connection().exec_driver_sql("update service_requests set second = second - 3600")
            session.connection().exec_driver_sql(
                "update service set state = jsonb_set(state, '{scaling,requests}', '[]') where state is not null"
            )
        await until(lambda: Phase.RUNNING in phases(), "a training runs again", 40.0)
        assert {one.replica for one in live.endpoints()} == base
    finally:
        counting.cancel()
        await asyncio.wait([counting])


@pytest.mark.rotating
async def test_replicas_count_by_their_gpus(live: Live) -> None:
    """A slow GPU does not suffice for the requests of a fast one; once that one serves too, the slow one is ended.

    Until it serves, the slow one stays, although the fast one would suffice.
    """
    with live.world.session() as session:
        session.get_one(Tenant, "t").quota_gpus = {"v100": 1, "a100": 3}
    await live.shared_machine("west/slow/m0", "v100")
    resources = ResourceSpec(gpus=1, gpu_types=("v100", "a100"), cpus_milli=1000, memory_bytes=1 << 30)
    spec = service(
        placer=None, num_overprovision=0, min_replicas=1, max_replicas=3, upscale_delay_s=0.5, downscale_delay_s=0.5,
        target_qps_per_replica=0.1, target_qps_by_gpu={"a100:1": 0.1, "v100": 0.02},
    )  # fmt: skip
    live.up(spec.model_copy(update={"options": (ResourceOption(resources=resources),)}))
    (slow,) = await live.ready(1)
    live.cold_s = 3.0
    await live.shared_machine("west/fast/m0", "a100")
    live.count(6, 1)  # 0.1 a second, in the window of a minute.
    counting = asyncio.create_task(_Day(live).run())
    try:
        await until(lambda: len(live.replicas()) == 2, "a second replica is launched")
        await until(lambda: [one.gpu_type for one in live.endpoints()] == ["a100"], "only the fast one serves", 40.0)
        first, second = live.replicas()
        assert first.number == slow.replica
        assert second.first_ready_at is not None and first.draining_at is not None
        assert first.draining_at >= second.first_ready_at
    finally:
        counting.cancel()
        await asyncio.wait([counting])


@pytest.mark.rotating
async def test_an_eviction_takes_the_replica_with_the_shorter_cold_start(live: Live) -> None:
    """Of two replicas of one level in two clusters, the one with the shorter measured cold start gives way."""
    for machine in ("west/owned/m0", "west/other/m0"):
        await live.shared_machine(machine)
    live.cold_s = 1.5
    slow = service(placer=None, num_overprovision=0, min_replicas=1, max_replicas=1)
    live.up(slow)
    (kept,) = await live.ready(1)
    slow_service, live.cold_s = live.service, 0.1
    live.up(slow.model_copy(update={"name": "quick"}))
    await live.ready(1)
    live.world.tenant("urgent", level=1)
    urgent = live.world.submit(job(gpus=1), tenant="urgent")
    await until(lambda: live.world.workload(urgent).phase == Phase.RUNNING, "the urgent training runs", 40.0)
    assert live.endpoints() == []
    live.service = slow_service
    assert [one.replica for one in live.endpoints()] == [kept.replica]


@pytest.mark.rotating
async def test_an_evicted_replica_ends_as_soon_as_it_is_idle(live: Live) -> None:
    """The training that evicts it does not wait for `drain_seconds`, but for its requests in progress."""
    await live.shared_machine()
    spec = service(placer=None, num_overprovision=0, min_replicas=1, max_replicas=1)
    live.up(spec.model_copy(update={"serving": spec.serving.model_copy(update={"drain_s": 600.0})}))
    (one,) = await live.ready(1)
    live.world.tenant("urgent", level=1)
    urgent = live.world.submit(job(gpus=1), tenant="urgent")
    await until(lambda: live.replicas()[0].leaving_at is not None, "the replica leaves", 40.0)

    def report(ongoing: int) -> None:
        told = {"replica": one.replica, "ongoing": ongoing, "drained": True, "ejected_s": None, "why": None}
        with live.world.session() as session:
            session.merge(
                BalancerReport(service=live.service, balancer="b1", replicas=[told], reported_at=datetime.now(UTC))
            )
            outbox.service(session, live.service)

    report(1)
    await asyncio.sleep(2.5)
    assert live.replicas()[0].idle_at is None and live.phase(0)[0] == Phase.CHECKPOINTING
    report(0)
    await until(lambda: live.world.workload(urgent).phase == Phase.RUNNING, "the urgent training runs", 60.0)
    await until(lambda: live.replicas()[0].cause == "evicted", "the service records why the replica ended")


@pytest.mark.rotating
async def test_a_raised_minimum_raises_the_levels_of_replicas_that_run(live: Live) -> None:
    """And a lowered one lowers them, without a restart."""
    for machine in MACHINES:
        await live.shared_machine(machine)
    policy = {"placer": None, "num_overprovision": 0, "max_replicas": 3, "target_qps_per_replica": 0.02}
    live.up(service(min_replicas=1, upscale_delay_s=0.5, **policy))
    await live.ready(1)
    live.count(2.0)
    await live.ready(3)

    def levels() -> list[tuple[bool, int | None]]:
        return [(one.is_base, live.world.workload(one.workload).level) for one in live.replicas()]

    low = live.world.workload(live.replicas()[2].workload).level
    assert levels() == [(True, None), (False, low), (False, low)] and low is not None
    live.update(service(min_replicas=3, upscale_delay_s=0.5, **policy))
    await until(lambda: levels() == [(True, None)] * 3, "all have the level of the service", 40.0)
    live.update(service(min_replicas=1, upscale_delay_s=0.5, **policy))
    await until(lambda: levels()[1:] == [(False, low)] * 2, "two have the lower level", 40.0)
    assert all(one.ended_at is None for one in live.replicas())
