"""Tenants, quotas, secrets, API keys and the audit list."""

import asyncio
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select, text

from domain.phases import Phase
from infra.db.logs import Audit
from infra.db.models import Workload
from infra.db.tenants import ApiKey, Secret, Tenant
from infra.keys import decrypt_secret, hash_api_key, load_master_key
from tests.api.calls import T0, act, get, mail
from tests.api.world import ARCHIVE_SHA256, ApiWorld, document, make_world

VALUE = "a-very-secret-value"


async def test_tenant_is_made_and_replaced(world: ApiWorld) -> None:
    """A PUT creates a tenant or replaces it as a whole, wakes the scheduler and is audited."""
    body = {"level": 2, "quota": {"gpus": {"a100": 4}, "cpus": 12.5}}
    made = await act(world, "/v1/tenants/robots", body=body, method="PUT")
    assert (made.status_code, made.json()) == (
        200, {"name": "robots", **body, "used": {"gpus": {}, "cpus": 0.0}, "isolation": None},
    )  # fmt: skip
    replaced = await act(world, "/v1/tenants/robots", body={"level": 3}, method="PUT")
    assert replaced.json()["quota"] == {"gpus": {}, "cpus": None}
    with world.session() as session:
        actions = session.scalars(select(Audit.action).order_by(Audit.id)).all()
    assert actions == ["tenant.create", "tenant.change"]
    assert [m[0] for m in mail(world)] == ["wake", "wake"]


async def test_a_second_tenant_needs_separation(database_url: str, tmp_path: Path) -> None:
    """Where tasks cannot be separated, a further tenant is refused with the reason and a remedy; others are changed."""
    with make_world(database_url, tmp_path, api={"one_tenant": "tasks share a user"}) as own:
        refused = await act(own, "/v1/tenants/robots", body={"level": 3}, method="PUT")
        assert refused.status_code == 409
        detail = refused.json()["detail"]
        assert "robots" not in await _tenants(own) and "tasks share a user" in detail and "--trust-tenants" in detail
        changed = await act(own, "/v1/tenants/vision", body={"level": 3}, method="PUT")
        assert changed.status_code == 200


async def _tenants(world: ApiWorld) -> set[str]:
    return {tenant["name"] for tenant in (await get(world, "/v1/tenants"))["items"]}


BAD_TENANTS: list[tuple[str, object, str]] = [
    ("no level", {"quota": {}}, "level"),
    ("level 0", {"level": 0}, "level"),
    ("level 8", {"level": 8}, "level"),
    ("level as text", {"level": "3"}, "level"),
    ("level as boolean", {"level": True}, "level"),
    ("unknown field", {"level": 3, "qouta": {}}, "qouta"),
    ("negative slots", {"level": 3, "quota": {"gpus": {"a100": -1}}}, "quota.gpus.a100"),
    ("half a slot", {"level": 3, "quota": {"gpus": {"a100": 0.5}}}, "quota.gpus.a100"),
    ("slots beyond bounds", {"level": 3, "quota": {"gpus": {"a100": 10**19}}}, "quota.gpus.a100"),
    ("a type without name", {"level": 3, "quota": {"gpus": {"": 1}}}, "quota.gpus.."),
    ("a name with brackets", {"level": 3, "quota": {"gpus": {"a[b": "x"}}}, "quota.gpus.a[b"),
    ("negative CPUs", {"level": 3, "quota": {"cpus": -1}}, "quota.cpus"),
    ("CPUs beyond bounds", {"level": 3, "quota": {"cpus": 1e300}}, "quota.cpus"),
]


@pytest.mark.parametrize(("body", "path"), [b[1:] for b in BAD_TENANTS], ids=[b[0] for b in BAD_TENANTS])
async def test_bad_tenants(shared_world: ApiWorld, body: object, path: str) -> None:
    """An invalid level or quota is an error with its path."""
    answer = await act(shared_world, "/v1/tenants/x", body=body, method="PUT")
    assert answer.status_code == 422, answer.text
    assert answer.json()["errors"][0]["path"].startswith(path)
    with shared_world.session() as session:
        assert session.get(Tenant, "x") is None


@pytest.mark.parametrize("name", ["Robots", "a_b", "-a", "x" * 64, "a%0A", "%20"])
async def test_bad_tenant_names(shared_world: ApiWorld, name: str) -> None:
    """An invalid tenant name is an error."""
    answer = await act(shared_world, f"/v1/tenants/{name}", body={"level": 3}, method="PUT")
    assert (answer.status_code, answer.json()["errors"][0]["path"]) == (422, "path.name")


async def test_use_is_that_of_live_attempts(world: ApiWorld) -> None:
    """The use of a tenant is the GPUs by type and the CPUs of its unreleased attempts."""
    a, b = world.add_workload(Phase.RUNNING), world.add_workload(Phase.RUNNING)
    world.add_attempt(a, 1, "north/alpha/m1", 0b111)
    world.add_attempt(b, 1, "north/alpha/m1", 0b1000, released_at=T0)
    world.add_attempt(b, 2, "south/beta/m1", 0b1)
    tenants = {t["name"]: t for t in (await get(world, "/v1/tenants"))["items"]}
    assert tenants["vision"]["used"] == {"gpus": {"a100": 3, "v100": 1}, "cpus": 4.0}
    assert tenants["vision"]["quota"] == {"gpus": {"a100": 8}, "cpus": 64.0}
    assert tenants["speech"]["used"] == {"gpus": {}, "cpus": 0.0}
    assert [t["name"] for t in (await get(world, "/v1/tenants", "vision"))["items"]] == ["vision"]


async def test_tenant_with_workloads_or_keys_stays(world: ApiWorld) -> None:
    """A tenant with workloads or valid keys cannot be deleted; a deletion also removes its secrets."""
    world.add_workload(Phase.SUCCEEDED, tenant="speech")
    assert (await act(world, "/v1/tenants/speech", method="DELETE")).status_code == 409
    assert (await act(world, "/v1/tenants/vision", method="DELETE")).status_code == 409
    for key in ("vision", "vision-viewer", "vision-balancer"):
        assert (await act(world, f"/v1/keys/key-{key}", method="DELETE")).status_code == 204
    assert (await act(world, "/v1/tenants/vision", method="DELETE")).status_code == 204
    assert (await act(world, "/v1/tenants/vision", method="DELETE")).status_code == 404
    with world.session() as session:
        assert session.scalar(select(func.count()).select_from(Secret)) == 0


async def test_secret_is_written_and_never_read(world: ApiWorld) -> None:
    """A secret's value is in no response of the API, and in the database only encrypted."""
    made = await act(world, "/v1/tenants/vision/secrets/token", "vision", {"value": VALUE}, "PUT")
    assert (made.status_code, made.json()["name"]) == (200, "token")
    assert [s["name"] for s in (await get(world, "/v1/tenants/vision/secrets", "vision"))["items"]] == [
        "hf-token", "token",
    ]  # fmt: skip
    job = {"name": "m", "run": ["true"], "secrets": {"TOKEN": "token"}}
    submitted = await act(world, "/v1/workloads", "vision", document(jobs=[job]))
    paths = ["/v1/audit", "/v1/tenants", "/v1/workloads", f"/v1/workloads/{submitted.json()['id']}", "/metrics",
             "/v1/events?follow=false"]  # fmt: skip
    async with world.client() as client:
        for path in paths:
            assert VALUE not in (await client.get(path)).text
    with world.session() as session:
        box = session.get_one(Secret, ("vision", "token")).box
        assert decrypt_secret(load_master_key(world.settings.master_key_path), box) == VALUE
        for table in session.scalars(text("select tablename from pg_tables where schemaname = 'public'")).all():
            dump = session.scalars(text(f"select t::text from {table} as t")).all()
            assert not any(VALUE in row for row in dump), table


async def test_secret_is_replaced_and_deleted(world: ApiWorld) -> None:
    """A second PUT replaces a secret, and DELETE removes it."""
    path = "/v1/tenants/vision/secrets/hf-token"
    with world.session() as session:
        before = session.get_one(Secret, ("vision", "hf-token")).box
    assert (await act(world, path, "vision", {"value": "new"}, "PUT")).status_code == 200
    with world.session() as session:
        assert session.get_one(Secret, ("vision", "hf-token")).box != before
    assert (await act(world, path, "vision", method="DELETE")).status_code == 204
    assert (await act(world, path, "vision", method="DELETE")).status_code == 404


@pytest.mark.parametrize("value", ["", "xxx\0xxx", "xxx\ud800", "xxx" * 40_000, ["xxx"], {"xxx": 1}, None])
async def test_bad_secrets(shared_world: ApiWorld, value: object) -> None:
    """A value that cannot be an environment variable is an error, and the response does not repeat it."""
    async with shared_world.client("vision") as client:
        answer = await client.put(
            "/v1/tenants/vision/secrets/x",
            content=json.dumps({"value": value}),
            headers={"content-type": "application/json"},
        )
    assert answer.status_code == 422
    assert "xxx" not in answer.text


async def test_secrets_of_a_process_without_master_key(world: ApiWorld) -> None:
    """Without the master key, setting a secret returns 503."""
    world.settings.master_key_path.unlink()
    answer = await act(world, "/v1/tenants/vision/secrets/x", body={"value": VALUE}, method="PUT")
    assert (answer.status_code, answer.json()["type"]) == (503, "urn:mizzen:problem:not-ready")


async def test_new_key_works_once_shown_and_until_revoked(world: ApiWorld) -> None:
    """A key is returned only when it is created, stored as a hash, and invalid after it is revoked."""
    made = await act(world, "/v1/keys", body={"role": "viewer", "tenant": "vision", "label": "dashboard"})
    assert made.status_code == 201
    key = made.json()["key"]
    world.raw_keys["new"] = key
    assert await get(world, "/v1/whoami", "new") == {
        "id": made.json()["id"], "role": "viewer", "tenant": "vision", "machine": None, "label": "dashboard",
        "expires_at": None,
    }  # fmt: skip
    listed = {k["id"]: k for k in (await get(world, "/v1/keys"))["items"]}
    assert "key" not in listed[made.json()["id"]]
    with world.session() as session:
        row = session.get_one(ApiKey, made.json()["id"])
        assert row.sha256 == hash_api_key(key)
    assert (await act(world, f"/v1/keys/{made.json()['id']}", method="DELETE")).status_code == 204
    assert (await act(world, f"/v1/keys/{made.json()['id']}", method="DELETE")).status_code == 204
    async with world.client("new") as client:
        assert (await client.get("/v1/whoami")).status_code == 401
    assert (await get(world, f"/v1/keys/{made.json()['id']}"))["revoked_at"] is not None


async def test_keys_of_a_person_submit_as_one(world: ApiWorld) -> None:
    """The use of workloads counts for the person of the key; the audit log still has the key. Without one, the key is
    the person.
    """
    submitter = {"role": "submitter", "tenant": "vision"}
    for name, more in (("a", {"person": "oidc:alice"}), ("b", {"person": "oidc:alice"}), ("c", {})):
        made = await act(world, "/v1/keys", body=submitter | more)
        assert (made.status_code, made.json()["person"]) == (201, more.get("person"))
        world.raw_keys[name] = made.json()["key"]
        assert (await act(world, "/v1/workloads", name, body=document(name=f"of-{name}"))).status_code == 202
    ids = [(await get(world, "/v1/whoami", name))["id"] for name in "abc"]
    with world.session() as session:
        by = session.scalars(select(Workload.submitted_by).order_by(Workload.name)).all()
        actors = session.scalars(select(Audit.actor).where(Audit.action == "workload.submit").order_by(Audit.id)).all()
    assert by == ["oidc:alice", "oidc:alice", ids[2]]
    assert actors == ids


BAD_KEYS: list[tuple[str, dict[str, Any], str]] = [
    ("no role", {}, "role"),
    ("unknown role", {"role": "root"}, "role"),
    ("submitter without tenant", {"role": "submitter"}, "tenant"),
    ("operator with tenant", {"role": "operator", "tenant": "vision"}, "tenant"),
    ("unknown tenant", {"role": "viewer", "tenant": "nobody"}, "tenant"),
    ("machine without one", {"role": "machine"}, "machine"),
    ("machine with a tenant", {"role": "machine", "machine": "north/alpha/m1", "tenant": "vision"}, "tenant"),
    ("machine that is no id", {"role": "machine", "machine": "m1"}, "machine"),
    ("machine of four names", {"role": "machine", "machine": "north/alpha/m1/m2"}, "machine"),
    ("machine in no region", {"role": "machine", "machine": "west/alpha/m1"}, "machine"),
    ("viewer with a machine", {"role": "viewer", "machine": "north/alpha/m1"}, "machine"),
    ("machine of a person", {"role": "machine", "machine": "north/alpha/m1", "person": "eve"}, "person"),
    ("viewer of a person", {"role": "viewer", "person": "eve"}, "person"),
    ("person without a name", {"role": "operator", "person": ""}, "person"),
    ("label of lines", {"role": "viewer", "label": "a\nb"}, "label"),
    ("label too long", {"role": "viewer", "label": "x" * 300}, "label"),
]


@pytest.mark.parametrize(("body", "path"), [b[1:] for b in BAD_KEYS], ids=[b[0] for b in BAD_KEYS])
async def test_bad_keys(shared_world: ApiWorld, body: object, path: str) -> None:
    """An invalid role, label or tenant, or a role that does not fit the tenant, is an error with the field."""
    answer = await act(shared_world, "/v1/keys", body=body)
    assert (answer.status_code, answer.json()["errors"][0]["path"]) == (422, path)


async def test_the_rule_of_a_name_is_told(world: ApiWorld) -> None:
    """A name or an id of the wrong form is refused with the rule in words, not with a regular expression."""
    answer = await act(world, "/v1/keys", body={"role": "machine", "machine": "north/alpha"})
    assert answer.json()["errors"][0]["message"].startswith("must be REGION/CLUSTER/MACHINE, such as east/a/node-1")
    answer = await act(world, "/v1/tenants/Robots", body={"level": 3}, method="PUT")
    assert answer.json()["errors"][0]["message"].startswith("must be 1 to 63 lower-case letters")


async def test_keys_of_machines(world: ApiWorld) -> None:
    """The key of a machine in a new cluster creates it as voluntary; existing clusters stay as they are."""
    for machine, kind in (("north/campus/pc7", "voluntary"), ("north/alpha/m9", "reserved")):
        made = await act(world, "/v1/keys", body={"role": "machine", "machine": machine})
        assert (made.status_code, made.json()["machine"], made.json()["tenant"]) == (201, machine, None)
        world.raw_keys["new"] = made.json()["key"]
        assert (await get(world, "/v1/whoami", "new"))["machine"] == machine
        clusters = {(c["region"], c["name"]): c["capacity"] for c in (await get(world, "/v1/clusters"))["items"]}
        assert clusters[machine.split("/")[0], machine.split("/")[1]] == kind
    audited = (await get(world, "/v1/audit"))["items"]
    assert {one["detail"].get("machine") for one in audited} >= {"north/campus/pc7", "north/alpha/m9"}


async def test_last_operator_stays(world: ApiWorld) -> None:
    """The last operator key cannot be revoked."""
    assert (await act(world, "/v1/keys/key-operator", method="DELETE")).status_code == 409
    world.raw_keys["second"] = (await act(world, "/v1/keys", body={"role": "operator"})).json()["key"]
    assert (await act(world, "/v1/keys/key-operator", "second", method="DELETE")).status_code == 204


async def test_operator_of_a_tenant_is_none(world: ApiWorld) -> None:
    """A key with a tenant cannot change the fleet, even if the database has the role operator for it."""
    with world.session() as session:
        session.get_one(ApiKey, "key-vision").role = "operator"
    answer = await act(world, "/v1/machines/north/alpha/m1/cordon", "vision")
    assert (answer.status_code, answer.json()["type"]) == (403, "urn:mizzen:problem:forbidden")


async def test_audit_pages_and_tenants(world: ApiWorld) -> None:
    """The audit list is paged, newest first; a key of a tenant sees only the entries of that tenant."""
    for level in range(1, 6):
        await act(world, "/v1/tenants/vision", body={"level": level}, method="PUT")
    await act(world, "/v1/tenants/speech", body={"level": 1}, method="PUT")
    first = await get(world, "/v1/audit", limit=4)
    rest = await get(world, "/v1/audit", limit=4, cursor=first["next_cursor"])
    assert rest["next_cursor"] is None
    items = first["items"] + rest["items"]
    assert [i["id"] for i in items] == sorted((i["id"] for i in items), reverse=True)
    assert [i["target"] for i in items] == ["speech", *["vision"] * 5]
    assert items[0]["actor"] == "key-operator"
    assert items[0]["detail"] == {"level": 1, "quota": {"gpus": {}, "cpus": None}, "isolation": None}
    assert {i["target"] for i in (await get(world, "/v1/audit", "vision"))["items"]} == {"vision"}
    assert len((await get(world, "/v1/audit", "auditor"))["items"]) == 6


async def test_archive_of_a_deleted_tenant_goes(world: ApiWorld) -> None:
    """An archive is visible only to its tenant."""
    async with world.client("speech") as client:
        assert (await client.head(f"/v1/archives/{ARCHIVE_SHA256}")).status_code == 404
    async with world.client("vision") as client:
        assert (await client.head(f"/v1/archives/{ARCHIVE_SHA256}")).status_code == 200


async def test_keys_expire(world: ApiWorld) -> None:
    """A key with a lifetime has an expiry time; a response header warns before it; afterwards the key is refused."""
    async with world.client("operator") as operator:
        made = (await operator.post("/v1/keys", json={"role": "viewer", "expires_in_s": 3600})).json()
        lasting = (await operator.post("/v1/keys", json={"role": "viewer", "expires_in_s": 60 * 86400})).json()
        assert "mizzen-key-expires" not in (await operator.get("/v1/whoami")).headers
        for bad in (0, -1, 1.5, 10**12):
            assert (await operator.post("/v1/keys", json={"role": "viewer", "expires_in_s": bad})).status_code == 422
    async with world.client(None) as client:
        headers = {"Authorization": f"Bearer {made['key']}"}
        answer = await client.get("/v1/whoami", headers=headers)
        assert (answer.status_code, answer.json()["expires_at"]) == (200, made["expires_at"])
        left = datetime.fromisoformat(answer.headers["mizzen-key-expires"]) - datetime.now(UTC)
        assert timedelta(minutes=50) < left <= timedelta(hours=1)
        answer = await client.get("/v1/whoami", headers={"Authorization": f"Bearer {lasting['key']}"})
        assert (answer.status_code, "mizzen-key-expires" in answer.headers) == (200, False)
        with world.session() as session:
            session.connection().exec_driver_sql(
                "update api_key set expires_at = clock_timestamp() where id = %(id)s", {"id": made["id"]}
            )
        answer = await client.get("/v1/whoami", headers=headers)
        assert (answer.status_code, "the API key expired at" in answer.json()["detail"]) == (401, True)
        assert made["key"] not in answer.text


async def test_an_operator_whose_key_expired_is_not_the_last(world: ApiWorld) -> None:
    """The last valid operator key cannot be revoked, even if there are expired ones."""
    async with world.client("operator") as operator:
        other = (await operator.post("/v1/keys", json={"role": "operator", "expires_in_s": 3600})).json()
        with world.session() as session:
            session.connection().exec_driver_sql("update api_key set expires_at = now() where id = %s", (other["id"],))
        assert (await operator.delete("/v1/keys/key-operator")).status_code == 409


async def _audited(world: ApiWorld, expected: int) -> list[dict[str, Any]]:
    """Waits until the audit list has `expected` refusals; returns their entries."""
    async with world.client("operator") as operator:
        while True:
            items = (await operator.get("/v1/audit")).json()["items"]
            found = [i for i in items if i["action"] in ("login.failed", "request.refused")]
            if sum(i["detail"]["count"] for i in found) >= expected:
                return found
            await asyncio.sleep(0.05)


async def test_refusals_and_failed_logins_are_audited(world: ApiWorld) -> None:
    """Failed logins and refused requests are audited with actor, target and count, but without the given key."""
    hidden = world.add_workload(tenant="speech")
    async with world.client(None) as stranger, world.client("vision") as vision, world.client("operator") as operator:
        revoked = (await operator.post("/v1/keys", json={"role": "viewer", "tenant": "vision"})).json()
        await operator.delete(f"/v1/keys/{revoked['id']}")
        for key in ("mzn_guess_1", "mzn_guess_2", revoked["key"]):
            await stranger.get("/v1/whoami", headers={"Authorization": f"Bearer {key}"})
        await stranger.get("/v1/workloads/secret-path")
        for _ in range(3):
            assert (await vision.get("/v1/keys")).status_code == 403
        assert (await vision.get(f"/v1/workloads/{hidden}")).status_code == 404
        assert (await vision.get("/v1/workloads/wl-none")).status_code == 404
        found = await _audited(world, 8)
        counted = {(i["action"], i["actor"], i["target"], i["tenant"], i["detail"]["count"]) for i in found}
        assert counted == {
            ("login.failed", "unknown", "/v1", None, 2),
            ("login.failed", "unknown", "/v1", None, 1),
            ("login.failed", revoked["id"], "/v1", "vision", 1),
            ("request.refused", "key-vision", "GET /v1/keys", "vision", 3),
            ("request.refused", "key-vision", "GET /v1/workloads/{id}", None, 1),
        }
        assert {i["detail"].get("why") for i in found} == {"unknown key", "revoked key", "no key", None}
        assert not any(text in json.dumps(found) for text in ("guess", revoked["key"], "secret-path"))
        own = [i["target"] for i in (await vision.get("/v1/audit")).json()["items"]]
        assert "GET /v1/workloads/{id}" not in own


async def test_an_attacker_does_not_fill_the_audit_list(database_url: str, tmp_path: Path) -> None:
    """The number of audit entries of refusals is limited; the sum of their counts is the number of refusals."""
    with make_world(database_url, tmp_path, api={"audited_refusals": 3}) as world:
        async with world.client("vision") as client:
            for path in ("keys", "snapshot", "keys/a", "keys/b", "tetris/instance", "keys"):
                answer = await client.get(f"/v1/{path}")
                assert answer.status_code == 403, path
            for number in range(200):
                headers = {"Authorization": f"Bearer mzn_{number}"}
                await client.get(f"/v1/{number}", headers=headers)
        found = await _audited(world, 206)
        assert len(found) == 4
        assert next(i["detail"]["count"] for i in found if i["target"] == "others") == 201
