"""Attacks on who uses the console: stored scripts, redirects, frames, and ids of others in addresses."""

import re
from collections.abc import Iterator

import httpx
import pytest
from sqlalchemy import func
from starlette.routing import Route

from domain.phases import Phase
from infra.db import events
from infra.db.capacity import LaunchRefusal
from infra.db.models import Cluster, Machine, Workload
from infra.db.placement_runs import PlacementMove, PlacementPause, PlacementRun
from infra.db.tables import Replica
from infra.db.tenants import ApiKey
from tests.api.test_logs import Shipper
from tests.api.world import INSTANCE, ApiWorld
from tests.console.conftest import Browse

EVIL = "\"'></textarea></pre><script>alert(1)</script><img src=x onerror=alert(2)>{{ 7*7 }}"
_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")


def _reason() -> dict[str, object]:
    return {"code": "platform_notice", "detail": {"note": EVIL}, "sentence": EVIL}


def _fill(world: ApiWorld) -> str:
    """Stores the script wherever a text may be; returns the id of a workload."""
    id_ = world.add_workload(Phase.RUNNING, name=EVIL, labels={EVIL: EVIL}, held_by=EVIL, reason=_reason())
    world.add_attempt(id_, 1, "north/alpha/m1", 1, released_at=func.now(), outcome=_reason(), evictor=EVIL)
    failing = {"failures": 1, "since_s": 1.0, "error": EVIL, "limit": None}
    world.add_attempt(id_, 2, "north/alpha/m1", 1, started_at=func.now(), failing=failing)
    Shipper(world.buckets["north"], id_, 2).ship(EVIL)
    world.add_workload(Phase.PENDING, name=EVIL, labels={"a": EVIL})
    world.add_instance(reason=_reason(), ending=_reason(), zone=EVIL, machine_type=EVIL)
    with world.session() as session:
        row = session.get_one(Workload, id_)
        row.spec = {**row.spec, "jobs": [{**row.spec["jobs"][0], "argv": ["sh", "-c", EVIL]}]}
        machine = session.get_one(Machine, "north/alpha/m1")
        machine.cordon, machine.notice, machine.engine, machine.rack = _reason(), _reason(), EVIL, EVIL
        session.get_one(Cluster, ("north", "alpha")).capacity = "voluntary"
        session.get_one(ApiKey, "key-operator").label = EVIL
        session.get_one(Replica, ("digits", "north")).wrong = EVIL
        events.record(session, EVIL, workload=id_, tenant="vision", reason=_reason())
        session.add(PlacementPause(by=EVIL, note=EVIL))
        session.add(PlacementRun(id="run-1", dry_run=False, state="failed", deadline_at=func.now(), problem=EVIL))
        session.add(
            LaunchRefusal(
                instance=INSTANCE, provider=EVIL, region="north", zone=EVIL, kind="spot", machine_type=EVIL,
                refusal="capacity", words=EVIL,
            )
        )  # fmt: skip
        session.flush()
        session.add(
            PlacementMove(
                placement_run="run-1", number=1, kind="replica", data_table=EVIL, source_region=EVIL,
                target_region=EVIL, size_bytes=5, state="left", left_because=EVIL,
            )
        )  # fmt: skip
    return id_


def _pages(world: ApiWorld, values: dict[str, str]) -> Iterator[str]:
    """Yields the address of every page, with these values of its parameters."""
    for route in world.app.routes:
        if isinstance(route, Route) and route.path.startswith("/console") and "GET" in (route.methods or ()):
            names = _PARAMETER.findall(route.path)
            if set(names) <= set(values) and not route.path.endswith("/changes"):
                yield _PARAMETER.sub(lambda found: values[found[1]], route.path)


@pytest.mark.rotating
async def test_stored_scripts_are_text(world: ApiWorld, browse: Browse) -> None:
    id_ = _fill(world)
    values = {"id": id_, "region": "north", "cluster": "alpha", "machine": "m1"}
    shown = 0
    async with browse() as client:
        for path in (*_pages(world, values), "/console/placement-runs/run-1", "/console/workloads?phase=live"):
            for headers in ({}, {"HX-Request": "true"}):
                answer = await client.get(path, headers=headers)
                assert answer.status_code < 500, (path, answer.text)
                if answer.headers.get("content-type", "").startswith("text/html"):
                    for part in ("<script>alert", "<img src=x", "</textarea></pre>"):
                        assert part not in answer.text, (path, part)
                    assert "49" not in re.findall(r"onerror=alert\(2\)&gt;(\d*)", answer.text), path
                    shown += "&lt;script&gt;alert(1)" in answer.text
        logs = await client.get(f"/console/workloads/{id_}/logs")
    assert shown > 20
    assert "&lt;script&gt;alert(1)" in logs.text.split("<pre")[1]


@pytest.mark.parametrize("path", ["/console/queue", "/console/workloads", "/console/workloads/bulk", "/console/login"])
async def test_scripts_in_addresses_are_text(browse: Browse, path: str) -> None:
    given = dict.fromkeys(("phase", "tenant", "name", "label", "cursor", "after", "next", "link"), EVIL)
    async with browse() as client:
        for name in given:
            answer = await client.get(path, params={name: EVIL})
            assert "<script>alert" not in answer.text
            assert answer.status_code < 500


@pytest.mark.parametrize("path", ["/console/fleet/{}/at?1,1", "/console/{}", "/console/workloads/{}/logs"])
@pytest.mark.parametrize(
    "evil", ["%2F%2Fevil.test", "..%2F..%2Fevil.test", "%0d%0aLocation:%20http:evil.test", "%5Cevil"]
)
async def test_no_address_leads_elsewhere(browse: Browse, path: str, evil: str) -> None:
    for key in ("operator", None):
        async with browse(key) as client:
            answer = await client.get(path.format(evil))
            if "location" in answer.headers:
                assert re.match(r"/console(/|\?|$)", answer.headers["location"])
                assert "\r" not in answer.headers["location"]


async def _texts(client: httpx.AsyncClient, world: ApiWorld, id_: str) -> dict[str, tuple[int, str]]:
    out = {}
    for path in _pages(world, {"id": id_}):
        if id_ in path:
            answer = await client.get(path)
            out[path.replace(id_, "ID")] = answer.status_code, answer.text.replace(id_, "ID")
    return out


async def test_ids_of_other_tenants_are_as_unknown_ones(world: ApiWorld, browse: Browse) -> None:
    """No page and no form tells whether an id of another tenant exists."""
    theirs, unknown = world.add_workload(Phase.RUNNING, tenant="speech"), "wl-9999999999999999"
    world.add_attempt(theirs, 1, "north/alpha/m1", 1)
    async with browse("vision") as client:
        seen = await _texts(client, world, theirs)
        assert len(seen) >= 4
        assert seen == await _texts(client, world, unknown)
        assert {status for status, _ in seen.values()} <= {403, 404}


@pytest.mark.parametrize("key", ["operator", None])
async def test_no_page_is_shown_in_a_frame(world: ApiWorld, browse: Browse, key: str | None) -> None:
    async with browse(key) as client:
        for path in ("/console", "/console/login", "/console/nothing", "/console/static/console.js"):
            answer = await client.get(path)
            assert answer.headers["x-frame-options"] == "DENY"
            assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
