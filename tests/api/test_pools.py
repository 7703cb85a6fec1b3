"""Pools and instances over the API."""

from typing import Any

import pytest
from sqlalchemy import select

from domain.reasons import Reason, ReasonCode
from infra.db.capacity import InstanceRow, PoolRow
from infra.db.logs import Audit, Outbox, Waiting
from infra.db.models import Region
from tests.api.calls import act, get
from tests.api.world import INSTANCE, ApiWorld

PATH = "/v1/pools/north/burst"


async def test_a_pool_is_made_changed_and_removed(world: ApiWorld) -> None:
    """A PUT changes only the given settings and is audited; by default a pool accepts any offer."""
    made = await act(world, PATH, method="PUT", body={"size": 2, "kinds": ["spot"], "max_usd_per_h": 5})
    assert made.status_code == 200
    assert made.json() == {
        "region": "north", "name": "burst", "size": 2, "max_size": None, "idle_s": 600.0, "buffer": 0, "providers": [],
        "zones": [], "kinds": ["spot"], "machine_types": [], "max_usd_per_h": 5.0, "tenants": [],
        "gpus": {},
        "failure_buffer": 0.0, "survives_loss": True, "max_share": 1.0, "instances": {},
        "usd_per_h": 0.0, "reason": None,
    }  # fmt: skip
    changed = (await act(world, PATH, method="PUT", body={"zones": ["za", "zb"], "max_usd_per_h": None})).json()
    assert (changed["size"], changed["zones"], changed["max_usd_per_h"]) == (2, ["za", "zb"], None)
    assert (await get(world, "/v1/pools"))["items"] == (await get(world, "/v1/pools", region="north"))["items"]
    assert (await get(world, "/v1/pools", region="south"))["items"] == []
    assert (await act(world, PATH, method="DELETE")).status_code == 204
    assert (await act(world, PATH, method="DELETE")).status_code == 404
    with world.session() as session:
        assert session.scalars(select(Audit.action).order_by(Audit.id)).all() == ["pool.set", "pool.set", "pool.remove"]


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"size": -1}, "size"),
        ({"size": None}, "size"),
        ({"size": 100_000}, "size"),
        ({"size": 1.5}, "size"),
        ({"size": 2, "max_size": 1}, "max_size"),
        ({"buffer": 1}, "buffer"),
        ({"max_size": 2, "buffer": 3}, "buffer"),
        ({"buffer": None}, "buffer"),
        ({"idle_s": -1}, "idle_s"),
        ({"idle_s": None}, "idle_s"),
        ({"kinds": ["cheap"]}, "kinds[0]"),
        ({"kinds": None}, "kinds"),
        ({"max_usd_per_h": -1}, "max_usd_per_h"),
        ({"zones": [""]}, "zones[0]"),
        ({"tenants": ["vision", "nobody"]}, "tenants[1]"),
        ({"tenants": None}, "tenants"),
        ({"gpus": {"a100": -1}}, "gpus.a100"),
        ({"gpus": None}, "gpus"),
        ({"failure_buffer": 2}, "failure_buffer"),
        ({"survives_loss": None}, "survives_loss"),
        ({"max_share": 0}, "max_share"),
        ({"sise": 1}, "sise"),
    ],
)
async def test_a_bad_pool_changes_nothing(shared_world: ApiWorld, body: dict[str, Any], path: str) -> None:
    """An invalid setting is an error with its field, and creates no pool."""
    answer = await act(shared_world, PATH, method="PUT", body=body)
    assert (answer.status_code, answer.json()["errors"][0]["path"]) == (422, path)
    with shared_world.session() as session:
        assert session.get(PoolRow, ("north", "burst")) is None


@pytest.mark.parametrize(
    ("path", "status"),
    [("/v1/pools/mars/burst", 404), ("/v1/pools/north/Burst", 422), (f"/v1/pools/north/{'b' * 21}", 422)],
)
async def test_a_pool_is_of_a_region_and_has_a_short_name(shared_world: ApiWorld, path: str, status: int) -> None:
    """The region must exist, and the name must be valid and short, because it is a prefix of cluster names."""
    assert (await act(shared_world, path, method="PUT", body={"size": 1})).status_code == status


async def test_instances_are_listed_and_ended(world: ApiWorld) -> None:
    """Live or all instances are listed; ending an instance sends its workflow one message and stores the reason."""
    await act(world, PATH, method="PUT", body={"size": 1})
    world.add_instance()
    world.add_instance("in-0000000000000002", phase="gone")
    (live,) = (await get(world, "/v1/instances", region="north", pool="burst"))["items"]
    assert (live["id"], live["phase"], live["usd_per_h"], live["cpus"]) == (INSTANCE, "ready", 4.0, 16.0)
    assert 0 < live["usd"] < 5
    again = await get(world, f"/v1/instances/{INSTANCE}")
    assert {**live, "usd": 0} == {**again, "usd": 0}
    every = (await get(world, "/v1/instances", gone="true"))["items"]
    assert [one["phase"] for one in every] == ["gone", "ready"]
    first = await get(world, "/v1/instances", gone="true", limit="1")
    rest = await get(world, "/v1/instances", gone="true", cursor=first["next_cursor"])
    assert [one["id"] for page in (first, rest) for one in page["items"]] == [one["id"] for one in every]
    assert (await get(world, "/v1/pools"))["items"][0]["instances"] == {"ready": 1}
    assert (await get(world, "/v1/pools"))["items"][0]["usd_per_h"] == 4.0
    for _ in range(2):
        ended = await act(world, f"/v1/instances/{INSTANCE}/end")
        assert (ended.status_code, ended.json()["ending"]["code"]) == (200, "ended_by_operator")
    with world.session() as session:
        mail = session.scalars(select(Outbox.body).where(Outbox.kind == "instance")).all()
        assert list(mail) == [{"instance": INSTANCE}]
        assert session.get_one(InstanceRow, INSTANCE).phase == "ready"
    assert (await act(world, "/v1/instances/in-0000000000000002/end")).status_code == 409
    assert (await act(world, "/v1/instances/in-9/end")).status_code == 404


async def test_why_says_what_is_on_its_way(world: ApiWorld) -> None:
    """`why` has number, type, zone and expected time of launching machines; other tenants do not see the workload."""
    workload = world.add_workload()
    for number in (2, 3, 4):
        zone = "zb" if number > 3 else "za"
        world.add_instance(f"in-{number:016d}", phase="joining", wanted_by={workload: [1]}, zone=zone)
    world.add_instance("in-0000000000000005", phase="ready", wanted_by={workload: [1]})
    why = await get(world, f"/v1/workloads/{workload}/why")
    found = [(reason["code"], reason["sentence"]) for reason in why["reasons"]]
    assert found[:2] == [
        ("waiting_for_capacity", "launching 2 small in za, expected in 0 seconds"),
        ("waiting_for_capacity", "launching 1 small in zb, expected in 0 seconds"),
    ]
    async with world.client("speech") as client:
        shown = (await client.get("/v1/instances")).text
    assert workload not in shown


async def test_why_says_which_pools_cannot_grow(world: ApiWorld) -> None:
    """`why` has what a provider answered to growing pools that may launch for the workload, and no other pools."""
    workload = world.add_workload()
    lacks = Reason(ReasonCode.NO_HARDWARE, {"region": "north", "job": "main", "needs": "1 task"})
    pools: list[tuple[str, list[str], int | None]] = [
        ("open", [], 4), ("ours", ["vision"], 4), ("theirs", ["speech"], 4), ("fixed", [], None)
    ]  # fmt: skip
    with world.session() as session:
        session.add(Waiting(workload=workload, reasons={"reasons": [lacks.to_json()]}))
        for name, tenants, most in pools:
            detail = {"pool": name, "region": "north", "provider": "p", "words": "401"}
            silent = Reason(ReasonCode.PROVIDER_SILENT, detail).to_json()
            session.add(PoolRow(region="north", name=name, tenants=tenants, max_size=most, reason=silent))
    reasons = (await get(world, f"/v1/workloads/{workload}/why"))["reasons"]
    assert [(r["code"], r["detail"].get("pool")) for r in reasons] == [
        ("no_hardware", None),
        ("provider_silent", "open"),
        ("provider_silent", "ours"),
    ]


async def test_a_region_with_pools_or_instances_stays(world: ApiWorld) -> None:
    """A region with pools or live instances cannot be deleted; the error lists them."""
    with world.session() as session:
        session.add(Region(name="west", bucket_url="file:///west"))
    assert (await act(world, "/v1/pools/west/burst", method="PUT", body={"size": 0})).status_code == 200
    world.add_instance(region="west")
    refused = await act(world, "/v1/regions/west", method="DELETE")
    assert refused.status_code == 409
    assert "pools: burst; instances that have not ended: in-0000000000000001" in refused.json()["detail"]
    assert (await act(world, "/v1/pools/west/burst", method="DELETE")).status_code == 204
    world.end_instance()
    assert (await act(world, "/v1/regions/west", method="DELETE")).status_code == 204


async def test_a_machine_that_was_launched_is_not_removed(world: ApiWorld) -> None:
    """A machine of an instance cannot be deleted, because the instance would still cost money; the error names it."""
    world.add_instance(machine="north/alpha/m1")
    assert (await act(world, "/v1/machines/north/alpha/m1/drain")).status_code == 200
    refused = await act(world, "/v1/machines/north/alpha/m1", method="DELETE")
    assert refused.status_code == 409
    assert f"it belongs to instance {INSTANCE}" in refused.json()["detail"]
