"""Tables, partitions, replicas, datacenters, usage records and Tetris instances over the API."""

from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import select, text

from domain.instance import Reads, TetrisInstance
from infra.config.data import CopySettings
from infra.copies.manifest import checksummed, declared_checksum, listed, unpack
from infra.db.logs import Audit, UsageRun
from infra.db.models import Region
from infra.db.tables import Partition, PartitionManifest, Replica, ReplicaPartition, Table
from tests.api.calls import act, get, mail
from tests.api.world import ApiWorld, document
from tetris.documents import read_instance, read_reads

CLICKS = "/v1/tables/ads.clicks"
SHA = "sha256:" + "ab" * 32


def _put(world: ApiWorld, region: str, *keys: str, size: int = 10) -> None:
    for key in keys:
        world.buckets[region].put(f"tables/ads.clicks/{key}", bytes(size))


async def _clicks(world: ApiWorld) -> Any:
    """Registers a table with two partitions and its home in region north; returns the response."""
    _put(world, "north", "ds=1/a", "ds=1/b", "ds=2/x/c")
    made = await act(world, "/v1/tables", body={"name": "ads.clicks", "home_region": "north"})
    assert made.status_code == 201, made.text
    return made.json()


def _stale(world: ApiWorld) -> None:
    """Adds a ready replica of the table in region south."""
    with world.session() as session:
        session.add(Replica(data_table="ads.clicks", region="south", state="ready"))


async def _append(world: ApiWorld, *partitions: dict[str, Any]) -> Any:
    return await act(world, f"{CLICKS}/partitions", body={"partitions": list(partitions)})


def _errors(answer: Any) -> list[tuple[str, str]]:
    return [(e["path"], e["message"]) for e in answer.json()["errors"]]


async def test_folders_are_partitions(world: ApiWorld) -> None:
    """If all objects of a table are in folders, each folder is a partition. The part before the dot is a namespace."""
    made = await _clicks(world)
    assert (made["name"], made["namespace"], made["size_bytes"]) == ("ads.clicks", "ads", 30)
    found = await get(world, f"{CLICKS}/partitions")
    assert [(p["name"], p["location"], p["size_bytes"], p["checksum"]) for p in found["items"]] == [
        ("ds=1", "tables/ads.clicks/ds=1/", 20, None), ("ds=2", "tables/ads.clicks/ds=2/", 10, None),
    ]  # fmt: skip
    assert [(r["partitions"], r["whole"], r["stale_since"]) for r in made["replicas"]] == [(2, True, None)]
    page = await get(world, f"{CLICKS}/partitions", limit=1)
    assert [p["name"] for p in page["items"]] == ["ds=1"]
    page = await get(world, f"{CLICKS}/partitions", limit=1, cursor=page["next_cursor"])
    assert ([p["name"] for p in page["items"]], page["next_cursor"]) == (["ds=2"], None)


async def test_tables_come_in_pages_and_by_namespace(world: ApiWorld) -> None:
    """Tables are paged and can be filtered by namespace; a name without a dot is in the namespace `default`."""
    await _clicks(world)
    page = await get(world, "/v1/tables", limit=1)
    assert ([t["name"] for t in page["items"]], page["next_cursor"]) == (["ads.clicks"], "ads.clicks")
    page = await get(world, "/v1/tables", limit=1, cursor=page["next_cursor"])
    assert ([t["name"] for t in page["items"]], page["next_cursor"]) == (["digits"], None)
    assert [t["name"] for t in (await get(world, "/v1/tables", namespace="default"))["items"]] == ["digits"]


async def test_names_that_tables_cannot_have(world: ApiWorld) -> None:
    """An invalid table name is an error with its value; the error for an invalid partition folder has its path."""
    for name in ("default.digits", "a.b.c", ".b", "a.", "A.b"):
        answer = await act(world, "/v1/tables", body={"name": name, "home_region": "north"})
        assert (answer.status_code, answer.json()["errors"][0]["path"]) == (422, "name")
        assert answer.json()["errors"][0]["value"] == name
    _put(world, "north", "ds 1/a")
    answer = await act(world, "/v1/tables", body={"name": "ads.clicks", "home_region": "north"})
    assert "tables/ads.clicks/ds 1/" in answer.json()["errors"][0]["message"]


async def test_partitions_are_appended_once(world: ApiWorld) -> None:
    """An append adds partitions to the table and its home; it is idempotent and makes other replicas stale."""
    await _clicks(world)
    _stale(world)
    _put(world, "north", "ds=3/a", size=7)
    new = {"name": "ds=3", "size_bytes": 7, "checksum": SHA}
    refused = await _append(world, new)
    declared = _declared(world, "ds=3")
    told = f"the objects under tables/ads.clicks/ds=3/ in north have {declared}"
    assert (refused.status_code, _errors(refused)) == (422, [("partitions[0].checksum", told)])
    new["checksum"] = declared
    first, again = await _append(world, new), await _append(world, {"name": "ds=1", "size_bytes": 20}, new)
    assert (first.status_code, again.status_code) == (200, 200)
    assert first.json()["items"][0] == again.json()["items"][1]
    table = await get(world, CLICKS)
    assert table["size_bytes"] == 37
    assert [(r["region"], r["partitions"], r["stale_since"]) for r in table["replicas"]] == [
        ("north", 3, None), ("south", 2, first.json()["items"][0]["created_at"]),
    ]  # fmt: skip
    with world.session() as session:
        assert session.scalars(select(Audit.action).order_by(Audit.id)).all() == ["table.create", "table.append"]


def _declared(world: ApiWorld, day: str) -> str:
    store, folder = world.buckets["north"], f"tables/ads.clicks/{day}/"
    return declared_checksum(checksummed(store, folder, listed(store, folder), "sha256"))


async def test_what_a_table_is_made_of_is_known_from_its_registration_on(world: ApiWorld) -> None:
    """Registration and append store names, sizes and checksums of objects, but no checksums of large partitions."""
    await _clicks(world)
    _put(world, "north", "ds=3/a", size=7)
    state = world.app.state.mizzen
    state.settings = state.settings.model_copy(update={"copies": CopySettings(checksum_at_once_bytes=6)})
    await _append(world, {"name": "ds=3", "size_bytes": 7})
    with world.session() as session:
        rows = session.scalars(select(PartitionManifest).order_by(PartitionManifest.partition)).all()
    known = {row.partition: [(e.path, e.size_bytes, e.checksum is not None) for e in unpack(row.body)] for row in rows}
    assert known["ds=3"] == [("a", 7, False)]
    assert known["ds=1"] and all(there for _, _, there in known["ds=1"])
    assert [row.checksummed_at is not None for row in rows] == [True, True, False]


async def test_a_table_is_verified_when_asked_for(world: ApiWorld) -> None:
    """`verify` schedules a verification of all replicas or of one; a region without a replica returns 404."""
    await _clicks(world)
    _stale(world)
    answer = await act(world, f"{CLICKS}/verify", body={})
    assert (answer.status_code, answer.json()["regions"]) == (202, ["north", "south"])
    answer = await act(world, f"{CLICKS}/verify", body={"region": "south"})
    assert answer.json()["regions"] == ["south"]
    assert [sent for sent in mail(world) if sent[0] == "scrub"][-3:] == [
        ("scrub", None, {"region": region}) for region in ("north", "south", "south")
    ]
    assert (await act(world, f"{CLICKS}/verify", body={"region": "nowhere"})).status_code == 404
    with world.session() as session:
        asked = {r.region: r.verify_asked_at for r in session.scalars(select(Replica)) if r.data_table == "ads.clicks"}
    assert asked["north"] is not None and asked["south"] is not None and asked["south"] > asked["north"]


async def test_partitions_with_other_content_are_a_conflict(world: ApiWorld) -> None:
    """An append that would change an existing partition is a conflict with the existing values; nothing is appended."""
    await _clicks(world)
    _put(world, "north", "ds=3/a")
    answer = await _append(
        world,
        {"name": "ds=3", "size_bytes": 10},
        {"name": "ds=1", "size_bytes": 21},
        {"name": "ds=2", "size_bytes": 10, "checksum": SHA},
    )
    assert (answer.status_code, answer.json()["type"]) == (409, "urn:mizzen:problem:conflict")
    assert _errors(answer) == [
        ("partitions[1].size_bytes", "partition ds=1 exists with 20 and cannot be changed; use another name"),
        ("partitions[2].checksum", "partition ds=2 exists with None and cannot be changed; use another name"),
    ]
    assert (await get(world, CLICKS))["size_bytes"] == 30


async def test_partitions_must_be_at_home_first(world: ApiWorld) -> None:
    """An append of partitions with missing objects or another size is an error that has the prefix and the region."""
    await _clicks(world)
    _put(world, "north", "ds=3/a")
    answer = await _append(world, {"name": "ds=3", "size_bytes": 11}, {"name": "ds=4", "size_bytes": 1})
    assert answer.status_code == 422
    assert _errors(answer) == [
        ("partitions[0].size_bytes", "the objects under tables/ads.clicks/ds=3/ in north have 10 bytes"),
        (
            "partitions[1].name",
            "the bucket of the table's home north has no objects under tables/ads.clicks/ds=4/; put them there first",
        ),
    ]
    twice = await _append(world, *[{"name": "ds=3", "size_bytes": 10}] * 2)
    assert _errors(twice) == [("partitions[1].name", "is given twice")]
    for wrong in ({"name": "../x"}, {"checksum": "md5:00"}, {"size_bytes": -1}):
        assert (await _append(world, {"name": "ds=3", "size_bytes": 10, **wrong})).status_code == 422


async def test_a_table_of_one_partition_stays_one(world: ApiWorld) -> None:
    """A table with objects outside folders has the single partition `all`, and no other can be appended."""
    found = await get(world, "/v1/tables/digits/partitions")
    assert [(p["name"], p["location"]) for p in found["items"]] == [("all", "tables/digits/")]
    world.buckets["north"].put("tables/digits/ds=1/a", b"1")
    body = {"partitions": [{"name": "ds=1", "size_bytes": 1}]}
    answer = await act(world, "/v1/tables/digits/partitions", body=body)
    assert (answer.status_code, "single partition" in answer.json()["detail"]) == (409, True)


async def test_a_stale_replica_is_topped_up(world: ApiWorld) -> None:
    """A request for a stale replica copies its missing partitions, once; it stays ready, and the request is audited."""
    await _clicks(world)
    _stale(world)
    _put(world, "north", "ds=3/a", size=7)
    await _append(world, {"name": "ds=3", "size_bytes": 7})
    for _ in range(2):
        answer = await act(world, f"{CLICKS}/replicas", body={"region": "south"})
        assert (answer.status_code, answer.json()["state"], answer.json()["topping_up"]) == (202, "ready", True)
    assert [kind for kind, _, _ in mail(world)] == ["scrub", "wake", "scrub", "replicate"]
    with world.session() as session:
        assert session.scalars(select(Audit.action).order_by(Audit.id)).all()[-1] == "replica.create"


async def test_a_replica_that_is_deleted_can_be_kept(world: ApiWorld) -> None:
    """A request for a replica that is being deleted keeps it before its deadline, and is a conflict afterwards."""
    await _clicks(world)
    _stale(world)
    for left, status in ((timedelta(hours=1), 202), (timedelta(0), 409)):
        with world.session() as session:
            row = session.get_one(Replica, ("ads.clicks", "south"))
            row.state, row.delete_at = "deleting", datetime.now(UTC) + left
        answer = await act(world, f"{CLICKS}/replicas", body={"region": "south"})
        assert answer.status_code == status
    wakes = [sent for sent in mail(world) if sent[0] != "scrub"]
    assert wakes == [("wake", None, {})] * 2  # one at the registration, one when the replica was kept
    assert "being deleted" in answer.json()["detail"]


async def _drop(world: ApiWorld, region: str, **params: Any) -> Any:
    async with world.client() as client:
        return await client.request("DELETE", f"{CLICKS}/replicas/{region}", params=params)


async def test_a_replica_is_dropped_after_a_grace(world: ApiWorld) -> None:
    """A replica is dropped after a grace period, by default a day; a deadline in the past cannot be extended."""
    await _clicks(world)
    _stale(world)
    for params, at_least, at_most in (({}, 86300, 86401), ({"grace_s": 5}, 0, 6), ({"grace_s": 0}, -60, 0)):
        answer = await _drop(world, "south", **params)
        assert (answer.status_code, answer.json()["state"]) == (202, "deleting")
        left_s = (datetime.fromisoformat(answer.json()["delete_at"]) - datetime.now(UTC)).total_seconds()
        assert at_least <= left_s <= at_most
    over = answer.json()["delete_at"]
    assert (await _drop(world, "south", grace_s=99)).json()["delete_at"] == over
    assert (await act(world, f"{CLICKS}/replicas", body={"region": "south"})).status_code == 409
    with world.session() as session:
        assert session.scalars(select(Audit.action).order_by(Audit.id)).all()[1:] == ["replica.drop"] * 4


async def test_the_home_is_not_dropped(world: ApiWorld) -> None:
    """Dropping the replica in the home region is a conflict; dropping a replica that does not exist returns 404."""
    await _clicks(world)
    answer = await _drop(world, "north")
    assert (answer.status_code, answer.json()["type"]) == (409, "urn:mizzen:problem:conflict")
    assert answer.json()["detail"] == "region north is the home of table ads.clicks, so its replica cannot be dropped"
    assert (await _drop(world, "south")).status_code == 404
    assert (await _drop(world, "north", grace_s=-1)).status_code == 422


async def test_forgetting_a_table_forgets_all_of_it(world: ApiWorld) -> None:
    """Deleting a table also deletes its partitions and replicas."""
    await _clicks(world)
    assert (await act(world, CLICKS, method="DELETE")).status_code == 204
    with world.session() as session:
        for model in (Table, Partition, Replica, ReplicaPartition):
            assert session.scalars(select(text("1")).select_from(model)).all() == [1]  # table `digits`


async def test_workloads_name_tables_of_namespaces(world: ApiWorld) -> None:
    """A document names tables with their namespaces; two tables with the same environment variable are an error."""
    await _clicks(world)
    world.buckets["north"].put("tables/ads--clicks/a", b"1")
    assert (await act(world, "/v1/tables", body={"name": "ads--clicks", "home_region": "north"})).status_code == 201
    made = await act(world, "/v1/workloads", body=document(tables=["digits", "ads.clicks"]))
    assert (made.status_code, made.json()["tables"]) == (202, ["digits", "ads.clicks"])
    assert (await act(world, CLICKS, method="DELETE")).status_code == 409
    wrong = await act(world, "/v1/workloads", body=document(tables=["ads--clicks", "ads.clicks", "default.digits"]))
    assert [path for path, _ in _errors(wrong)] == ["tables[1]", "tables[2]"]
    assert "conflicts with ads--clicks" in _errors(wrong)[0][1]
    for pair in (["digits", "digits-complete-until"], ["digits-complete-until", "digits"]):
        wrong = await act(world, "/v1/workloads", body=document(tables=pair))
        assert ("tables[1]", f"conflicts with {pair[0]}") in [
            (path, told.partition(":")[0]) for path, told in _errors(wrong)
        ]


async def test_clusters_are_in_datacenters(world: ApiWorld) -> None:
    """A datacenter has clusters of its region; a cluster that is assigned to another datacenter moves there."""
    for name, clusters in (("dc1", ["alpha"]), ("dc2", ["alpha"]), ("dc1", [])):
        body = {"storage_bytes": 5, "clusters": clusters}
        answer = await act(world, f"/v1/regions/north/datacenters/{name}", method="PUT", body=body)
        assert answer.status_code == 200, answer.text
    assert answer.json()["datacenters"] == [
        {"name": "dc1", "storage_bytes": 5, "clusters": []},
        {"name": "dc2", "storage_bytes": 5, "clusters": ["alpha"]},
    ]
    wrong = await act(world, "/v1/regions/north/datacenters/dc1", method="PUT", body={"clusters": ["beta"]})
    assert _errors(wrong) == [("clusters[0]", "region north has no such cluster; it has alpha")]


RUN = {
    "source": "spark", "run": "app-1", "job": "daily", "kind": "spark", "tables": ["digits"], "cpu_hours": 12.0,
    "ended_at": "2026-11-22T03:00:00Z",
}  # fmt: skip


async def test_usage_is_recorded_once(world: ApiWorld) -> None:
    """A run is identified by source and id; a repeated record does not change the first one."""
    answers = [
        await act(world, "/v1/usage", body={"runs": [RUN, {**RUN, "run": "app-2", "cpu_hours": 1.0}]}),
        await act(world, "/v1/usage", body={"runs": [{**RUN, "cpu_hours": 99.0}, {**RUN, "run": "app-3"}]}),
    ]
    assert [a.json() for a in answers] == [{"recorded": 2, "known": 0}, {"recorded": 1, "known": 1}]
    with world.session() as session:
        rows = session.scalars(select(UsageRun).order_by(UsageRun.run)).all()
        assert [(r.run, r.cpu_hours, r.app, r.priority, r.gpu_hours) for r in rows] == [
            ("app-1", 12.0, "spark", 7, {}), ("app-2", 1.0, "spark", 7, {}), ("app-3", 12.0, "spark", 7, {}),
        ]  # fmt: skip


async def test_usage_that_is_wrong(world: ApiWorld) -> None:
    """If any run of a request is invalid, none is recorded; the error has the run and the field."""
    for change, path in (
        ({"tables": ["digits", "ads.klicks"]}, "runs[1].tables[1]"),
        ({"tables": ["digits", "digits/ds=1"]}, "runs[1].tables[1]"),
        ({"tables": ["digits", "digits/"]}, "runs[1].tables[1]"),
        ({"kind": "hive"}, "runs[1].kind"),
        ({"source": "mizzen"}, "runs[1]"),
        ({"gpu_hours": 1.0}, "runs[1]"),
        ({"tables": ["digits", "digits"]}, "runs[1]"),
        ({"ended_at": "2026-11-22T03:00:00"}, "runs[1].ended_at"),
        ({"priority": 8}, "runs[1].priority"),
        ({"cpu_hours": -1}, "runs[1].cpu_hours"),
    ):
        answer = await act(world, "/v1/usage", body={"runs": [RUN, {**RUN, "run": "app-2", **change}]})
        assert (answer.status_code, [p for p, _ in _errors(answer)]) == (422, [path])
    with world.session() as session:
        assert session.scalars(select(UsageRun)).all() == []


async def test_the_largest_requests_are_read(world: ApiWorld) -> None:
    """A report of 1,000 runs of 200 tables each, and an assignment of 40,000 partitions, are refused only for names."""
    tables = [f"t{number}" for number in range(200)]
    runs = [{**RUN, "run": f"app-{number}", "tables": tables} for number in range(1000)]
    wrong = [p for p, _ in _errors(await act(world, "/v1/usage", body={"runs": runs}))]
    assert wrong[0] == "runs[0].tables[0]"
    names = [f"ads.clicks/ds={number}" for number in range(40_000)]
    wrong = [p for p, _ in _errors(await _assign(world, dict.fromkeys(names, "north/dc1")))]
    assert wrong[0].startswith("homes.ads.clicks/ds=")


async def test_the_instance_is_exported(world: ApiWorld) -> None:
    """The exported instance can be read by `mizzen tetris`; the export needs the storage of every region."""
    with world.session() as session:
        session.get_one(Region, "south").storage_bytes = None
    answer = await _instance(world)
    assert (answer.status_code, "storage_bytes of region south: is not set" in answer.json()["detail"]) == (409, True)
    with world.session() as session:
        session.get_one(Region, "south").storage_bytes = 2000
    ended = datetime.now(UTC) - timedelta(hours=30)
    assert (await act(world, "/v1/usage", body={"runs": [{**RUN, "ended_at": ended.isoformat()}]})).status_code == 200
    found = read_instance((await _instance(world)).content)
    assert isinstance(found, TetrisInstance)
    assert [(r.name, r.storage_bytes, r.gpu_hours) for r in found.regions] == [
        ("north", 1000.0, {"a100": 384.0}), ("south", 2000.0, {"v100": 96.0}),
    ]  # fmt: skip
    assert [(t.name, t.size_bytes, t.home, t.replicas) for t in found.tables] == [("digits", 5.0, "north", ())]
    assert [(j.name, j.tables, j.cpu_hours, j.weight) for j in found.jobs] == [("spark/daily", ("digits",), 6.0, 0.5)]
    assert [j.name for j in read_instance((await _instance(world, window_days=1)).content).jobs] == []


async def test_partitions_are_assigned_to_datacenters(world: ApiWorld) -> None:
    """A region's instance has partitions and the jobs that read them; assignments are in the next instance."""
    await _clicks(world)
    days = {**RUN, "run": "app-2", "kind": "ml", "job": "train", "tables": ["ads.clicks/ds=1"]}
    ended = (datetime.now(UTC) - timedelta(hours=1)).isoformat()
    usage = {"runs": [{**RUN, "ended_at": ended}, {**days, "ended_at": ended}]}
    assert (await act(world, "/v1/usage", body=usage)).status_code == 200
    assert await get(world, "/v1/tetris/reads") == {
        "version": 1, "partitions": {"ads.clicks/ds=1": 20.0},
        "reads": [{"job": "spark/train", "partitions": ["ads.clicks/ds=1"]}],
    }  # fmt: skip
    assert read_reads((await _get(world, "/v1/tetris/reads", window_days=0.01)).content) == Reads()
    answer = await _instance(world, region="north")
    assert (answer.status_code, "region north has no datacenters" in answer.json()["detail"]) == (409, True)
    assert (await _instance(world, region="mars")).status_code == 404
    for name, clusters in (("dc1", ["alpha"]), ("dc2", [])):
        body = {"storage_bytes": 25, "clusters": clusters}
        await act(world, f"/v1/regions/north/datacenters/{name}", method="PUT", body=body)
    found = read_instance((await _instance(world, region="north")).content)
    assert [(r.name, r.storage_bytes, r.gpu_hours) for r in found.regions] == [
        ("north/dc1", 25.0, {"a100": 384.0}), ("north/dc2", 25.0, {}),
    ]  # fmt: skip
    assert [(t.name, t.home) for t in found.tables] == [
        ("ads.clicks/ds=1", "north/dc1"), ("ads.clicks/ds=2", "north/dc2"), ("digits/all", "north/dc2"),
    ]  # fmt: skip
    assert [(j.name, j.tables) for j in found.jobs] == [
        ("spark/daily", ("digits/all",)), ("spark/train", ("ads.clicks/ds=1",)),
    ]  # fmt: skip
    homes = {"ads.clicks/ds=1": "north/dc2", "digits/all": "north/dc1"}
    for assigned in (2, 0):
        answer = await _assign(world, homes)
        assert (answer.status_code, answer.json()) == (200, {"assigned": assigned, "unchanged": 2 - assigned})
    again = read_instance((await _instance(world, region="north")).content)
    assert {t.name: t.home for t in again.tables} == {**homes, "ads.clicks/ds=2": "north/dc1"}
    with world.session() as session:
        rows = session.scalars(select(Audit).where(Audit.action == "datacenters.assign")).all()
        assert [(row.target, row.detail) for row in rows] == [("north", {"partitions": 2})]


async def test_assignments_that_are_wrong(world: ApiWorld) -> None:
    """An assignment with unknown datacenters or partitions is an error that lists them, and writes nothing."""
    await act(world, "/v1/regions/north/datacenters/dc1", method="PUT", body={"storage_bytes": 25})
    wrong = await _assign(world, {"digits/all": "north/dc1", "digits/ds=1": "north/dc1", "ads/all": "south/dc1"})
    assert _errors(wrong) == [
        ("homes.ads/all", "region south has no datacenter 'dc1'; it has none"),
        ("homes.digits/ds=1", "no ready replica in north has this partition; export the region's instance again"),
    ]
    for homes in ({"digits": "north/dc1"}, {"digits/all": "north"}):
        assert (await _assign(world, homes)).status_code == 422
    with world.session() as session:
        assert session.scalars(select(ReplicaPartition.datacenter)).all() == [None]


async def _assign(world: ApiWorld, homes: dict[str, str]) -> Any:
    return await act(world, "/v1/tetris/datacenters", method="PUT", body={"version": 1, "homes": homes})


async def _instance(world: ApiWorld, **params: Any) -> Any:
    return await _get(world, "/v1/tetris/instance", **params)


async def _get(world: ApiWorld, path: str, **params: Any) -> Any:
    async with world.client() as client:
        return await client.get(path, params=params)


async def test_a_replica_needs_storage(world: ApiWorld) -> None:
    """A replica that exceeds the region's storage is a conflict with the figures, and changes nothing."""
    await _clicks(world)
    with world.session() as session:
        session.get_one(Region, "south").storage_bytes = 29
    before = len(mail(world))
    answer = await act(world, f"{CLICKS}/replicas", body={"region": "south"})
    told = "south would hold 1 byte more than its storage: it stores 0 of 29, and 30 would be added"
    assert (answer.status_code, answer.json()["detail"], len(mail(world))) == (409, told, before)
    assert [r["region"] for r in (await get(world, CLICKS))["replicas"]] == ["north"]
    with world.session() as session:
        session.get_one(Region, "south").storage_bytes = 30
    assert (await act(world, f"{CLICKS}/replicas", body={"region": "south"})).status_code == 202
