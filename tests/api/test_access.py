"""Access control of every operation in the OpenAPI document: without a key, with a lower role, and across tenants.

The operations are read from the document, so new operations are tested without a change here.
"""

import asyncio
import json
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import pytest
from sqlalchemy import Engine, text

from api.auth import Role
from domain.phases import Phase
from domain.service import ServiceSpec
from infra.db.events import record
from infra.db.placement_runs import begin_placement_run
from infra.db.pool_plans import PoolPlan
from infra.db.services import ServiceRow, ServiceVersion
from infra.db.session import transaction
from infra.db.tenants import Secret
from infra.keys import encrypt_secret, load_master_key
from tests.api.world import ARCHIVE, ARCHIVE_SHA256, INSTANCE, ApiWorld, document, openapi_document
from tests.stored_outputs import store_output

VALUES = {
    "name": "vision", "secret": "hf-token", "region": "north", "cluster": "alpha", "machine": "m1", "datacenter": "dc1",
    "sha256": ARCHIVE_SHA256, "placement_run": "placement-run-1", "instance": INSTANCE,
}  # fmt: skip
SERVICE = "sv-0000000000000001"
OUTPUT = "?job=trainer&task=0&attempt=1"
OPEN = {"/healthz", "/readyz", "/metrics"}
SHARED = {
    "/v1/whoami", "/v1/regions", "/v1/regions/{name}", "/v1/clusters", "/v1/machines",
    "/v1/machines/{region}/{cluster}/{machine}", "/v1/machines/{region}/{cluster}/{machine}/lending", "/v1/tables",
    "/v1/tables/{name}", "/v1/tables/{name}/replicas",
    "/v1/tables/{name}/partitions", "/v1/pools", "/v1/instances", "/v1/instances/{instance}",
}  # fmt: skip
"""Paths that every key may read: fleet and tables have no tenant."""
LISTS = {
    "/v1/workloads", "/v1/services", "/v1/queue", "/v1/events", "/v1/tenants", "/v1/audit", "/v1/costs", "/v1/metrics",
}  # fmt: skip
"""Lists that are restricted to the caller's tenant."""
_SERVICE_DOCUMENT = {"version": 1, "name": "chat", "tenant": "vision", "service": {"replicas": 1}, "run": "serve"}
BODIES: dict[tuple[str, str], object] = {
    ("post", "/v1/workloads/{id}/sessions"): {},
    ("post", "/v1/workloads"): document(),
    ("post", "/v1/archives/{sha256}"): {"parts": [ARCHIVE_SHA256]},
    ("post", "/v1/workloads/cancel"): {"labels": {"team": "demo"}},
    ("post", "/v1/services"): _SERVICE_DOCUMENT,
    ("put", "/v1/services/{id}"): _SERVICE_DOCUMENT,
    ("delete", "/v1/services/{id}"): {},
    ("post", "/v1/services/{id}/requests"): {"balancer": "b", "seconds": [{"second": 1, "requests": 0}]},
    ("patch", "/v1/workloads/{id}"): {"level": 7},
    ("put", "/v1/tenants/{name}"): {"level": 7},
    ("put", "/v1/tenants/{name}/secrets/{secret}"): {"value": "x"},
    ("post", "/v1/keys"): {"role": "operator"},
    ("post", "/v1/tables"): {"name": "digits", "home_region": "north"},
    ("post", "/v1/tables/{name}/replicas"): {"region": "south"},
    ("post", "/v1/tables/{name}/partitions"): {"partitions": [{"name": "ds=1", "size_bytes": 1}]},
    ("patch", "/v1/regions/{name}"): {"storage_bytes": 10**12},
    ("put", "/v1/regions/{name}/datacenters/{datacenter}"): {"clusters": []},
    ("put", "/v1/pools/{region}/{name}"): {"size": 3},
    ("put", "/v1/pilots/{region}/{name}"): {"expires_in_s": 3600},
    ("post", "/v1/usage"): {
        "runs": [
            {
                "source": "spark",
                "run": "1",
                "job": "j",
                "kind": "spark",
                "tables": [],
                "ended_at": "2026-11-22T00:00:00Z",
            }
        ],
    },
}


def _operations() -> Iterator[tuple[str, str, Role | None]]:
    for path, methods in openapi_document()["paths"].items():
        for method, operation in methods.items():
            (scopes,) = [s["apiKey"] for s in operation.get("security", [])] or [[]]
            yield method, path, Role(scopes[0]) if scopes else None


OPERATIONS = list(_operations())
GUARDED = [(method, path, role) for method, path, role in OPERATIONS if role is not None]


def _id(operation: tuple[str, str, Role | None]) -> str:
    return f"{operation[0]} {operation[1]}"


def _url(path: str, world: ApiWorld) -> str:
    values = VALUES | ({"name": "digits"} if path.startswith("/v1/tables") else {})
    values |= {"name": "north"} if path.startswith("/v1/regions") else {}
    ids = {"/v1/keys": "key-vision", "/v1/services": SERVICE}
    values["id"] = next((id_ for start, id_ in ids.items() if path.startswith(start)), "wl-0000000000000001")
    return path.format(**values)


async def _send(world: ApiWorld, method: str, path: str, headers: Mapping[str, str | bytes], query: str = "") -> Any:
    options: dict[str, Any] = {"json": BODIES[method, path]} if (method, path) in BODIES else {}
    if path.startswith("/v1/archives/") and method == "put":
        options = {"content": ARCHIVE, "headers": {"content-type": "application/gzip"}}
    options["headers"] = {**options.get("headers", {}), **headers}
    async with world.client(None) as client:
        return await client.request(method, _url(path, world) + query, **options)


def _everything(world: ApiWorld) -> tuple[str, ...]:
    """Returns a digest of each table, except audit entries of refused requests and failed logins."""
    with world.session() as session:
        return tuple(session.execute(text(_digests(world.engine))).one())


@cache
def _digests(engine: Engine) -> str:
    """Returns one query for all digests: a query for each table took half of the time of these tests."""
    kept = "case when action not in ('request.refused', 'login.failed') then t::text end"
    with transaction(engine) as session:
        tables = session.scalars(text("select tablename from pg_tables where schemaname = 'public' order by 1")).all()
    rows = {table: kept if table == "audit" else "t::text" for table in tables}
    digests = (f"(select md5(string_agg({row}, ',' order by {row})) from {table} as t)" for table, row in rows.items())
    return f"select {', '.join(digests)}"


@pytest.fixture(scope="module")
def lived_in(shared_world: ApiWorld) -> ApiWorld:
    """Returns a world with a running workload of tenant vision, a placement run, a plan of pools and an instance."""
    id_ = shared_world.add_workload(Phase.RUNNING, labels={"team": "demo"})
    shared_world.add_attempt(id_, 1, "north/alpha/m1", 0b1)
    store_output(shared_world.buckets["north"], id_, [b"x"], name="vision")
    with shared_world.session() as session:
        begin_placement_run(session, VALUES["placement_run"], 3600.0, dry_run=True)
        plan = {"pools": [], "moves": [], "move_count": 0, "busy_move_count": 0}
        session.add(PoolPlan(region="north", inputs="", body=plan, svg="<svg/>"))
    shared_world.add_instance()
    with shared_world.session() as session:
        session.add(ServiceRow(id=SERVICE, tenant="vision", name="chat"))
        session.flush()
        spec = ServiceSpec(name="chat", tenant="vision", certificate="chat-tls")
        session.add(ServiceVersion(service=SERVICE, version=1, spec=spec.model_dump()))
        box = encrypt_secret(load_master_key(shared_world.settings.master_key_path), "pem")
        session.add(Secret(tenant="vision", name="chat-tls", box=box))
    return shared_world


def test_only_the_service_itself_is_open() -> None:
    """Every operation under /v1 requires a role; only health, readiness and metrics need no key."""
    assert {path for _, path, role in OPERATIONS if role is None} == OPEN
    assert all(path.startswith("/v1/") for _, path, role in GUARDED)
    assert len(GUARDED) > 40


@pytest.mark.parametrize("operation", GUARDED, ids=_id)
async def test_without_a_key(lived_in: ApiWorld, operation: tuple[str, str, Role]) -> None:
    """Without a valid key every operation returns 401 and changes nothing."""
    method, path, _ = operation
    before = _everything(lived_in)
    bad = [
        "",
        "Bearer",
        "Bearer ",
        "Bearer mzn_unknown",
        "Basic abc",
        "Bearer é",
        f"Token {lived_in.raw_keys['operator']}",
    ]
    for given in [None, *bad]:
        answer = await _send(lived_in, method, path, {} if given is None else {"authorization": given.encode()})
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"].startswith("Bearer")
        if method != "head":
            assert answer.json()["type"] == "urn:mizzen:problem:unauthenticated"
    assert _everything(lived_in) == before


_CERTIFICATE = ("get", "/v1/services/{id}/certificate")
_READ = [("get", "/v1/services/{id}/endpoints"), ("get", "/v1/events")]
"""The operations that a balancer may call, except reports of counts, and that roles above it may call, too."""


@pytest.mark.parametrize(
    "operation",
    [o for o in GUARDED if o[2] not in (Role.MACHINE, Role.VIEWER) and o[:2] not in _READ],
    ids=_id,
)
async def test_with_too_small_a_role(lived_in: ApiWorld, operation: tuple[str, str, Role]) -> None:
    """With a lower role an operation returns 403, also for the own tenant, and changes nothing."""
    method, path, role = operation
    before = _everything(lived_in)
    for key in ["vision-viewer", "auditor"] + (["vision"] if role is Role.OPERATOR else []):
        answer = await _send(lived_in, method, path, lived_in.headers(key))
        assert (answer.status_code, answer.json()["type"]) == (403, "urn:mizzen:problem:forbidden")
        assert role.value in answer.json()["detail"]
    assert _everything(lived_in) == before


@pytest.mark.parametrize("operation", GUARDED, ids=_id)
async def test_with_a_machines_key(lived_in: ApiWorld, operation: tuple[str, str, Role]) -> None:
    """A machine's key can read the key's identity and its own machine; everything else returns 403 by name."""
    method, path, role = operation
    before = _everything(lived_in)
    answer = await _send(lived_in, method, path, lived_in.headers("machine"))
    if role is Role.MACHINE:
        assert (method, answer.status_code) == ("get", 200)
        if "{machine}" in path:
            other = await _send(lived_in, method, path.replace("{machine}", "m2"), lived_in.headers("machine"))
            assert (other.status_code, "only machine north/alpha/m1" in other.json()["detail"]) == (403, True)
    else:
        assert answer.status_code == 403
        if method != "head":
            assert f"requires the role {role.value}; the key has the role machine of" in answer.json()["detail"]
    assert _everything(lived_in) == before


@pytest.mark.parametrize("operation", GUARDED, ids=_id)
async def test_with_a_balancers_key(lived_in: ApiWorld, operation: tuple[str, str, Role]) -> None:
    """A balancer's key can read the key's identity, endpoints and their events, and report counts; nothing else."""
    method, path, role = operation
    before = _everything(lived_in)
    query = "?follow=false" if path == "/v1/events" else ""
    answers = [
        await _send(lived_in, method, path, lived_in.headers(key), query) for key in ("balancer", "vision-balancer")
    ]
    if path == "/v1/whoami" or role is Role.BALANCER:
        assert [answer.status_code for answer in answers] == [204 if method == "post" else 200] * 2
    else:
        assert [answer.status_code for answer in answers] == [403] * 2
        assert _everything(lived_in) == before


def test_what_a_balancers_key_can_call() -> None:
    """The operations that need at least the role of a balancer are these."""
    found = {(method, path) for method, path, role in GUARDED if role is Role.BALANCER}
    assert found == {*_READ, _CERTIFICATE, ("post", "/v1/services/{id}/requests")}


async def test_a_certificate_is_for_balancers_and_operators(lived_in: ApiWorld) -> None:
    """The private key is returned to no submitter, also of the service's tenant, and to no other tenant's balancer."""
    statuses = {
        key: (await _send(lived_in, *_CERTIFICATE, lived_in.headers(key))).status_code
        for key in ("vision-balancer", "operator", "vision", "vision-viewer", "auditor", "speech", "speech-balancer")
    }
    assert statuses == {
        "vision-balancer": 200, "operator": 200, "vision": 403, "vision-viewer": 403, "auditor": 403, "speech": 403,
        "speech-balancer": 404,
    }  # fmt: skip
    answer = await _send(lived_in, *_CERTIFICATE, lived_in.headers("balancer"))
    assert answer.json() == {"name": "chat-tls", "pem": "pem"}


async def test_a_balancer_gets_only_events_of_endpoints(lived_in: ApiWorld) -> None:
    """Events of workloads, machines and tables are hidden; with a tenant, those of other tenants too."""
    with lived_in.session() as session:
        for tenant, kind in (
            ("vision", "service.endpoints"),
            ("speech", "service.endpoints"),
            ("vision", "workload.x"),
        ):
            record(session, kind, tenant=tenant, detail={"name": "chat", "service": "sv-1"})
    for key, seen in (("balancer", ["vision", "speech"]), ("vision-balancer", ["vision"])):
        found: list[str] = []
        for _ in range(300):  # Events are readable once no older transaction of the server is in progress.
            answer = await _send(lived_in, "get", "/v1/events", lived_in.headers(key), "?follow=false")
            lines = answer.text.splitlines()
            assert {line for line in lines if line.startswith("event:")} <= {"event: service.endpoints"}
            found = [json.loads(line.removeprefix("data: "))["tenant"] for line in lines if line.startswith("data:")]
            if len(found) >= len(seen):
                break
            await asyncio.sleep(0.1)
        assert found == seen


def test_what_a_machines_key_can_call() -> None:
    """The operations that need only the role of a machine are these."""
    machine = "/v1/machines/{region}/{cluster}/{machine}"
    found = {(method, path) for method, path, role in GUARDED if role is Role.MACHINE}
    assert found == {("get", "/v1/whoami"), ("get", machine), ("get", f"{machine}/lending")}


@pytest.mark.parametrize("operation", GUARDED, ids=_id)
async def test_with_another_tenants_key(lived_in: ApiWorld, operation: tuple[str, str, Role]) -> None:
    """With another tenant's key, items are not found (404) or not listed, and nothing changes."""
    method, path, role = operation
    before = _everything(lived_in)
    query = "?follow=false" if path.endswith(("/events", "/logs")) else ""
    query = "?tenant=vision" if path.startswith(("/v1/archives", "/v1/pilots")) else query
    query = OUTPUT if path.endswith("/outputs/{name}") else query
    key = "speech-balancer" if (method, path) == _CERTIFICATE else "speech"
    answer = await _send(lived_in, method, path, lived_in.headers(key), query)
    if role is Role.OPERATOR:
        assert answer.status_code == 403
    elif path.startswith(
        ("/v1/workloads/{id}", "/v1/tenants/{name}", "/v1/archives", "/v1/pilots", "/v1/services/{id}")
    ):
        assert answer.status_code == 404
    elif (method, path) in (("post", "/v1/workloads"), ("post", "/v1/services")):
        assert answer.status_code == 422
    elif (method, path) == ("post", "/v1/workloads/cancel"):
        assert (answer.status_code, answer.json()) == (202, {"cancelled": []})
    elif path in LISTS:
        assert answer.status_code == 200
        assert "vision" not in answer.text
        assert "wl-" not in answer.text
    else:
        assert path in SHARED
        assert answer.status_code == 200
        assert "wl-" not in answer.text
    assert _everything(lived_in) == before


@pytest.mark.parametrize("operation", [o for o in GUARDED if o[0] == "get"], ids=_id)
async def test_own_key_reads(lived_in: ApiWorld, operation: tuple[str, str, Role]) -> None:
    """With a viewer key of the tenant, or another one where required, every GET operation returns 200."""
    method, path, role = operation
    query = "?follow=false" if path.endswith(("/events", "/logs")) else ""
    query = OUTPUT if path.endswith("/outputs/{name}") else query
    key = {Role.OPERATOR: "operator", Role.SUBMITTER: "vision"}.get(role, "vision-viewer")
    key = "vision-balancer" if (method, path) == _CERTIFICATE else key
    assert (await _send(lived_in, method, path, lived_in.headers(key), query)).status_code == 200


async def test_unknown_and_revoked_keys_get_the_same_answer(world: ApiWorld) -> None:
    """Unknown and revoked keys get identical responses."""
    with world.session() as session:
        session.connection().exec_driver_sql("update api_key set revoked_at = now() where id = 'key-speech'")
    world.raw_keys["unknown"] = "mzn_0123_unknown"
    answers = []
    for key in ("unknown", "speech"):
        async with world.client(key) as client:
            answers.append(await client.get("/v1/whoami"))
    assert answers[0].status_code == 401
    assert answers[0].content == answers[1].content
    assert answers[0].headers == answers[1].headers
