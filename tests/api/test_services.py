"""Services over the API: documents, versions, endpoints and counts."""

import asyncio
import time
from dataclasses import asdict, replace
from datetime import datetime
from typing import Any

import pytest
from sqlalchemy import func, select

from activities.services.canary_rows import canary_answers
from domain.phases import Phase
from domain.reasons import Reason, ReasonCode
from domain.service import NOT_IN_REPLICAS, ServiceSpec
from domain.spec import TaskSpec
from infra.db.logs import Audit, Outbox
from infra.db.services import BalancerReport, ServiceReplica, ServiceRequests, ServiceRow, ServiceVersion
from services.values import CanaryAnswers, CanaryState
from tests.api.calls import act, get
from tests.api.world import ApiWorld, as_yaml

DOCUMENT: dict[str, Any] = {
    "version": 1,
    "name": "chat",
    "service": {"readiness_probe": "/health", "replicas": 2, "drain_seconds": 5},
    "resources": {"accelerators": "a100:1", "ports": 8080, "use_spot": True},
    "run": "serve",
}


async def _put(
    world: ApiWorld, path: str, body: object, key: str = "vision", method: str = "POST", once: str | None = None
) -> Any:
    async with world.client(key) as client:
        headers = {"content-type": "application/yaml"} | ({"idempotency-key": once} if once else {})
        return await client.request(method, path, content=as_yaml(body), headers=headers)


async def test_a_service_is_created_updated_and_ended(world: ApiWorld) -> None:
    """Each change writes a version, an audit entry and a message to the service's workflow in one transaction."""
    made = await _put(world, "/v1/services", DOCUMENT)
    assert made.status_code == 201, made.text
    one = made.json()
    assert (one["name"], one["tenant"], one["version"], one["state"]) == ("chat", "vision", 1, "starting")
    assert one["spec"]["serving"]["port"] == 8080
    again = await _put(world, "/v1/services", DOCUMENT)
    assert (again.status_code, "exists" in again.json()["detail"]) == (409, True)
    changed = {**DOCUMENT, "run": "serve --fast"}
    updated = await _put(world, "/v1/services/chat?mode=blue_green", changed, method="PUT")
    assert (updated.status_code, updated.json()["version"], updated.json()["update_mode"]) == (200, 2, "blue_green")
    assert (await get(world, f"/v1/services/{one['id']}", "vision"))["version"] == 2
    for _ in range(2):
        ended = await act(world, "/v1/services/chat", "vision", body={}, method="DELETE")
        assert (ended.status_code, ended.json()["state"]) == (202, "stopping")
    refused = await _put(world, "/v1/services/chat", changed, method="PUT")
    assert refused.status_code == 409
    with world.session() as session:
        assert session.scalars(select(Audit.action).order_by(Audit.id)).all() == [
            "service.created", "service.updated", "service.end",
        ]  # fmt: skip
        mails = session.scalars(select(Outbox.body["service"].astext).where(Outbox.kind == "service")).all()
        assert mails == [one["id"]] * 3
        assert session.scalars(select(ServiceVersion.version).order_by(ServiceVersion.version)).all() == [1, 2]


async def test_an_update_replaces_only_what_it_changes(world: ApiWorld) -> None:
    """Running replicas continue as those of the newest version unless their own part differs; also on the way back."""
    id_ = (await _put(world, "/v1/services", DOCUMENT)).json()["id"]

    def launched(version: int, **more: Any) -> int:
        with world.session() as session:
            number = session.scalar(select(func.count()).select_from(ServiceReplica)) or 0
            own = {"service": id_, "workload": f"w-{number}", "kind": "spot", "is_base": True}
            session.add(ServiceReplica(number=number, version=version, **own, **more))
            return number

    async def versions(change: dict[str, Any]) -> list[int]:
        answer = await _put(world, "/v1/services/chat", {**DOCUMENT, **change}, method="PUT")
        assert answer.status_code == 200, answer.text
        with world.session() as session:
            return list(session.scalars(select(ServiceReplica.version).order_by(ServiceReplica.number)))

    service = {**DOCUMENT["service"], "replicas": 3, "drain_seconds": 9, "max_queue": 5, "max_unavailable": 1}
    probe = {"path": "/health", "initial_delay_seconds": 9}
    launched(1)
    launched(1, draining_at=func.now())
    launched(1, ended_at=func.now())
    assert await versions({}) == [2, 1, 1], "the identical document"
    assert await versions({"service": service}) == [3, 1, 1]
    assert await versions({"service": {**service, "readiness_probe": probe}}) == [4, 1, 1]
    assert await versions({"run": "serve --fast"}) == [4, 1, 1]
    launched(5)
    assert await versions({"service": service}) == [6, 1, 1, 5], "the way back"
    assert await versions({"service": {**service, "readiness_probe": "/other"}}) == [6, 1, 1, 5]
    assert await versions({"env": {"A": "1"}}) == [6, 1, 1, 5]
    assert await versions({"run": "serve --fast"}) == [6, 1, 1, 9]


def test_each_field_of_a_service_is_one_of_its_replicas_or_changes_in_place() -> None:
    """A new field must be one or the other."""
    known = {
        "name", "tenant", "labels", "level", "machines", "options", "secrets", "image_pull_secret", "files", "workdir",
        "serving",
    }  # fmt: skip
    assert set(ServiceSpec.model_fields) - set(TaskSpec.model_fields) - known == set(NOT_IN_REPLICAS) - known


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"service": {"replicas": -1}}, "service.replicas"),
        ({"tenant": "speech"}, "tenant"),
        ({"secrets": {"TOKEN": "missing"}}, "secrets.TOKEN"),
        ({"srevice": {}}, "srevice"),
    ],
)
async def test_a_bad_document_changes_nothing(shared_world: ApiWorld, change: dict[str, Any], path: str) -> None:
    """The error names the field, and no service is created."""
    answer = await _put(shared_world, "/v1/services", {**DOCUMENT, **change})
    assert (answer.status_code, answer.json()["errors"][0]["path"]) == (422, path)
    with shared_world.session() as session:
        assert session.scalars(select(ServiceRow)).all() == []


async def test_a_repeated_request_makes_one_version(world: ApiWorld) -> None:
    """With the same Idempotency-Key, also concurrently. Another request with the key is refused and changes nothing."""
    made = await asyncio.gather(*(_put(world, "/v1/services", DOCUMENT, once="k1") for _ in range(8)))
    assert {one.status_code for one in made} == {201}
    assert len({one.json()["id"] for one in made}) == 1
    path = "/v1/services/chat?mode=rolling"
    updated = await asyncio.gather(*(_put(world, path, DOCUMENT, method="PUT", once="k2") for _ in range(8)))
    assert {(one.status_code, one.json()["version"]) for one in updated} == {(200, 2)}
    for other in (
        await _put(world, "/v1/services/chat?mode=blue_green", DOCUMENT, method="PUT", once="k2"),
        await _put(world, path, {**DOCUMENT, "run": "serve --fast"}, method="PUT", once="k2"),
        await _put(world, "/v1/services", DOCUMENT, once="k2"),
    ):
        assert (other.status_code, other.json()["type"]) == (422, "urn:mizzen:problem:idempotency-mismatch")
    assert (await _put(world, path, DOCUMENT, method="PUT", once="k" * 201)).status_code == 400
    assert (await _put(world, path, DOCUMENT, method="PUT")).json()["version"] == 3
    changed = {**DOCUMENT, "run": "serve --fast"}
    assert (await _put(world, path, changed, method="PUT")).json()["version"] == 4
    again = (await _put(world, path, DOCUMENT, method="PUT", once="k2")).json()
    assert (again["version"], "--fast" in str(again["spec"])) == (2, False), "the one that it made"
    await act(world, "/v1/services/chat", "vision", body={}, method="DELETE")
    assert (await _put(world, path, DOCUMENT, method="PUT", once="k2")).status_code == 200, "it was executed before"
    with world.session() as session:
        actions = session.scalars(select(Audit.action).order_by(Audit.id)).all()
        assert actions == ["service.created", *["service.updated"] * 3, "service.end"]


async def test_concurrent_requests_under_one_key(world: ApiWorld) -> None:
    """One of them makes its service; the others are other requests."""
    made = await asyncio.gather(
        *(_put(world, "/v1/services", {**DOCUMENT, "name": f"chat-{n}"}, once="k") for n in range(8))
    )
    assert sorted(one.status_code for one in made) == [201] + [422] * 7
    assert len((await get(world, "/v1/services", "vision"))["items"]) == 1


async def test_name_and_tenant_stay(world: ApiWorld) -> None:
    """An update with another name is refused; a document without a name gets that of the service."""
    nameless = {key: value for key, value in DOCUMENT.items() if key != "name"}
    assert (await _put(world, "/v1/services?name=chat", nameless)).status_code == 201
    other = await _put(world, "/v1/services/chat", {**DOCUMENT, "name": "talk"}, method="PUT")
    assert (other.status_code, "name: talk: must be chat" in other.json()["detail"]) == (409, True)
    assert (await _put(world, "/v1/services/chat", nameless, method="PUT")).status_code == 200


async def test_other_tenants_see_nothing(world: ApiWorld) -> None:
    """A service of another tenant is not found; two services with one name are told apart by id for operators."""
    mine = (await _put(world, "/v1/services", DOCUMENT)).json()["id"]
    for path in (f"/v1/services/{mine}", "/v1/services/chat", "/v1/services/chat/endpoints"):
        assert (await act(world, path, "speech", method="GET")).status_code == 404
    assert (await get(world, "/v1/services", "speech"))["items"] == []
    assert (await act(world, "/v1/services/chat", "vision-viewer", body={}, method="DELETE")).status_code == 403
    assert (await _put(world, "/v1/services", DOCUMENT, key="speech")).status_code == 201
    assert (await act(world, "/v1/services/chat", method="GET")).status_code == 409
    assert (await get(world, "/v1/services/chat", "vision"))["id"] == mine
    assert len((await get(world, "/v1/services"))["items"]) == 2


async def test_a_service_that_has_ended_is_found_by_its_id(world: ApiWorld) -> None:
    """Its name is free again. The error names the id, but not to other tenants."""
    made = (await _put(world, "/v1/services", DOCUMENT)).json()
    with world.session() as session:
        session.get_one(ServiceRow, made["id"]).ended_at = func.now()
    missing = await act(world, "/v1/services/chat", "vision", method="GET")
    assert (missing.status_code, made["id"] in missing.json()["detail"]) == (404, True)
    other = await act(world, "/v1/services/chat", "speech", method="GET")
    assert (other.status_code, made["id"] in other.text) == (404, False)
    assert (await get(world, f"/v1/services/{made['id']}", "vision"))["state"] == "ended"
    assert (await _put(world, "/v1/services", DOCUMENT)).status_code == 201


async def test_requests_are_counted_once(world: ApiWorld) -> None:
    """A repeated report changes nothing; the status shows the last minute."""
    made = (await _put(world, "/v1/services", DOCUMENT)).json()
    assert made["requests"] is None
    second = int(time.time()) - 10
    body = {
        "balancer": "b1",
        "seconds": [
            {"second": second, "requests": 100, "failed": 1, "cut": 2, "p50_s": 0.1, "p99_s": 1.0},
            {"second": second - 1, "requests": 20, "p50_s": 0.4, "p99_s": 1.0},
            {"second": second - 2, "requests": 0},
        ],
    }
    for _ in range(2):
        assert (await act(world, "/v1/services/chat/requests", "vision", body=body)).status_code == 204
    found = (await get(world, "/v1/services/chat", "vision"))["requests"]
    assert (found["per_s"], found["failed"], found["cut"]) == (2.0, 1, 2)
    assert found["p50_s"] == pytest.approx(0.15)
    with world.session() as session:
        assert len(session.scalars(select(ServiceRequests)).all()) == 3


async def test_requests_by_minute(world: ApiWorld) -> None:
    """Lists whole minutes, summed over balancers. The current minute and those without a report are left out."""
    await _put(world, "/v1/services", DOCUMENT)
    minute = (int(time.time()) - 15) // 60
    for balancer in ("b1", "b2"):
        seconds = [
            {"second": 60 * (minute - 3) + 1, "requests": 90, "failed": 6, "cut": 3, "p50_s": 0.1, "p99_s": 2.0},
            {"second": 60 * (minute - 3) + 59, "requests": 30, "p50_s": 0.5, "p99_s": 2.0},
            {"second": 60 * (minute - 1), "requests": 0},
            {"second": 60 * minute, "requests": 60, "p50_s": 0.1, "p99_s": 2.0},
        ]
        body = {"balancer": balancer, "seconds": seconds}
        assert (await act(world, "/v1/services/chat/requests", "vision", body=body)).status_code == 204
    first, last = (await get(world, "/v1/services/chat/traffic", "vision", minutes=5))["items"]
    assert datetime.fromisoformat(first["at"]).timestamp() == 60 * (minute - 3)
    assert (first["per_s"], first["failed_per_s"], first["p99_s"]) == (4.0, pytest.approx(0.3), 2.0)
    assert first["p50_s"] == pytest.approx(0.2)
    assert (last["per_s"], last["failed_per_s"], last["p50_s"]) == (0.0, 0.0, None)
    assert len((await get(world, "/v1/services/chat/traffic", "vision", minutes=2))["items"]) == 1
    refused = await act(world, "/v1/services/chat/traffic?minutes=0", "vision", method="GET")
    assert refused.status_code == 422 and "minutes" in refused.text


async def test_a_balancer_reports_which_replicas_it_ejects(world: ApiWorld) -> None:
    """The service decides when the ejected replicas change, and not at each report."""
    made = (await _put(world, "/v1/services", DOCUMENT)).json()
    body: dict[str, Any] = {"balancer": "b1", "seconds": [{"second": int(time.time()) - 10, "requests": 1}]}
    for ejected_s in (None, 1.5, 2.5, None):
        why = None if ejected_s is None else "the last 3 requests failed"
        one = {"replica": 1, "ongoing": 2, "drained": False, "ejected_s": ejected_s, "why": why}
        answer = await act(
            world, "/v1/services/chat/requests", "vision", body={**body, "now": {"replicas": [one]}}
        )  # fmt: skip
        assert answer.status_code == 204, answer.text
    with world.session() as session:
        assert session.get_one(BalancerReport, (made["id"], "b1")).replicas == [one]
        mails = session.scalars(select(Outbox.body["service"].astext).where(Outbox.kind == "service")).all()
        assert mails == [made["id"]] * 3  # Of its creation, of the ejection, and of its end.


@pytest.mark.parametrize(
    ("second", "path"),
    [
        ({"second": 1 << 35, "requests": 1}, "seconds[0].second"),
        ({"second": 10, "requests": 1, "p50_s": -1}, "seconds[0].p50_s"),
        ({"second": 10, "requests": -1}, "seconds[0].requests"),
        ({"second": 10.5, "requests": 1}, "seconds[0].second"),
    ],
)
async def test_bad_counts_are_refused(world: ApiWorld, second: dict[str, Any], path: str) -> None:
    """The error names the second, and nothing of the report is stored."""
    await _put(world, "/v1/services", DOCUMENT)
    body = {"balancer": "b1", "seconds": [second]}
    answer = await act(world, "/v1/services/chat/requests", "vision", body=body)
    assert (answer.status_code, answer.json()["errors"][0]["path"]) == (422, path)
    with world.session() as session:
        assert session.scalars(select(ServiceRequests)).all() == []


async def test_ids_of_other_tenants_are_masked(world: ApiWorld) -> None:
    """A tenant sees that its replica was evicted, but not by which workload of another tenant."""
    made = (await _put(world, "/v1/services", DOCUMENT)).json()
    other = world.add_workload(Phase.RUNNING, tenant="speech")
    reason = Reason(ReasonCode.EVICTED, {"evictor": other, "evictor_rank": 1, "rank": 3})
    evicted = world.add_workload(Phase.FAILED, reason=reason.to_json())
    with world.session() as session:
        session.add(
            ServiceReplica(service=made["id"], number=0, version=1, workload=evicted, kind="spot", is_base=True)
        )
    for path in ("/v1/services/chat", "/v1/services/chat/replicas"):
        shown = str(await get(world, path, "vision"))
        assert evicted in shown and "evicted" in shown and other not in shown
        assert other in str(await get(world, f"/v1/services/{made['id']}{path.partition('chat')[2]}"))


@pytest.mark.parametrize("note", ["replicas_fail", "update_given_up"])
async def test_a_note_of_failures_says_why_the_newest_replica_failed(world: ApiWorld, note: str) -> None:
    """The sentence names the replica and the reason of its end, without the ids of other tenants' workloads."""
    made = (await _put(world, "/v1/services", DOCUMENT)).json()
    other = world.add_workload(Phase.RUNNING, tenant="speech")
    ends = [("failed", "not this"), ("failed", f"port 80 is reserved for {other}.1"), ("preempted", "nor this")]
    with world.session() as session:
        for number, (cause, says) in enumerate(ends):
            reason = {"code": "launch_failed", "detail": {}, "sentence": says}
            workload = world.add_workload(Phase.FAILED, reason=reason)
            replica = ServiceReplica(
                service=made["id"], number=number, version=1, workload=workload, kind="spot", is_base=True, cause=cause
            )
            session.add(replica)
        session.get_one(ServiceRow, made["id"]).notes = [note, "no_spot_zones"]
    first, second = (await get(world, "/v1/services/chat", "vision"))["notes"]
    assert first["code"] == note
    assert first["sentence"].endswith("; replica 1: port 80 is reserved for a workload of another tenant.1")
    assert "replica" not in second["sentence"]


_UPDATE = {"canary": "10%", "for": "10m", "abort_if": {"error_rate": "1%", "p90_ms": 500}}


async def test_the_answers_of_a_canary_are_stored_and_its_end_is_shown(world: ApiWorld) -> None:
    """Counts of other versions, and from before the canary began, do not count. A blue-green update has no canary."""
    document = {**DOCUMENT, "service": {**DOCUMENT["service"], "update": _UPDATE}}
    made = (await _put(world, "/v1/services", document)).json()
    refused = await _put(world, "/v1/services/chat?mode=blue_green", {**document, "run": "new"}, method="PUT")
    assert (refused.status_code, refused.json()["errors"][0]["path"]) == (422, "mode")
    began = int(time.time()) - 20
    counts = {"answered": 8, "failed": 2, "slow": 1, "others_answered": 90, "others_failed": 3}
    seconds = [
        {"second": began + after, "requests": 1, "canary": {**counts, "version": version}}
        for after, version in ((-1, 2), (0, 2), (1, 2), (2, 1))
    ]
    for balancer in ("b1", "b2", "b2"):
        body = {"balancer": balancer, "seconds": [*seconds, {"second": began + 3, "requests": 1}]}
        assert (await act(world, "/v1/services/chat/requests", "vision", body=body)).status_code == 204
    canary = CanaryState(2, since_s=began + 0.5)
    with world.session() as session:
        found = canary_answers(session, made["id"], canary)
        assert asdict(found) == {name: 4 * count for name, count in counts.items()}
        assert canary_answers(session, made["id"], CanaryState(2)) == CanaryAnswers()
        row = session.get_one(ServiceRow, made["id"])
        row.notes, row.state = ["canary_failed"], {"canary": asdict(replace(canary, why="8 of its 40 answers failed"))}
    [note] = (await get(world, "/v1/services/chat", "vision"))["notes"]
    assert note["sentence"].endswith("the older version serves; 8 of its 40 answers failed")


async def test_a_version_that_continues_a_good_one_is_good(world: ApiWorld) -> None:
    """So the way back from a canary needs no canary; a version that continues the canary's does."""
    document = {**DOCUMENT, "service": {**DOCUMENT["service"], "update": _UPDATE}}
    id_ = (await _put(world, "/v1/services", document)).json()["id"]

    async def good(change: dict[str, Any]) -> int:
        assert (await _put(world, "/v1/services/chat", {**document, **change}, method="PUT")).status_code == 200
        with world.session() as session:
            return int((session.get_one(ServiceRow, id_).state or {})["good_version"])

    with world.session() as session:
        session.add(ServiceReplica(service=id_, number=0, version=1, workload="w-0", kind="spot", is_base=True))
        session.get_one(ServiceRow, id_).state = {"good_version": 1}
    assert await good({"run": "new"}) == 1
    with world.session() as session:
        session.add(ServiceReplica(service=id_, number=1, version=2, workload="w-1", kind="spot", is_base=True))
    assert await good({"run": "new", "service": {**document["service"], "max_queue": 5}}) == 1
    assert await good({}) == 4
