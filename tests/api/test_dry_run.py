"""Dry runs by the scheduler over a real Temporal server; they write nothing."""

from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest_asyncio
from sqlalchemy import func, select, update
from temporalio.testing import WorkflowEnvironment

from activities.roles import control_worker
from domain.phases import Phase
from infra.config.services import TemporalSettings
from infra.db.logs import Audit, Event, Outbox
from infra.db.models import Attempt, Workload
from infra.payloads import DATA_CONVERTER
from infra.stack.temporal import find_binary
from tests.api.calls import T0
from tests.api.documents import JOB, job, resources
from tests.api.world import ApiWorld, make_world


@pytest_asyncio.fixture
async def scheduled(database_url: str, tmp_path: Path) -> AsyncIterator[ApiWorld]:
    """Yields an installation with a Temporal server and a control worker."""
    binary = str(find_binary(TemporalSettings()))
    async with await WorkflowEnvironment.start_local(
        dev_server_existing_path=binary, data_converter=DATA_CONVERTER, dev_server_log_level="error"
    ) as temporal:
        address = temporal.client.service_client.config.target_host
        with (
            make_world(database_url, tmp_path, temporal={"address": address}) as world,
            ThreadPoolExecutor(4) as threads,
        ):
            async with control_worker(temporal.client, world.engine, world.settings, threads):
                yield world


async def test_dry_run_tells_where_or_why_not(scheduled: ApiWorld) -> None:
    """A dry run returns the machines, or each region's reasons, and writes nothing. `/readyz` reports Temporal."""
    async with scheduled.client("vision") as client:
        assert (await client.get("/readyz")).json()["temporal"] == "ok"
        fits = await client.post("/v1/workloads?dry_run=true", json=resources(accelerators="a100:4"))
        assert fits.status_code == 200, fits.text
        assert fits.json() | {"machines": [], "reasons": []} == {
            "admitted": True, "rank": 3, "over_quota": False, "region": "north", "machines": [], "victims": [],
            "other_victims": 0, "reasons": [], "never": None,
        }  # fmt: skip
        assert all(machine.startswith("north/alpha/") for machine in fits.json()["machines"])
        for number, machine in enumerate(("north/alpha/m1", "north/alpha/m2")):
            holder = scheduled.add_workload(Phase.RUNNING, tenant="speech")
            scheduled.add_attempt(holder, number + 1, machine, 0xFF)
        full = (await client.post("/v1/workloads?dry_run=true", json=resources(accelerators="a100:4"))).json()
        many = job(tasks=17, resources={**JOB["resources"], "accelerators": "a100:1"})
        vain = (await client.post("/v1/workloads?dry_run=true", json=many)).json()
        # Workloads that have run long enough can be evicted.
        with scheduled.session() as session:
            session.execute(update(Attempt).values(ready_at=T0, started_at=T0, rank=5))
        asked = resources(accelerators="a100:4")
        evicting = (await client.post("/v1/workloads?dry_run=true", json=asked)).json()
    async with scheduled.client("operator") as client:
        seen = (await client.post("/v1/workloads?dry_run=true", json=asked)).json()
    assert vain["admitted"] is False and "at most 16 fit, in one cluster of north" in vain["never"]
    assert (evicting["victims"], evicting["other_victims"]) == ([], 1)
    assert (len(seen["victims"]), seen["other_victims"]) == (1, 0)
    assert seen["victims"][0] not in str(evicting)
    assert full["admitted"] is False and full["never"] is None
    assert full["region"] is None
    assert full["reasons"]
    assert all(reason["sentence"] for reason in full["reasons"])
    with scheduled.session() as session:
        assert session.scalar(select(func.count()).select_from(Workload)) == 2
        for kind in (Audit, Event, Outbox):
            assert session.scalar(select(func.count()).select_from(kind)) == 0
