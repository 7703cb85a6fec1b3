"""An installation that runs services: real worker, dispatcher, scheduler and ledger, simulated machines and agents.

An agent reports its replica as ready `cold_s` after its start, until the test says otherwise. A machine that the cloud
takes away ends without a word.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self

from sqlalchemy import Engine, select
from sqlalchemy.dialects.postgresql import insert
from temporalio import activity
from temporalio.client import Client
from temporalio.worker import Worker

from activities.roles import control_worker
from activities.services.readiness import ReadinessReader
from capacity.provider import Provider
from domain.capacity import CapacityKind
from domain.ids import agent_queue, new_service_id
from domain.protocol.activities import Activity
from domain.protocol.machines import (
    Attend,
    MachineNotice,
    NodeHeartbeat,
    NodeOutcome,
    NodePrepared,
    PrepareNode,
    RunNode,
    StopNode,
    TaskExit,
)
from domain.service import ReplicaPolicySpec, ResourceOption, ServiceSpec
from domain.serving_spec import ServingSpec
from domain.spec import ResourceSpec
from domain.task_reports import NoticeReport, ServingReport, TaskProgress
from infra.config.scheduling import ServiceSettings
from infra.db import outbox
from infra.db.endpoints import Endpoint, read_endpoints
from infra.db.models import Workload
from infra.db.services import ServiceReplica, ServiceRequests, ServiceRow, ServiceVersion, continue_replicas
from tests.activities.temporal import dispatching, until
from tests.activities.world import World
from tests.capacity.site import Site
from tests.capacity.unreliable import Unreliable

CLOUD: dict[str, Any] = {
    "zones": {
        "za": {"region": "west", "most": 3},
        "zb": {"region": "west", "most": 3},
        "zc": {"region": "west", "most": 3},
        "zd": {"region": "west", "most": 5, "price_factor": 3, "kind": "on_demand"},
    },
    "machine_types": {"small": {"gpus": 1, "gpu_type": "a100", "cpus": 16, "memory": "16GiB", "usd_per_h": 4}},
    "start_median_s": 0,
    "notice_s": 0,
}
SHARED = "west/owned/m1"
TICK = timedelta(seconds=0.2)
_OPTION = ResourceOption(
    resources=ResourceSpec(gpus=1, gpu_types=("a100",), cpus_milli=1000, memory_bytes=1 << 30), spot=True
)


def service(**policy: Any) -> ServiceSpec:
    """Returns a service of SpotHedge with two replicas and one more, on the cloud's spot machines."""
    usual: dict[str, Any] = {
        "min_replicas": 2, "max_replicas": 2, "placer": "spothedge", "num_overprovision": 1,
        "dynamic_ondemand_fallback": True,
    }  # fmt: skip
    return ServiceSpec(
        name="chat", tenant="t", options=(_OPTION,), argv=("serve",), serving=ServingSpec(port=8000, drain_s=0.5),
        policy=ReplicaPolicySpec(**{**usual, **policy}),
    )  # fmt: skip


class ServingAgent:
    """The agent of one machine: it runs one replica, and reports its readiness."""

    def __init__(self, live: "Live", machine: str) -> None:
        self._live, self.machine = live, machine
        self.ready: bool | None = None
        """Whether the probe succeeds; None: from `cold_s` after the start on."""
        self.ends: TaskExit | None = None
        """Set this to end the task."""
        self._stops: dict[tuple[str, int], asyncio.Event] = {}

    @activity.defn(name=Activity.PREPARE_NODE.value)
    async def prepare(self, request: PrepareNode) -> NodePrepared:
        return NodePrepared(self.machine, "127.0.0.1", dict.fromkeys(request.leads_jobs, 21000))

    @activity.defn(name=Activity.RUN_NODE.value)
    async def run(self, request: RunNode) -> NodeOutcome:
        began_s, changed_s, before = time.time(), time.time(), False
        cold_s = self._live.cold_s  # A later change must not make a replica unready that is ready.
        stop = self._stops.setdefault((request.workload_id, request.attempt), asyncio.Event())
        if await asyncio.to_thread(self._live.fails, request.workload_id):
            self.ends = TaskExit("server", 0, exit_code=1)
        while self.ends is None and not stop.is_set():
            ready = self.ready if self.ready is not None else time.time() - began_s >= cold_s
            if ready != before:
                before, changed_s = ready, time.time()
            report = ServingReport("127.0.0.1", 30_000, ready, changed_s, None if ready else "status 503")
            activity.heartbeat(NodeHeartbeat([TaskProgress("server", 0, serving=report)], 1))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), 0.2)
        return NodeOutcome(self.machine, [self.ends or TaskExit("server", 0, signal=15)], [], self.ends is None)

    @activity.defn(name=Activity.STOP_NODE.value)
    async def stop(self, request: StopNode) -> NodeOutcome:
        self._stops.setdefault((request.workload_id, request.attempt), asyncio.Event()).set()
        return NodeOutcome(self.machine, [TaskExit("server", 0, signal=15)], [], stopped=True)

    async def poll(self) -> None:
        """Polls the machine's queue until cancelled."""
        worker = Worker(
            self._live.site.client,
            task_queue=agent_queue(self.machine),
            activities=[self.prepare, self.run, self.stop],
            identity="agent",
            build_id="agent",
            max_heartbeat_throttle_interval=TICK,
            default_heartbeat_throttle_interval=TICK,
        )
        await worker.run()


class Live:
    """The installation with one service."""

    cold_s = 0.3
    fails_from_version: int | None = None
    """Replicas of this version and newer ones fail at once."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.world: World = site.world
        self.service = ""
        self.agents: dict[str, ServingAgent] = {}
        self._polls: dict[str, asyncio.Task[None]] = {}
        self._owned: set[str] = set()

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls, engine: Engine, url: str, client: Client, folder: Path, provider: Provider | None = None
    ) -> AsyncIterator[Self]:
        """Opens the installation, with its keeper. `provider` replaces the simulated cloud."""
        site = Site(engine, url, client, folder, CLOUD, interval_s=0.4)
        if provider is not None:
            site.provider = Unreliable(provider)
        quick = ServiceSettings(
            interval_s=1.0,
            scaling_interval_s=0.5,
            readiness_interval_s=0.2,
            unready_s=1.0,
            retry_s=2.0,
            failed_pause_s=0.1,
            placement_s=3.0,
        )
        site.settings = site.settings.model_copy(update={"services": quick})
        live = cls(site)
        live.world.tenant()
        with ThreadPoolExecutor(8) as threads:
            state = live.world.scheduler_state
            providers = {"sim": site.provider}
            worker = control_worker(client, engine, site.settings, threads, state, ["west"], providers)
            async with worker, dispatching(engine, url, client), asyncio.TaskGroup() as group:
                loops = [
                    group.create_task(site._keep(site.keeper())),
                    group.create_task(live._attend()),
                    group.create_task(live._read_readiness(ReadinessReader(engine, site.settings, client))),
                ]
                yield live
                for one in [*loops, *live._polls.values()]:
                    one.cancel()
                await asyncio.wait([*loops, *live._polls.values()])

    async def _read_readiness(self, readiness: ReadinessReader) -> None:
        while True:
            await readiness.round()
            await asyncio.sleep(0.1)

    async def _attend(self) -> None:
        """Starts the agents of machines that have started, and ends those of machines that are gone."""
        while True:
            started = await asyncio.to_thread(self.started)
            for machine, (instance, join_token) in started.items():
                if machine in self._polls:
                    continue
                self._poll(machine)
                await asyncio.to_thread(self._hello, machine, instance=instance, join_token=join_token)
            for machine in set(self._polls) - set(started) - self._owned:
                self._polls.pop(machine).cancel()
            await asyncio.sleep(0.2)

    def started(self) -> dict[str, tuple[str, str]]:
        """Returns the instance and the token of each machine that the provider has started."""
        there = self.site.cloud.started()
        return {one.machine: (one.instance.token.partition(".")[0], one.join_token) for one in there}

    def _poll(self, machine: str) -> None:
        agent = self.agents[machine] = ServingAgent(self, machine)
        self._polls[machine] = asyncio.create_task(agent.poll())

    def _hello(self, machine: str, **more: Any) -> None:
        hello = self.world.hello(machine, 1, **more)
        if not self.world.machines.register(hello).refused:
            self.world.machines.ready(Attend(machine, hello.incarnation, []))

    # ------------------------------------------------------------------------------------------------------- operations

    async def shared_machine(self, machine: str = SHARED, gpu_type: str = "a100") -> None:
        """Adds a machine of one GPU that belongs to the installation."""
        self._owned.add(machine)
        self._poll(machine)
        await asyncio.to_thread(self._hello, machine, gpu_type=gpu_type)

    def count(self, per_s: float, seconds: int = 70) -> None:
        """Writes the counts of a balancer for the last seconds. Counts that were written before stay."""
        now = int(time.time())
        rows = [
            {
                "service": self.service, "second": now - ago, "balancer": f"b-{now}", "requests": round(per_s),
                "failed": 0, "cut": 0,
            }
            for ago in range(seconds)
        ]  # fmt: skip
        with self.world.session() as session:
            session.execute(insert(ServiceRequests).values(rows).on_conflict_do_nothing())

    def count_canary(self, version: int, failed: int) -> None:
        """Writes that a balancer has counted 100 answers of a canary now, of which some failed."""
        counts = {"answered": 100 - failed, "failed": failed, "slow": 0, "others_answered": 0, "others_failed": 0}
        row = {
            "service": self.service, "second": int(time.time()) + 1, "balancer": "b", "requests": 100, "failed": 0,
            "cut": 0, "canary": {**counts, "version": version},
        }  # fmt: skip
        with self.world.session() as session:
            session.execute(insert(ServiceRequests).values([row]))

    def up(self, spec: ServiceSpec) -> None:
        """Creates the service, as the API does."""
        self.service = new_service_id()
        with self.world.session() as session:
            session.add(ServiceRow(id=self.service, tenant=spec.tenant, name=spec.name))
            session.flush()
            session.add(ServiceVersion(service=self.service, version=1, spec=spec.model_dump(mode="json")))
            outbox.service(session, self.service)

    def update(self, spec: ServiceSpec, mode: str = "rolling") -> None:
        """Updates the service, as the API does."""
        with self.world.session() as session:
            row = session.get_one(ServiceRow, self.service, with_for_update=True)
            row.version, row.mode = row.version + 1, mode
            session.add(ServiceVersion(service=row.id, version=row.version, spec=spec.model_dump(mode="json")))
            session.flush()
            continue_replicas(session, row, spec)
            outbox.service(session, row.id)

    def down(self) -> None:
        """Ends the service, as the API does."""
        with self.world.session() as session:
            session.get_one(ServiceRow, self.service, with_for_update=True).stopping_at = datetime.now(UTC)
            outbox.service(session, self.service)

    def take(self, machine: str) -> None:
        """Takes a machine away without notice."""
        (one,) = [m for m in self.site.cloud.there() if m.machine == machine]
        self.site.cloud.end(one.instance.native_id)

    def capacity(self, machines: int) -> None:
        """Sets the capacity of each spot zone."""
        for zone in self.site.cloud.market._settings.zones.values():
            if zone.kind is CapacityKind.SPOT:
                object.__setattr__(zone, "most", machines)

    def notice(self, machine: str) -> None:
        """Lets the platform announce that it takes the machine, as its agent reports it."""
        report = NoticeReport("sim", "preemption", True, time.time(), time.time() + 30.0, "spot reclaim")
        self.world.machines.noticed(MachineNotice(machine, "boot-1", report))

    # ---------------------------------------------------------------------------------------------------------- queries

    def row(self) -> ServiceRow:
        """Returns the service."""
        with self.world.session() as session:
            row = session.get_one(ServiceRow, self.service)
            session.expunge_all()
            return row

    def endpoints(self, state: str = "ready") -> list[Endpoint]:
        """Returns the endpoints in a state."""
        with self.world.session() as session:
            return [one for one in read_endpoints(session, self.service) if one.state == state]

    def replicas(self) -> list[ServiceReplica]:
        """Returns all replicas that were ever launched, by number."""
        own = select(ServiceReplica).where(ServiceReplica.service == self.service).order_by(ServiceReplica.number)
        with self.world.session() as session:
            rows = list(session.scalars(own))
            session.expunge_all()
            return rows

    def machine_of(self, number: int) -> str:
        """Returns the machine of a replica."""
        return next(iter(self.world.holdings(self.replicas()[number].workload)))

    def fails(self, workload: str) -> bool:
        """Returns whether the replica of a workload is to fail."""
        first = self.fails_from_version
        return first is not None and any(r.version >= first for r in self.replicas() if r.workload == workload)

    def phase(self, number: int) -> tuple[str, str]:
        """Returns the phase of a replica's workload, and the code of its reason."""
        with self.world.session() as session:
            row = session.get_one(Workload, self.replicas()[number].workload)
            return row.phase, row.reason["code"]

    async def ready(self, count: int) -> list[Endpoint]:
        """Waits until exactly `count` endpoints are ready; returns them."""
        await until(lambda: len(self.endpoints()) == count, f"{count} endpoints are ready", 40.0)
        return self.endpoints()
