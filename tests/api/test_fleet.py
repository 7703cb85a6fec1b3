"""Regions, clusters and machines, cordons and drains, tables, replicas and archives over the API."""

import gzip
import hashlib
import io
import tarfile
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select, update

from domain.phases import Phase
from domain.reasons import Reason, ReasonCode
from infra.db.logs import Audit, Event
from infra.db.models import Allocation, Cluster, ClusterPrice, Machine, Region
from infra.db.tenants import Archive
from infra.keys import key_fingerprint
from tests.api.calls import act, get, mail
from tests.api.world import ARCHIVE, ARCHIVE_SHA256, GIB, ApiWorld, archive_of, make_world

M1 = "/v1/machines/north/alpha/m1"


async def test_regions_and_clusters_count_machines_and_slots(world: ApiWorld) -> None:
    """Regions and clusters have the total, held and promised slots of each GPU type, without lost machines."""
    world.add_attempt(world.add_workload(Phase.RUNNING), 1, "north/alpha/m1", 0b111)
    with world.session() as session:
        session.get_one(Machine, "north/alpha/m2").state = "lost"
    north, south = (await get(world, "/v1/regions"))["items"]
    assert (north["name"], north["clusters"]) == ("north", ["alpha"])
    assert north["machines"] == {"ready": 1, "joining": 0, "lost": 1, "cordoned": 0}
    assert north["gpus"] == {"a100": {"total": 8, "held": 3, "promised": 0}}
    assert south["gpus"] == {"v100": {"total": 4, "held": 0, "promised": 0}}
    assert await get(world, "/v1/regions/south") == south
    clusters = (await get(world, "/v1/clusters"))["items"]
    assert [(c["region"], c["name"], c["manager"]) for c in clusters] == [
        ("north", "alpha", "agent"), ("south", "beta", "agent"),
    ]  # fmt: skip
    assert clusters[0]["gpus"] == north["gpus"]
    assert [c["name"] for c in (await get(world, "/v1/clusters", region="south"))["items"]] == ["beta"]


async def test_a_clusters_zone_kind_and_prices(world: ApiWorld) -> None:
    """A PATCH changes only the given settings and is audited; an invalid value is an error with its field."""
    path = "/v1/clusters/north/alpha"
    assert (await get(world, "/v1/clusters", region="north"))["items"][0]["capacity"] == "reserved"
    body: dict[str, Any] = {"zone": "n-1", "capacity": "spot", "prices": {"a100": 1.5, "cpu": 0.04}}
    body |= {"store_url": "s3://building/mizzen", "link_mbit": 240.0}
    set_ = await act(world, path, body=body, method="PATCH")
    assert set_.status_code == 200 and {name: set_.json()[name] for name in body} == body
    for wrong, field in (
        ({"capacity": "stolen"}, "capacity"), ({"capacity": None}, "capacity"), ({"prices": {"a100": -1}}, "prices"),
        ({"prices": None}, "prices"), ({"zone": ""}, "zone"), ({"price": 1}, "price"),
        ({"link_mbit": 0}, "link_mbit"),
        ({"store_url": "s3://"}, "store_url"), ({"store_url": "building"}, "store_url"),
    ):  # fmt: skip
        refused = await act(world, path, body=wrong, method="PATCH")
        assert refused.status_code == 422 and refused.json()["errors"][0]["path"].startswith(field), refused.text
    assert (await act(world, path, body={"zone": None}, method="PATCH")).json()["zone"] is None
    assert (await act(world, path, body=body, key="vision", method="PATCH")).status_code == 403
    assert (await act(world, "/v1/clusters/north/beta", body=body, method="PATCH")).status_code == 404
    with world.session() as session:
        row = session.get_one(Cluster, ("north", "alpha"))
        assert (row.zone, row.capacity, row.prices, row.store_url) == (
            None, "spot", body["prices"], "s3://building/mizzen",
        )  # fmt: skip
        assert [a for a in session.scalars(select(Audit.action)) if a == "cluster.set"] == ["cluster.set"] * 2


async def test_costs_by_tenant_and_day(world: ApiWorld) -> None:
    """Held resources cost the prices of that time. A tenant sees its own costs, and a workload has its costs so far."""
    now = datetime.now(UTC)
    mine, other = world.add_workload(Phase.RUNNING), world.add_workload(Phase.RUNNING, tenant="speech")
    world.add_attempt(mine, 1, "north/alpha/m1", 0b11)
    world.add_attempt(other, 1, "north/alpha/m1", 0b100)
    with world.session() as session:
        session.execute(update(Allocation).values(held_at=now - timedelta(hours=3)))
        since = now - timedelta(hours=1)
        price = {"a100": 2.0, "cpu": 0.05}
        session.add(ClusterPrice(region="north", cluster="alpha", since=since, capacity="spot", prices=price))

    def sums(items: list[dict[str, Any]], resource: str) -> tuple[float, float, float]:
        own = [item for item in items if item["resource"] == resource]
        return sum(i["hours"] for i in own), sum(i["unpriced_h"] for i in own), sum(i["usd"] for i in own)

    everything = (await get(world, "/v1/costs"))["items"]
    assert {item["tenant"] for item in everything} == {"vision", "speech"}
    assert {item["capacity"] for item in everything} == {"spot", "reserved"}
    assert sums(everything, "a100") == pytest.approx((9.0, 6.0, 6.0), rel=0.02)
    own = (await get(world, "/v1/costs", "vision"))["items"]
    assert {item["tenant"] for item in own} == {"vision"}
    assert sums(own, "a100") == pytest.approx((6.0, 4.0, 4.0), rel=0.02)
    assert sums(own, "cpu") == pytest.approx((6.0, 4.0, 0.1), rel=0.02)
    assert {item["tenant"] for item in (await get(world, "/v1/costs", tenant="vision"))["items"]} == {"vision"}
    detail = await get(world, f"/v1/workloads/{mine}", "vision")
    assert (detail["cost_usd"], detail["unpriced_h"]) == pytest.approx((4.1, 8.0), rel=0.02)
    assert (await act(world, "/v1/costs?tenant=speech", key="vision", method="GET")).status_code in (403, 404)
    day = (now + timedelta(days=1)).date().isoformat()
    assert (await get(world, "/v1/costs", **{"from": day, "to": day}))["items"] == []
    for name, value in (
        ("from", day), ("from", "2020-01-01"), ("from", "soon"), ("from", "0001-01-01"), ("to", "9999-12-31"),
    ):  # fmt: skip
        refused = await act(world, f"/v1/costs?{name}={value}", method="GET")
        assert refused.status_code == 422 and refused.json()["errors"][0]["path"] == f"query.{name}"


async def test_machines_by_region_and_page(world: ApiWorld) -> None:
    """Machines are listed by id, can be filtered by region and cluster, and are paged without duplicates."""

    async def ids(**params: Any) -> list[str]:
        return [m["id"] for m in (await get(world, "/v1/machines", **params))["items"]]

    everything = ["north/alpha/m1", "north/alpha/m2", "south/beta/c1", "south/beta/m1"]
    assert await ids() == everything
    assert await ids(region="south") == everything[2:]
    assert await ids(cluster="alpha") == everything[:2]
    assert await ids(region="south", cluster="alpha") == []
    first = await get(world, "/v1/machines", limit=3)
    assert await ids(limit=3, cursor=first["next_cursor"]) == everything[3:]


async def test_machine_view(world: ApiWorld) -> None:
    """A machine has its held slots and its workloads; a tenant sees only its own workloads."""
    mine, other = world.add_workload(Phase.RUNNING), world.add_workload(Phase.RUNNING, tenant="speech")
    world.add_attempt(mine, 1, "north/alpha/m1", 0b101)
    world.add_attempt(other, 1, "north/alpha/m1", 0b10)
    machine = await get(world, M1)
    assert (machine["slots_held"], machine["free_cpus"], machine["free_memory_bytes"]) == ([0, 1, 2], 60.0, 254 * GIB)
    assert (machine["gpu_type"], machine["gpus"], machine["state"], machine["machine"]) == ("a100", 8, "ready", "m1")
    assert machine["workloads"] == [mine, other]
    assert (await get(world, M1, "vision"))["workloads"] == [mine]


async def test_cordon_and_uncordon(world: ApiWorld) -> None:
    """A cordon has its reason and the key that set it; uncordoning also resets the count of failed gangs."""
    cordoned = await act(world, f"{M1}/cordon", body={"reason": "fan is loud"})
    assert cordoned.status_code == 200
    assert cordoned.json()["cordon"] == {
        "code": "cordoned_by_operator", "detail": {"by": "key-operator", "note": "fan is loud"},
        "sentence": "cordoned by key-operator",
    }  # fmt: skip
    with world.session() as session:
        session.get_one(Machine, "north/alpha/m1").failed_gangs = 3
    opened = (await act(world, f"{M1}/uncordon")).json()
    assert (opened["cordon"], opened["failed_gangs"]) == (None, 0)
    assert (await act(world, f"{M1}/cordon")).json()["cordon"]["detail"] == {"by": "key-operator"}
    with world.session() as session:
        kinds = session.scalars(select(Event.kind).order_by(Event.id)).all()
        audit = session.scalars(select(Audit.action).order_by(Audit.id)).all()
    assert kinds == ["machine.cordoned", "machine.uncordoned", "machine.cordoned"]
    assert audit == ["machine.cordon", "machine.uncordon", "machine.cordon"]


async def test_drain_preempts_what_runs_there(world: ApiWorld) -> None:
    """A drain cordons the machine and preempts the workloads that hold slots of it."""
    here, elsewhere, gone = (world.add_workload(Phase.RUNNING) for _ in range(3))
    world.add_attempt(here, 2, "north/alpha/m1", 0b1)
    world.add_attempt(elsewhere, 1, "north/alpha/m2", 0b1)
    world.add_attempt(gone, 1, "north/alpha/m1", 0b10, released_at="2026-01-01T00:00:00Z")
    drained = await act(world, f"{M1}/drain", body={})
    assert (drained.status_code, drained.json()["draining"]) == (200, True)
    assert drained.json()["cordon"]["code"] == "cordoned_by_operator"
    detail = {"machine": "north/alpha/m1", "by": "key-operator", "code": "machine_drained"}
    assert mail(world) == [
        ("mail", here, {"kind": "preempt", "attempt": 2, "detail": detail}),
        ("wake", None, {}),
    ]
    opened = (await act(world, f"{M1}/undrain")).json()
    assert (opened["draining"], opened["cordon"]) == (False, None)


async def test_drain_keeps_the_cordon_that_mizzen_set(world: ApiWorld) -> None:
    """Undraining keeps a cordon that mizzen set because the machine kept failing gangs."""
    reason = Reason(ReasonCode.KEEPS_FAILING_GANGS, {"failures": 3, "workload": "wl-x"}).to_json()
    with world.session() as session:
        session.get_one(Machine, "north/alpha/m1").cordon = reason
    await act(world, f"{M1}/drain")
    assert (await act(world, f"{M1}/undrain")).json()["cordon"]["code"] == "keeps_failing_gangs"


async def test_an_operator_trusts_a_machines_new_key(world: ApiWorld) -> None:
    """`trust` accepts only the key that the machine offers, checks a given fingerprint, and is audited."""
    assert (await act(world, f"{M1}/trust")).status_code == 409
    with world.session() as session:
        machine = session.get_one(Machine, "north/alpha/m1")
        machine.offered_key = "new"
        machine.cordon = Reason(ReasonCode.KEY_NOT_TRUSTED, {}).to_json()
    wrong = await act(world, f"{M1}/trust", body={"key": "0" * 16})
    assert (wrong.status_code, key_fingerprint("new") in wrong.json()["detail"]) == (409, True)
    done = await act(world, f"{M1}/trust", body={"key": key_fingerprint("new")})
    assert (done.status_code, done.json()["key"], done.json()["offered_key"]) == (200, key_fingerprint("new"), None)
    assert done.json()["cordon"] is None
    with world.session() as session:
        assert session.get_one(Machine, "north/alpha/m1").public_key == "new"
        assert "machine.trust" in session.scalars(select(Audit.action)).all()


@pytest.mark.parametrize("action", ["cordon", "uncordon", "drain", "undrain", "trust"])
async def test_unknown_machines(shared_world: ApiWorld, action: str) -> None:
    """Actions on a machine that does not exist return 404."""
    for name in ("north/alpha/m9", "north/m1/alpha", "%2e%2e/a/b"):
        assert (await act(shared_world, f"/v1/machines/{name}/{action}")).status_code == 404


async def test_table_is_registered_from_its_objects(world: ApiWorld) -> None:
    """A new table has the size of its objects and a ready replica in its home region."""
    world.buckets["south"].put("tables/words/a", b"123")
    world.buckets["south"].put("tables/words/b/c", b"4567")
    world.buckets["south"].put("tables/words2/a", b"not of it")
    made = await act(world, "/v1/tables", body={"name": "words", "home_region": "south"})
    assert (made.status_code, made.headers["location"]) == (201, "/v1/tables/words")
    assert made.json()["size_bytes"] == 7
    assert [(r["region"], r["state"], r["done_bytes"], r["total_bytes"]) for r in made.json()["replicas"]] == [
        ("south", "ready", 7, 7)
    ]
    assert await get(world, "/v1/tables/words") == made.json()
    assert [t["name"] for t in (await get(world, "/v1/tables"))["items"]] == ["digits", "words"]
    again = await act(world, "/v1/tables", body={"name": "words", "home_region": "south"})
    assert (again.status_code, again.json()["type"]) == (409, "urn:mizzen:problem:conflict")


async def test_table_without_objects_is_refused(world: ApiWorld) -> None:
    """A table without objects in its home bucket is an error that names the prefix."""
    empty = await act(world, "/v1/tables", body={"name": "nothing", "home_region": "south"})
    assert empty.status_code == 422
    assert "tables/nothing/" in empty.json()["errors"][0]["message"]
    nowhere = await act(world, "/v1/tables", body={"name": "digits2", "home_region": "mars"})
    assert nowhere.json()["errors"][0]["path"] == "home_region"


async def test_bucket_that_does_not_answer(world: ApiWorld) -> None:
    """If the bucket cannot be read, the response is 503."""
    with world.session() as session:
        session.get_one(Region, "south").bucket_url = "file:///proc/1/nothing-here"
    world.app.state.mizzen.store.cache_clear()

    def broken(url: str) -> Any:
        raise PermissionError(url)

    world.app.state.mizzen.store = broken
    answer = await act(world, "/v1/tables", body={"name": "words", "home_region": "south"})
    assert (answer.status_code, answer.json()["type"]) == (503, "urn:mizzen:problem:storage-unavailable")


async def test_replica_is_asked_for_once(world: ApiWorld) -> None:
    """A requested replica is copied from the home region; a repeated request changes nothing."""
    for _ in range(2):
        copy = await act(world, "/v1/tables/digits/replicas", body={"region": "south"})
        assert (copy.status_code, copy.json()["state"], copy.json()["source_region"]) == (202, "copying", "north")
    ready = await act(world, "/v1/tables/digits/replicas", body={"region": "north"})
    assert ready.json()["state"] == "ready"
    asked = {"table": "digits", "source": "north", "target": "south", "share": "on demand"}
    assert mail(world) == [("replicate", None, asked)]
    replicas = (await get(world, "/v1/tables/digits/replicas"))["items"]
    assert [(r["region"], r["state"]) for r in replicas] == [("north", "ready"), ("south", "copying")]
    assert (await act(world, "/v1/tables/digits/replicas", body={"region": "mars"})).status_code == 422
    assert (await act(world, "/v1/tables/nothing/replicas", body={"region": "south"})).status_code == 404


async def test_table_that_is_read_stays(world: ApiWorld) -> None:
    """A table can be deleted only if no live workload reads it."""
    id_ = world.add_workload(Phase.PENDING, tables=("digits",))
    world.add_workload(Phase.SUCCEEDED, tables=("digits",))
    assert (await act(world, "/v1/tables/digits", method="DELETE")).status_code == 409
    world.set_phase(id_, Phase.CANCELLED)
    assert (await act(world, "/v1/tables/digits", method="DELETE")).status_code == 204
    assert (await act(world, "/v1/tables/digits", method="DELETE")).status_code == 404
    assert (await get(world, "/v1/tables"))["items"] == []
    assert world.buckets["north"].get("tables/digits/a.bin") == b"12345"


async def _put(world: ApiWorld, body: bytes, sha256: str | None = None, key: str = "vision", query: str = "") -> Any:
    digest = sha256 or hashlib.sha256(body).hexdigest()
    async with world.client(key) as client:
        headers = {"content-type": "application/gzip"}
        return await client.put(f"/v1/archives/{digest}{query}", content=body, headers=headers)


async def test_archive_is_kept_for_its_tenant(world: ApiWorld) -> None:
    """An archive is stored once, by checksum, for its tenant."""
    body = archive_of({"a.py": "1", "lib/b.py": "2"})
    for _ in range(2):
        answer = await _put(world, body)
        digest = hashlib.sha256(body).hexdigest()
        assert (answer.status_code, answer.json()) == (
            200, {"sha256": digest, "tenant": "vision", "size_bytes": len(body)},
        )  # fmt: skip
    with world.session() as session:
        assert session.get_one(Archive, ("vision", digest)).body == body
        assert session.scalars(select(Audit.action)).all() == ["archive.put"]


async def test_archive_of_an_operator_names_its_tenant(world: ApiWorld) -> None:
    """A key without a tenant must give the tenant of an archive."""
    assert (await _put(world, ARCHIVE, key="operator")).status_code == 422
    assert (await _put(world, ARCHIVE, key="operator", query="?tenant=nobody")).status_code == 404
    assert (await _put(world, ARCHIVE, key="operator", query="?tenant=speech")).status_code == 200
    assert (await _put(world, ARCHIVE, key="speech", query="?tenant=vision")).status_code == 404
    async with world.client("operator") as client:
        assert (await client.head(f"/v1/archives/{ARCHIVE_SHA256}?tenant=speech")).status_code == 200


def _tar(*members: tarfile.TarInfo) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for member in members:
            tar.addfile(member, io.BytesIO(b"x" * member.size))
    return out.getvalue()


def _member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


BAD_ARCHIVES: dict[str, tuple[Callable[[], bytes], str]] = {
    "no gzip": (lambda: b"hello", "not a tar.gz"),
    "nothing": (lambda: b"", "not a tar.gz"),
    "no tar": (lambda: gzip.compress(b"hello" * 1000), "not a tar.gz"),
    "cut off": (lambda: ARCHIVE[: len(ARCHIVE) // 2], "not a tar.gz"),
    "absolute path": (lambda: _tar(_member("/etc/passwd")), "leads out"),
    "path upwards": (lambda: _tar(_member("a/../../b")), "leads out"),
    "folder upwards": (lambda: _tar(_member("..", tarfile.DIRTYPE)), "leads out"),
    "symbolic link": (lambda: _tar(_member("a", tarfile.SYMTYPE, "/etc/passwd")), "must lead to a path in the"),
    "hard link": (lambda: _tar(_member("a", tarfile.LNKTYPE, "b")), "not hard links, devices"),
    "device": (lambda: _tar(_member("a", tarfile.CHRTYPE)), "not hard links, devices"),
    "too many members": (lambda: _tar(*(_member(f"f{i}") for i in range(20_001))), "more than 20000"),
}


@pytest.mark.parametrize(("made", "message"), BAD_ARCHIVES.values(), ids=BAD_ARCHIVES)
async def test_bad_archives(shared_world: ApiWorld, made: Callable[[], bytes], message: str) -> None:
    """Archives that an agent would refuse to unpack are errors at the upload."""
    answer = await _put(shared_world, made())
    assert answer.status_code == 422, answer.text
    assert message in answer.json()["errors"][0]["message"]


@pytest.mark.parametrize(("mebibytes", "status"), [(3, 200), (5, 422)])
async def test_archive_that_unpacks_to_too_much(database_url: str, tmp_path: Path, mebibytes: int, status: int) -> None:
    """A small archive that would unpack to more than the limit is an error."""
    member = _member("zeros")
    member.size = mebibytes << 20
    with make_world(database_url, tmp_path, api={"max_unpacked_bytes": 4 << 20}) as world:
        answer = await _put(world, _tar(member))
    assert (answer.status_code, "content has more" in answer.text) == (status, status == 422)


async def test_archive_with_a_forged_header(shared_world: ApiWorld) -> None:
    """An archive whose header declares 8 GiB is an error; the memory is not allocated."""
    forged = tarfile.TarInfo("a")
    forged.type, forged.size = tarfile.XHDTYPE, 1 << 33
    answer = await _put(shared_world, gzip.compress(forged.tobuf(tarfile.GNU_FORMAT) + b"\0" * 1024))
    assert answer.status_code == 422


async def test_archive_that_is_another_one(shared_world: ApiWorld) -> None:
    """The checksum in the URL must be valid and match the body."""
    other = await _put(shared_world, ARCHIVE, "0" * 64)
    assert (other.status_code, other.json()["errors"][0]["path"]) == (422, "path.sha256")
    for digest in ("abc", "A" * 64, "0" * 63 + "g"):
        assert (await _put(shared_world, ARCHIVE, digest)).status_code == 422


async def test_archive_over_the_limit(shared_world: ApiWorld) -> None:
    """An archive over its size limit gets 413."""
    answer = await _put(shared_world, b"x" * (shared_world.settings.api.max_archive_bytes + 1), "0" * 64)
    assert (answer.status_code, answer.json()["type"]) == (413, "urn:mizzen:problem:too-large")


async def test_settings_of_regions(world: ApiWorld) -> None:
    """A PATCH of a region changes only the given settings, replaces CPU quotas as a whole, and is audited."""
    changed = await act(world, "/v1/regions/north", method="PATCH", body={"storage_bytes": 10**15})
    assert (changed.status_code, changed.json()["storage_bytes"], changed.json()["cpu_hours"]) == (200, 10**15, {})
    changed = await act(world, "/v1/regions/north", method="PATCH", body={"cpu_hours": {"spark": 5000}})
    assert (changed.json()["storage_bytes"], changed.json()["cpu_hours"]) == (10**15, {"spark": 5000})
    assert await get(world, "/v1/regions/north") == changed.json()
    for body, path in (
        ({"storage_bytes": -1}, "storage_bytes"),
        ({"cpu_hours": None}, "cpu_hours"),
        ({"cpu_hours": {"spark": -1}}, "cpu_hours.spark"),
    ):
        answer = await act(world, "/v1/regions/north", method="PATCH", body=body)
        assert (answer.status_code, answer.json()["errors"][0]["path"]) == (422, path)
    assert (await act(world, "/v1/regions/mars", method="PATCH", body={})).status_code == 404
    with world.session() as session:
        assert session.scalars(select(Audit.action)).all() == ["region.set"] * 2
