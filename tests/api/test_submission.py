"""Submission: written rows, idempotency, media types and sizes of the body, and dry runs."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from sqlalchemy import func, select

from api import bodies
from domain.spec import WorkloadSpec
from infra.db.logs import Audit, Event, Outbox
from infra.db.models import Idempotency, Workload
from infra.db.tenants import Tenant
from tests.api.world import ApiWorld, as_yaml, document

YAML = {"content-type": "application/yaml"}


def counts(world: ApiWorld) -> dict[str, int]:
    """Returns the number of rows in each table that a submission writes."""
    with world.session() as session:
        kinds = (Workload, Event, Audit, Outbox, Idempotency)
        return {k.__name__: session.scalar(select(func.count()).select_from(k)) or 0 for k in kinds}


async def test_submission_writes_all_that_belongs_to_it(world: ApiWorld) -> None:
    """A submission writes a workload, an event, an audit entry and a message that wakes the scheduler."""
    async with world.client("vision") as client:
        answer = await client.post("/v1/workloads", content=as_yaml(document(priority=5)), headers=YAML)
        assert answer.status_code == 202
        made = answer.json()
        assert answer.headers["location"] == f"/v1/workloads/{made['id']}"
        waits = {"waited_s": made["waited_s"], "eligible_s": made["eligible_s"]}
        waits |= {"never": None, "document_notes": []}
        assert (await client.get(answer.headers["location"])).json() | {
            "never": None,
            "document_notes": [],
        } | waits == made
    assert (made["phase"], made["level"], made["queued"], made["attempt"]) == ("pending", 5, True, 0)
    assert made["reason"]["code"] == "scan_pending"
    assert made["jobs"][0]["resources"] == {
        "gpus": 1, "gpu_types": ["a100", "v100"], "cpus": 1.0, "memory_bytes": 512 << 20,
    }  # fmt: skip
    with world.session() as session:
        row = session.get_one(Workload, made["id"])
        assert WorkloadSpec.model_validate(row.spec).name == "digits"
        assert (row.tenant, row.level, row.submitted_by) == ("vision", 5, "key-vision")
        event = session.scalars(select(Event)).one()
        assert (event.kind, event.workload, event.tenant, event.dedup) == (
            "workload.pending", made["id"], "vision", "submitted",
        )  # fmt: skip
        audit = session.scalars(select(Audit)).one()
        assert (audit.actor, audit.tenant, audit.action, audit.target) == (
            "key-vision", "vision", "workload.submit", made["id"],
        )  # fmt: skip
        mail = session.scalars(select(Outbox).order_by(Outbox.id)).all()
        assert [(m.kind, m.workload) for m in mail] == [("wake", None)], "it has no workflow before an award"


async def test_a_document_keeps_files_within_the_limit(world: ApiWorld) -> None:
    """`keep` is part of the specification; more than the operator's limit is refused, also by a dry run."""
    async with world.client("vision") as client:
        answer = await client.post("/v1/workloads", content=as_yaml(document(keep="7d")), headers=YAML)
        assert (answer.status_code, answer.json()["spec"]["keep"]) == (202, 7 * 86400.0)
        for query in ("", "?dry_run=true"):
            answer = await client.post(f"/v1/workloads{query}", content=as_yaml(document(keep="15d")), headers=YAML)
            assert answer.status_code == 422
            (error,) = answer.json()["errors"]
            assert (error["path"], error["message"]) == (
                "keep", "must be at most 14d, the setting tasks.keep_at_most_s",
            )  # fmt: skip


async def test_refused_submission_changes_nothing(world: ApiWorld) -> None:
    """An invalid document writes no rows, and its Idempotency-Key can be used again."""
    before = counts(world)
    headers = {"idempotency-key": "k"}
    async with world.client("vision") as client:
        assert (await client.post("/v1/workloads", json=document(tables=["no"]), headers=headers)).status_code == 422
        assert counts(world) == before
        assert (await client.post("/v1/workloads", json=document(), headers=headers)).status_code == 202


async def test_without_a_key_each_request_is_a_workload(world: ApiWorld) -> None:
    """Two equal requests without an Idempotency-Key create two workloads."""
    async with world.client() as client:
        answers = [await client.post("/v1/workloads", json=document()) for _ in range(2)]
    assert len({a.json()["id"] for a in answers}) == 2


async def test_same_key_and_body_get_the_same_workload(world: ApiWorld) -> None:
    """A repeated request returns the first workload, even if the document would now be invalid."""
    headers = {"idempotency-key": "once"}
    async with world.client() as client:
        first = await client.post("/v1/workloads", json=document(), headers=headers)
        with world.session() as session:
            session.get_one(Tenant, "vision").level = 6
            session.connection().exec_driver_sql("delete from data_table")
        again = await client.post("/v1/workloads", json=document(), headers=headers)
        assert (again.status_code, again.json()["id"]) == (202, first.json()["id"])
        assert again.headers["location"] == first.headers["location"]
    assert counts(world)["Workload"] == 1


async def test_same_key_for_another_body_is_refused(world: ApiWorld) -> None:
    """An Idempotency-Key that was used for another body is an error."""
    headers = {"idempotency-key": "once"}
    async with world.client() as client:
        await client.post("/v1/workloads", json=document(), headers=headers)
        other = await client.post("/v1/workloads", json=document(name="other"), headers=headers)
    assert (other.status_code, other.json()["type"]) == (422, "urn:mizzen:problem:idempotency-mismatch")
    assert counts(world)["Workload"] == 1


async def test_keys_of_different_callers_do_not_meet(world: ApiWorld) -> None:
    """Idempotency keys are separate for each API key."""
    made = []
    for key in ("operator", "vision"):
        async with world.client(key) as client:
            answer = await client.post("/v1/workloads", json=document(), headers={"idempotency-key": "k"})
            made.append(answer.json()["id"])
    assert made[0] != made[1]


async def test_concurrent_duplicates_make_one_workload(world: ApiWorld) -> None:
    """Concurrent equal requests create one workload, and all of them return it."""
    headers = {"idempotency-key": "race"}
    async with world.client() as client:
        answers = await asyncio.gather(
            *(client.post("/v1/workloads", json=document(), headers=headers) for _ in range(16))
        )
    assert {a.status_code for a in answers} == {202}
    assert len({a.json()["id"] for a in answers}) == 1
    assert counts(world) == {"Workload": 1, "Event": 1, "Audit": 1, "Outbox": 1, "Idempotency": 1}


async def test_concurrent_bodies_under_one_key_make_one_workload(world: ApiWorld) -> None:
    """Of concurrent requests with one key and different bodies, one creates a workload and the others get 422."""
    headers = {"idempotency-key": "race"}
    async with world.client() as client:
        answers = await asyncio.gather(
            *(client.post("/v1/workloads", json=document(name=f"n{i}"), headers=headers) for i in range(8))
        )
    assert sorted(a.status_code for a in answers) == [202] + [422] * 7
    assert counts(world)["Workload"] == 1


@pytest.mark.parametrize("key", ["", "x" * 201, "a\tb", "é"])
async def test_malformed_idempotency_key(shared_world: ApiWorld, key: str) -> None:
    """An Idempotency-Key that is empty, too long or not printable ASCII is an error."""
    async with shared_world.client() as client:
        answer = await client.post("/v1/workloads", json=document(), headers=[(b"idempotency-key", key.encode())])
    assert (answer.status_code, answer.json()["type"]) == (400, "urn:mizzen:problem:malformed-request")


@pytest.mark.parametrize(
    "media",
    ["application/yaml", "application/x-yaml", "text/yaml; charset=utf-8", "application/json", "Application/JSON"],
)
async def test_media_types_that_are_read(shared_world: ApiWorld, media: str) -> None:
    """The usual media types of YAML and JSON are accepted."""
    async with shared_world.client() as client:
        answer = await client.post("/v1/workloads", content=json.dumps(document()), headers={"content-type": media})
    assert answer.status_code == 202


@pytest.mark.parametrize("media", ["text/plain", "application/x-www-form-urlencoded", "", "application/xml", "garbage"])
async def test_media_types_that_are_not(shared_world: ApiWorld, media: str) -> None:
    """Another media type, or none, gets 415."""
    headers = {"content-type": media} if media else {}
    async with shared_world.client() as client:
        answer = await client.post("/v1/workloads", content=json.dumps(document()), headers=headers)
    assert (answer.status_code, answer.json()["type"]) == (415, "urn:mizzen:problem:unsupported-media-type")


@pytest.mark.parametrize("body", [b"", b"\xff\xfe", b"a: [", b"null", b"- 1", b"\x00", b'"\xed\xa0\x80"'])
async def test_bodies_that_are_no_document(shared_world: ApiWorld, body: bytes) -> None:
    """The response to an invalid body is a problem document."""
    async with shared_world.client() as client:
        for media in ("application/yaml", "application/json"):
            answer = await client.post("/v1/workloads", content=body, headers={"content-type": media})
            assert (answer.status_code, answer.json()["type"]) == (422, "urn:mizzen:problem:invalid-document")


async def test_body_over_the_limit_by_its_declared_length(shared_world: ApiWorld) -> None:
    """A body whose declared length is over the limit gets 413."""
    size = shared_world.settings.api.max_body_bytes + 1
    async with shared_world.client() as client:
        answer = await client.post("/v1/workloads", content=b" " * size, headers=YAML)
    assert (answer.status_code, answer.json()["type"]) == (413, "urn:mizzen:problem:too-large")


async def test_body_over_the_limit_while_it_comes(shared_world: ApiWorld) -> None:
    """A body without a declared length gets 413 when it exceeds the limit, and is then not read further."""
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 1 << 16
            yield b" " * (1 << 16)

    async with shared_world.client() as client:
        for method, path, media in (
            ("POST", "/v1/workloads", "application/yaml"),
            ("PUT", "/v1/tenants/x", "application/json"),
        ):
            sent = 0
            answer = await client.request(method, path, content=endless(), headers={"content-type": media})
            assert (answer.status_code, answer.json()["type"]) == (413, "urn:mizzen:problem:too-large")
            assert sent <= shared_world.settings.api.max_body_bytes + bodies._LINGER_BYTES + (1 << 17)


async def test_clients_that_send_first_and_listen_after_get_the_refusal(
    world: ApiWorld, serve: Callable[[ApiWorld], str]
) -> None:
    """A client that sends a whole oversized body gets the 413 response instead of a broken connection."""
    base = serve(world)
    body = b" " * (world.settings.api.max_archive_bytes + (4 << 20))
    headers = world.headers("vision") | {"content-type": "application/gzip"}
    async with httpx.AsyncClient(base_url=base, headers=headers, timeout=60) as client:
        answer = await client.put(f"/v1/archives/{'0' * 64}", content=body)
    assert (answer.status_code, answer.json()["type"]) == (413, "urn:mizzen:problem:too-large")


async def test_stranger_gets_no_body_read(shared_world: ApiWorld) -> None:
    """Without a valid key the body is not read."""

    async def never() -> AsyncIterator[bytes]:
        raise AssertionError("the body was read")
        yield b""

    async with shared_world.client(None) as client:
        answer = await client.post("/v1/workloads", content=never(), headers=YAML)
    assert answer.status_code == 401


async def test_dry_run_without_temporal(shared_world: ApiWorld) -> None:
    """Without Temporal a dry run gets 503; an invalid document gets 422 before that."""
    before = counts(shared_world)
    async with shared_world.client() as client:
        asked = await client.post("/v1/workloads?dry_run=true", json=document())
        wrong = await client.post("/v1/workloads?dry_run=true", json=document(tables=["no"]))
    assert (asked.status_code, asked.json()["type"]) == (503, "urn:mizzen:problem:scheduler-unavailable")
    assert wrong.status_code == 422
    assert counts(shared_world) == before


async def _submit(client: httpx.AsyncClient, **changes: Any) -> dict[str, Any]:
    answer = await client.post("/v1/workloads", json=document(**changes))
    assert answer.status_code == 202, answer.text
    return dict(answer.json())


async def test_ids_sort_by_age(world: ApiWorld) -> None:
    """Later submissions have greater ids, so the order by id is the order by age."""
    async with world.client() as client:
        made = []
        for number in range(5):
            made.append((await _submit(client, name=f"n{number}"))["id"])
            await asyncio.sleep(0.002)
    assert made == sorted(made)
