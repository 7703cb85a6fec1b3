"""Health, readiness, metrics, general errors, the OpenAPI document, and the process of the API."""

import importlib
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import yaml
from sqlalchemy import text

from api.app import create_app
from api.problems import _KINDS, ProblemType
from api.serve import listen
from domain.phases import Phase
from domain.reasons import Reason, ReasonCode
from domain.service import ServiceSpec
from infra.config.settings import Settings
from infra.db import integrity
from infra.db.migrate import head
from infra.db.rounds import note_round, note_start
from infra.db.services import ServiceRow, ServiceVersion
from infra.errors import ConfigurationError, StackError
from tests.api.calls import T0, get
from tests.api.world import ApiWorld, document

GONE = "postgresql://nobody@127.0.0.1:1/nothing"


async def test_healthy_and_ready(shared_world: ApiWorld) -> None:
    """A process with a migrated database is ready, with or without Temporal."""
    async with shared_world.client(None) as client:
        assert (await client.get("/healthz")).json() == {"status": "ok"}
        ready = await client.get("/readyz")
        heads = [(await client.head(path)).status_code for path in ("/healthz", "/readyz")]
    assert [ready.status_code, *heads] == [200, 200, 200]
    assert (ready.json()["status"], ready.json()["temporal"]) == ("ready", "not configured")


def _set_revision(world: ApiWorld, revision: str) -> None:
    with world.session() as session:
        session.execute(text("update alembic_version set version_num = :revision"), {"revision": revision})


async def test_not_ready_on_an_old_schema(world: ApiWorld) -> None:
    """If the database has another schema revision, `/readyz` returns 503."""
    async with world.client(None) as client:
        try:
            _set_revision(world, "0000")
            answer = await client.get("/readyz")
        finally:
            _set_revision(world, head())
    assert (answer.status_code, answer.json()["type"]) == (503, "urn:mizzen:problem:not-ready")


async def test_without_postgres(tmp_path: Path) -> None:
    """While Postgres is down, `/healthz` returns 200, metrics report it, and all other requests get 503."""
    app = create_app(Settings(database=GONE, data_dir=tmp_path))
    headers = {"authorization": "Bearer mzn_x"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://api", headers=headers) as client:
        assert (await client.get("/healthz")).status_code == 200
        assert "mizzen_database_up 0.0" in (await client.get("/metrics")).text
        for method, path in (("GET", "/readyz"), ("GET", "/v1/workloads"), ("POST", "/v1/workloads")):
            answer = await client.request(method, path)
            assert (answer.status_code, answer.json()["type"]) == (503, "urn:mizzen:problem:database-unavailable")
            assert answer.headers["retry-after"] == "1"
    await app.state.mizzen.aclose()


async def test_postgres_that_comes_back(world: ApiWorld) -> None:
    """After Postgres has closed all connections, as at a restart, the next request succeeds."""
    await get(world, "/v1/workloads")
    with world.session() as session:
        session.execute(
            text("select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'mizzen-api'")
        )
    await get(world, "/v1/workloads")


async def test_loops_that_fail_are_seen(world: ApiWorld) -> None:
    """A loop whose rounds fail is named to operators with its error, and counted in `/readyz` and `/metrics`."""
    with world.session() as session:
        note_round(session, "expiry", 3600.0, None)
        for _ in range(3):
            note_round(session, "reconciling", 600.0, "Temporal does not answer")
        note_round(session, "progress", 0.0, None)
        note_start(session, "expiry", 0.0)
        note_start(session, "deletion of replicas", 0.0)
        session.execute(text("update publication set body = body || '{\"of_a_newer_version\": 1}'"))
    items = {item["name"]: item for item in (await get(world, "/v1/loops"))["items"]}
    assert {name: item["state"] for name, item in items.items()} == {
        "deletion of replicas": "late", "expiry": "ok", "progress": "late", "reconciling": "failing"
    }  # fmt: skip
    failing = items["reconciling"]
    assert (failing["failures"], failing["error"]) == (3, "Temporal does not answer")
    assert failing["succeeded_at"] is None and failing["failing_since"] is not None
    async with world.client(None) as client:
        assert (await client.get("/readyz")).json()["loops"] == "3 of 4 are failing or late"
        found = (await client.get("/metrics")).text
    assert 'mizzen_loop_failures{loop="reconciling"} 3.0' in found
    assert 'mizzen_loop_success_age_seconds{loop="expiry"}' in found


async def test_metrics(world: ApiWorld) -> None:
    """Metrics have workloads, slots, machines, replicas, outbox and requests, without names of tenants."""
    world.add_workload(Phase.PENDING)
    with world.session() as session:
        integrity.found_wrong(session, "digits", "all", "north", "tables/digits/a is missing")
    running = world.add_workload(Phase.RUNNING)
    evicted = Reason(ReasonCode.EVICTED, {}).to_json()
    world.add_attempt(running, 1, "north/alpha/m1", 0b1, released_at=T0, outcome=evicted, lost_s=12.5)
    world.add_attempt(running, 2, "north/alpha/m1", 0b111, started_at=T0, last_step=9, checkpoint_step=4,
                      checkpoint_at=T0, checkpoint_bytes=99,
                      cadence={"interval_s": 805.0, "cost_s": 30.0, "mtbf_s": None, "step_s": 2.0},
                      gpu_use=[{"job": "trainer", "task": 0, "gpus": 2, "percent": 75, "used_bytes": 1 << 30},
                               {"job": "trainer", "task": 1, "gpus": 1, "percent": 50, "used_bytes": 2 << 30}],
                      )  # fmt: skip
    async with world.client() as client:
        await client.post("/v1/workloads", json=document())
        await client.post("/v1/workloads", json=document(not_before="2h"))
        await client.get("/v1/workloads/wl-none")
        found = (await client.get("/metrics")).text
    lines = dict(line.rsplit(" ", 1) for line in found.splitlines() if not line.startswith("#"))
    expected = {
        'mizzen_workloads{phase="pending"}': 3,
        'mizzen_workloads{phase="running"}': 1,
        'mizzen_workloads{phase="failed"}': 0,
        "mizzen_queue_length": 2,
        "mizzen_blocked_workloads": 1,
        'mizzen_gpu_slots{gpu_type="a100",region="north",state="total"}': 16,
        'mizzen_gpu_slots{gpu_type="a100",region="north",state="held"}': 3,
        'mizzen_gpu_slots{gpu_type="v100",region="south",state="promised"}': 0,
        'mizzen_machines{region="south",state="ready"}': 2,
        "mizzen_machines_cordoned": 0,
        'mizzen_replicas_wrong{region="north"}': 1,
        'mizzen_replicas_wrong{region="south"}': 0,
        'mizzen_replicas_kept{region="north"}': 0,
        'mizzen_checkpoint_bytes{region="north"}': 99,
        'mizzen_checkpoint_interval_seconds{region="north"}': 805,
        'mizzen_checkpoint_cost_seconds{region="north"}': 30,
        'mizzen_work_at_risk_seconds{region="north"}': 10,
        'mizzen_work_lost_seconds_total{region="north"}': 12.5,
        'mizzen_gpus_busy{region="north"}': 2,
        'mizzen_gpus_used_bytes{region="north"}': 3 << 30,
        "mizzen_outbox_backlog": 2,
        "mizzen_preemptions_total": 1,
        "mizzen_database_up": 1,
        "mizzen_api_followers": 0,
        'mizzen_api_requests_total{method="GET",route="/v1/workloads/{id}",status="404"}': 1,
        'mizzen_api_requests_total{method="POST",route="/v1/workloads",status="202"}': 2,
        'mizzen_api_request_seconds_count{method="POST",route="/v1/workloads"}': 2,
    }
    assert {name: float(lines[name]) for name in expected} == expected
    assert float(lines["mizzen_outbox_oldest_seconds"]) >= 0
    assert '"vision"' not in found
    assert "wl-" not in found
    task = f'{{job="trainer",task="1",tenant="vision",workload="{running}"}}'
    for key, sees in (("operator", True), ("vision-viewer", True), ("speech", False)):
        async with world.client(key) as client:
            own = (await client.get("/v1/metrics")).text
        assert (f"mizzen_task_gpu_percent{task} 50.0" in own) == sees
        assert (f"mizzen_task_gpu_used_bytes{task} 2.147483648e+09" in own) == sees


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/v1/workloads"), ("PUT", "/v1/archives/" + "0" * 64), ("POST", "/v1/keys")],
    ids=["document", "archive", "json"],
)
def test_a_client_that_leaves_is_no_error(
    world: ApiWorld, serve: Callable[[ApiWorld], str], caplog: pytest.LogCaptureFixture, method: str, path: str
) -> None:
    """A client that closes the connection in the middle of its body causes no internal error and no traceback."""
    url = serve(world)
    key, media = ("vision", "application/gzip") if "archives" in path else ("operator", "application/json")
    head = f"{method} {path} HTTP/1.1\r\nHost: api\r\nAuthorization: {world.headers(key)['Authorization']}\r\n"
    head += f"Content-Type: {media}\r\nContent-Length: 100\r\n\r\n{{"
    with socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])), timeout=30) as connection:
        connection.sendall(head.encode())
        time.sleep(0.2)
    counted = f'mizzen_api_requests_total{{method="{method}",route="{path.replace("0" * 64, "{sha256}")}",status="'
    for _ in range(100):  # Metrics are cached for a second.
        if counted in (found := httpx.get(f"{url}/metrics").text):
            break
        time.sleep(0.1)
    assert f'{counted}400"}} 1.0' in found
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_metrics_of_services_need_a_key(world: ApiWorld) -> None:
    """Without a key, `/metrics` names no tenant and no service; with a key, each sees the services that it may see."""
    with world.session() as session:
        for tenant in ("vision", "speech"):
            session.add(ServiceRow(id=f"sv-{tenant}", tenant=tenant, name=f"chat-{tenant}"))
            session.flush()
            spec = ServiceSpec(name=f"chat-{tenant}", tenant=tenant, argv=("serve",)).model_dump(mode="json")
            session.add(ServiceVersion(service=f"sv-{tenant}", version=1, spec=spec))
    async with world.client(None) as client:
        found = (await client.get("/metrics")).text
        assert (await client.get("/v1/metrics")).status_code == 401
    assert "mizzen_services 2.0" in found and "chat" not in found and "speech" not in found
    for key, seen in (("operator", {"vision", "speech"}), ("vision-viewer", {"vision"})):
        async with world.client(key) as client:
            own = (await client.get("/v1/metrics")).text
        assert {tenant for tenant in ("vision", "speech") if f'service="chat-{tenant}"' in own} == seen


@pytest.mark.parametrize("path", ["/", "/v1/nothing", "/v1/workloads/", "/v2/workloads", "/v1", "/favicon.ico"])
async def test_nothing_there(shared_world: ApiWorld, path: str) -> None:
    """The response for an unknown path is a problem document."""
    async with shared_world.client() as client:
        answer = await client.get(path)
    assert (answer.status_code, answer.json()["type"]) == (404, "urn:mizzen:problem:not-found")
    assert answer.headers["content-type"] == "application/problem+json"


async def test_methods_that_are_not_allowed(shared_world: ApiWorld) -> None:
    """A method that an endpoint does not support gets 405 with the Allow header."""
    async with shared_world.client() as client:
        answer = await client.put("/v1/workloads")
        assert (answer.status_code, answer.json()["type"]) == (405, "urn:mizzen:problem:method-not-allowed")
        assert answer.headers["allow"] == "GET, POST"
        assert (await client.request("BREW", "/v1/workloads")).status_code == 405


@pytest.mark.parametrize(
    ("method", "path", "body", "said"),
    [
        ("POST", "/v1/workloads?dryrun=true", "{}", "query.dryrun: unknown parameter; did you mean dry_run?"),
        ("POST", "/v1/workloads/cancel?dry_run=true", "{}", "dry_run: unknown parameter; the known ones are none"),
        ("GET", "/v1/workloads?tennant=vision", None, "query.tennant: unknown parameter; did you mean tenant?"),
        ("GET", "/v1/workloads?cursor=wl-1", None, "query.cursor: must be `next_cursor` of the previous page"),
        ("GET", "/v1/workloads/wl-1/logs?folow=true", None, "query.folow: unknown parameter; did you mean follow?"),
        ("GET", "/v1/workloads?limit=1&limit=2", None, "query.limit: is given twice; it has one value"),
        ("POST", "/v1/workloads?dry_run=true&dry_run=false", "{}", "query.dry_run: is given twice; it has one value"),
        ("GET", "/v1/audit?cursor=-1", None, "query.cursor: must be `next_cursor` of the previous page"),
        ("PUT", "/v1/tenants/new", '{"level": 3, "level": 7}', "the body has the key 'level' twice in one object"),
        ("PUT", "/v1/tenants/new", '{"level": 3, "quota": {"gpus": {"a": 1, "a": 9}}}', "the key 'a' twice in one"),
        ("PUT", "/v1/tenants/new", '{"levl": 3}', "levl: unknown field; did you mean level?"),
        ("PUT", "/v1/tenants/new", '{"x": 3}', "x: unknown field; the known fields are level, quota, isolation"),
        ("PUT", "/v1/tenants/new", '{"level": 3, "quota": {"gpu": {}}}', "quota.gpu: unknown field; did you mean gpus"),
        ("PUT", "/v1/tenants/new", '{"quota": {"gpus": {"a\\u0000": 1}}}', "a key of quota.gpus contains a NUL"),
        ("POST", "/v1/keys", '{"role": "viewer", "label": "\\u0000"}', "label contains a NUL character"),
        ("POST", "/v1/keys", "[]", "must be a JSON object"),
        ("POST", "/v1/keys", "{}", "role: missing"),
    ],
)  # fmt: skip
async def test_requests_that_an_endpoint_would_misread(
    shared_world: ApiWorld, method: str, path: str, body: str | None, said: str
) -> None:
    """An unknown parameter, a damaged cursor, and a key given twice are refused, with what would be right."""
    async with shared_world.client() as client:
        answer = await client.request(method, path, content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code in (400, 422) and said in answer.json()["detail"], answer.text
        assert (await client.get("/v1/tenants/new")).status_code == 404


@pytest.mark.parametrize(
    ("content", "media", "status", "slug"),
    [
        (b'{"level": 3', "application/json", 400, "malformed-request"),
        (b"[" * 100_000, "application/json", 400, "malformed-request"),
        (b"\xff", "application/json", 400, "malformed-request"),
        (b"9" * 5000, "application/json", 400, "malformed-request"),
        (b'{"level": NaN}', "application/json", 422, "invalid-request"),
        (b'{"level": 3, "\\u0000": 1}', "application/json", 422, "invalid-request"),
        (b'{"level": 3, "\\ud800": 1}', "application/json", 422, "invalid-request"),
        (b"[]", "application/json", 422, "invalid-request"),
        (b"", "application/json", 422, "invalid-request"),
        (b'{"level": 3}', "text/plain", 415, "unsupported-media-type"),
        (b'{"level": 3}', "", 415, "unsupported-media-type"),
    ],
)
async def test_bodies_that_are_no_json(
    shared_world: ApiWorld, content: bytes, media: str, status: int, slug: str
) -> None:
    """The response to an invalid JSON body is a problem document."""
    async with shared_world.client() as client:
        headers = {"content-type": media} if media else {}
        answer = await client.put("/v1/tenants/x", content=content, headers=headers)
    assert (answer.status_code, answer.json()["type"]) == (status, f"urn:mizzen:problem:{slug}")


async def test_faults_tell_nothing(shared_world: ApiWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """The response to an unexpected error is a problem document without details of the error."""
    monkeypatch.setattr("api.workloads.workload_queries.detail", lambda *_: 1 / 0)
    transport = httpx.ASGITransport(shared_world.app, raise_app_exceptions=False)
    id_ = shared_world.add_workload()
    async with httpx.AsyncClient(
        transport=transport, base_url="http://api", headers=shared_world.headers("operator")
    ) as client:
        answer = await client.get(f"/v1/workloads/{id_}")
    assert (answer.status_code, answer.json()["type"]) == (500, "urn:mizzen:problem:internal")
    assert "division" not in answer.text


def test_every_problem_type_has_a_status() -> None:
    """Each problem type has a status and a unique title."""
    assert set(_KINDS) == set(ProblemType)
    assert len({title for _, title in _KINDS.values()}) == len(ProblemType)


async def test_description(shared_world: ApiWorld) -> None:
    """The document is OpenAPI 3.1; each operation has tags, a summary, and errors as problem documents."""
    async with shared_world.client(None) as client:
        docs = await client.get("/docs")
        assert (docs.status_code, docs.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert "default-src 'none'" in docs.headers["content-security-policy"]
        scripts = re.findall(r"<script src=(\S+) defer></script>", docs.text)
        assert scripts == ["docs/try_out.js"]
        script = await client.get("/docs/try_out.js")
        assert (script.status_code, script.headers["content-type"].partition(";")[0]) == (200, "text/javascript")
        own = docs.text.replace("<script src=docs/try_out.js defer></script>", "") + script.text
        assert not re.search(r"<script|<link|src=|@import|https?://|innerHTML", own)
        assert (await client.get("/redoc")).status_code == 404
        described = (await client.get("/openapi.json")).json()
    assert described["openapi"].startswith("3.1")
    tags = {tag["name"] for tag in described["tags"]}
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            assert set(operation["tags"]) <= tags
            assert operation["summary"]
            assert operation["description"]
            for status, answer in operation["responses"].items():
                if status[0] in "45" and method != "head":
                    assert list(answer["content"]) == ["application/problem+json"], (path, status)
    schemas = described["components"]["schemas"]
    assert "HTTPValidationError" not in schemas
    for reference in re.findall(r'"#/components/schemas/(\w+)"', json.dumps(described)):
        assert reference in schemas
    assert all(f"<code>{path}</code>" in docs.text for path in described["paths"])
    names = [o["operationId"] for m in described["paths"].values() for o in m.values()]
    assert len(set(names)) == len(names)


def test_sample_of_the_description_is_the_documented_one() -> None:
    """The example document is unchanged after it was written and parsed as YAML."""
    assert yaml.safe_load(yaml.safe_dump(document())) == document()


def test_no_database_is_an_error() -> None:
    """Creating the API without a database setting is a ConfigurationError."""
    with pytest.raises(ConfigurationError, match="database: not set"):
        create_app(Settings())


def test_taken_port_is_named() -> None:
    """A port that is in use is an error that names it."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StackError, match=f"port {port} on 127.0.0.1"):
            listen("127.0.0.1", port)


def test_no_part_of_an_answer_waits_for_an_acknowledgement() -> None:
    """Connections have TCP_NODELAY set; otherwise separate writes of head and body would cost 40 ms a request."""
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()) as client:
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
            assert client.getpeername() == listener.getsockname()


def test_own_modules_come_from_the_checkout(checkout: Path) -> None:
    """The module `api` is imported from the checkout, not from site-packages."""
    assert Path(str(importlib.import_module("api").__file__)).is_relative_to(checkout)


@pytest.mark.rotating
def test_serving_ends_at_sigterm(world: ApiWorld, tmp_path: Path, checkout: Path) -> None:
    """At SIGTERM the process exits with 0, even if a stream is open."""
    with listen("127.0.0.1", 0) as probe:
        port = probe.getsockname()[1]
    file = tmp_path / "mizzen.yaml"
    settings = {"database": world.settings.database, "api": {"port": port}, "temporal": {"namespace": "default"}}
    settings["data_dir"] = str(world.settings.data_dir)
    file.write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "server", "api", "--config", str(file)]
    process = subprocess.Popen(command, cwd=checkout, env={**os.environ, "PYTHONPATH": str(checkout)})
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            for _ in range(300):
                try:
                    assert client.get("/readyz").status_code == 200
                    break
                except httpx.ConnectError:
                    assert process.poll() is None
                    signal.sigtimedwait([], 0.1)
            with client.stream("GET", "/v1/events", headers=world.headers("operator")) as stream:
                lines = stream.iter_lines()
                assert next(lines) == "retry: 1000"
                process.send_signal(signal.SIGTERM)
                list(lines)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


async def test_streams_count_as_followers(world: ApiWorld, serve: Callable[[ApiWorld], str]) -> None:
    """An open stream counts in the metric of followers until its client disconnects."""
    base = serve(world)
    async with httpx.AsyncClient(base_url=base, headers=world.headers("operator"), timeout=30) as client:

        async def followers() -> float:
            found = (await client.get("/metrics")).text.splitlines()
            return float(next(line for line in found if line.startswith("mizzen_api_followers ")).split()[1])

        async with client.stream("GET", "/v1/events") as stream:
            lines = stream.aiter_lines()
            assert await anext(lines) == "retry: 1000"
            assert await followers() == 1
        while await followers() != 0:
            pass
