"""An installation that launches machines, with real worker, dispatcher, keeper and provider.

Agents are simulated: each started machine of the cloud registers with its token, as its agent would.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, select
from temporalio.client import Client

from activities.capacity.keeper import PoolKeeper
from activities.lifecycle.dispatch import Dispatcher
from activities.roles import control_worker
from capacity.providers.trace.cloud import Cloud
from capacity.providers.trace.provider import TraceProvider
from capacity.providers.trace.settings import TraceProviderSettings
from domain.lifecycle.instances import InstancePhase
from domain.protocol.machines import Attend
from infra.config.scheduling import CapacitySettings
from infra.db.capacity import InstanceRow, PoolRow
from infra.db.logs import Event, Outbox
from infra.db.models import Machine
from infra.keys import load_master_key
from tests.activities.temporal import until
from tests.activities.world import World
from tests.capacity.unreliable import Unreliable

CLOUD: dict[str, Any] = {
    "zones": {
        "za": {"region": "west", "most": 3},
        "zb": {"region": "west", "most": 2, "price_factor": 3, "kind": "on_demand"},
    },
    "machine_types": {"small": {"gpus": 4, "gpu_type": "a100", "cpus": 16, "memory": "16GiB", "usd_per_h": 4}},
    "start_median_s": 0,
    "notice_s": 0,
}


class Agents:
    """The simulated agents of a cloud's machines: each started machine registers with its token."""

    def __init__(self, world: World, cloud: Cloud) -> None:
        self._world, self._cloud = world, cloud
        self.silent = False

    async def run(self) -> None:
        """Registers started machines until cancelled."""
        while True:
            if not self.silent:
                await asyncio.to_thread(self._say_hello)
            await asyncio.sleep(0.05)

    def _say_hello(self) -> None:
        with self._world.session() as session:
            ready = set(session.scalars(select(Machine.id).where(Machine.state == "ready")))
        for one in self._cloud.started():
            if one.machine in ready:
                continue
            instance = one.instance.token.partition(".")[0]
            hello = self._world.hello(one.machine, 4, instance=instance, join_token=one.join_token)
            if not self._world.machines.register(hello).refused:
                self._world.machines.ready(Attend(one.machine, hello.incarnation, []))


class Site:
    """The installation."""

    def __init__(
        self, engine: Engine, url: str, client: Client, folder: Path, cloud: Mapping[str, Any], **capacity_s: float
    ) -> None:
        self.world = World(engine, folder)
        quick = {"interval_s": 0.2, "refused_pause_s": 1.0, "join_s": 20.0, "drain_s": 20.0, "lost_after_s": 1.0}
        capacity = CapacitySettings(**{**quick, **capacity_s})
        reconcile = self.world.settings.reconcile.model_copy(update={"disagree_s": 0.5})
        self.settings = self.world.settings.model_copy(update={"capacity": capacity, "reconcile": reconcile})
        load_master_key(self.settings.master_key_path, create=True)
        self.client = client
        self._url = url
        self.cloud = Cloud(TraceProviderSettings.model_validate(cloud), folder / "cloud")
        self.provider = Unreliable(TraceProvider("sim", TraceProviderSettings.model_validate(cloud), self.cloud))
        self.agents = Agents(self.world, self.cloud)
        self.world.region("west")

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls,
        engine: Engine,
        url: str,
        client: Client,
        folder: Path,
        cloud: Mapping[str, Any] = CLOUD,
        **capacity_s: float,
    ) -> AsyncIterator["Site"]:
        """Opens a site with worker, dispatcher and agents. Tests run the keeper's rounds themselves.

        `capacity_s`: changed capacity settings.
        """
        site = cls(engine, url, client, folder, cloud, **capacity_s)
        with ThreadPoolExecutor(8) as threads:
            agents = asyncio.create_task(site.agents.run())
            async with site.working(threads):
                yield site
            agents.cancel()
            await asyncio.wait([agents])

    @contextlib.asynccontextmanager
    async def working(self, threads: ThreadPoolExecutor) -> AsyncIterator[None]:
        """Runs a worker and a dispatcher."""
        world, providers = self.world, {"sim": self.provider}
        worker = control_worker(self.client, world.engine, self.settings, threads, world.scheduler_state, (), providers)
        dispatcher = Dispatcher(world.engine, self._url, self.client, capacity=self.settings.capacity)
        async with worker:
            dispatching = asyncio.create_task(dispatcher.run())
            try:
                yield
            finally:
                dispatching.cancel()
                await asyncio.wait([dispatching])

    def keeper(self) -> PoolKeeper:
        """Returns a new keeper without state."""
        return PoolKeeper(self.world.engine, self.settings, self.client, {"sim": self.provider})

    # --------------------------------------------------------------------------------------------------- operations

    def pool(self, size: int, **rules: Any) -> None:
        """Sets the size and the rules of the pool `burst`."""
        with self.world.session() as session:
            row = session.get(PoolRow, ("west", "burst")) or PoolRow(region="west", name="burst")
            session.add(row)
            for field, value in {"size": size, **rules}.items():
                setattr(row, field, value)

    async def rounds_until(self, holds: Any, what: str, keeper: PoolKeeper | None = None) -> Any:
        """Runs rounds of a keeper until `holds` returns a true value; returns that value."""
        keeping = asyncio.create_task(self._keep(keeper or self.keeper()))
        try:
            return await until(holds, what, 40.0)
        finally:
            keeping.cancel()
            await asyncio.wait([keeping])

    async def _keep(self, keeper: PoolKeeper) -> None:
        while True:
            await keeper.round()
            await asyncio.sleep(self.settings.capacity.interval_s)

    # ------------------------------------------------------------------------------------------------------ queries

    def phases(self) -> dict[str, int]:
        """Returns the number of instances in each phase."""
        out: dict[str, int] = {}
        for row in self.rows():
            out[row.phase] = out.get(row.phase, 0) + 1
        return out

    def rows(self, phase: InstancePhase | None = None) -> list[InstanceRow]:
        """Returns the ledger's instances, oldest first, optionally of one phase."""
        wanted = select(InstanceRow).order_by(InstanceRow.id)
        with self.world.session() as session:
            rows = list(session.scalars(wanted if phase is None else wanted.where(InstanceRow.phase == phase.value)))
            session.expunge_all()
            return rows

    def machines(self) -> set[str]:
        """Returns the ids of the registered machines."""
        with self.world.session() as session:
            return set(session.scalars(select(Machine.id)))

    def why_short(self) -> str | None:
        """Returns the code of the pool's reason for a shortage, or None."""
        with self.world.session() as session:
            reason = session.get_one(PoolRow, ("west", "burst")).reason
            return None if reason is None else str(reason["code"])

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Returns the details of all events of a kind."""
        with self.world.session() as session:
            return list(session.scalars(select(Event.detail).where(Event.kind == kind).order_by(Event.id)))

    def mails(self, workload: str) -> list[str]:
        """Returns the kinds of messages to a workload, in order."""
        mails = select(Outbox.body["kind"].astext).where(Outbox.workload == workload, Outbox.kind == "mail")
        with self.world.session() as session:
            return list(session.scalars(mails.order_by(Outbox.id)))

    def natives(self) -> set[str]:
        """Returns the provider's ids of all machines in the cloud."""
        return {one.instance.native_id for one in self.cloud.there()}
