"""Pages of lists: each item exactly once and in order, for any page size."""

from collections.abc import Callable

import pytest

from domain.phases import Phase
from infra.db.models import Cluster, Region
from infra.db.services import ServiceRow
from infra.db.tenants import Secret, Tenant
from mizzen_client import Client
from tests.api.calls import T0, walk
from tests.api.world import ApiWorld


@pytest.mark.parametrize(
    "path",
    [
        "/v1/keys",
        "/v1/tenants",
        "/v1/regions",
        "/v1/clusters",
        "/v1/tenants/vision/secrets",
    ],
)
async def test_lists_are_paged(world: ApiWorld, path: str) -> None:
    """Pages of one and of two items have together the same items as a single page."""
    with world.session() as session:
        session.add_all(Tenant(name=f"more-{n}", level=3, quota_gpus={}) for n in range(3))
        session.add_all(Region(name=f"more-{n}", bucket_url="file:///nowhere") for n in range(3))
        session.flush()
        # The order is by region, then name. An order by the joined text would differ, because "-" is before "/".
        session.add_all(Cluster(region=r, name=f"c-{n}") for r in ("more-1", "north") for n in range(4))
        session.add_all(Secret(tenant="vision", name=f"more-{n}", box=b"x") for n in range(3))
    whole, pages = await walk(world, path, 500)
    assert pages == 1 and len(whole) > 3
    assert await walk(world, path, 1) == (whole, len(whole))
    assert await walk(world, path, 2) == (whole, -(-len(whole) // 2))
    async with world.client("operator") as client:
        assert (await client.get(path, params={"limit": 501})).status_code == 422


@pytest.mark.parametrize("what", ["attempts", "allocations"])
async def test_what_a_workload_had_is_paged(world: ApiWorld, what: str) -> None:
    """Attempts and allocations of a workload are paged, with the same items as on a single page."""
    id_ = world.add_workload(Phase.RUNNING)
    for number in range(1, 4):
        world.add_attempt(id_, number, "north/alpha/m1", 0b11, released_at=T0)
    path = f"/v1/workloads/{id_}/{what}"
    whole, pages = await walk(world, path, 500)
    assert (pages, len(whole)) == (1, 3)
    assert await walk(world, path, 1) == (whole, 3)
    assert await walk(world, path, 2) == (whole, 2)


async def test_pages_keep_their_filter(world: ApiWorld) -> None:
    """All pages of a filtered list have only items that match the filter."""
    with world.session() as session:
        session.add_all(Cluster(region="north", name=f"c-{n}") for n in range(4))
    whole, _ = await walk(world, "/v1/clusters", 500, region="north")
    assert len(whole) == 5
    assert await walk(world, "/v1/clusters", 2, region="north") == (whole, 3)


def test_the_client_follows_pages(world: ApiWorld, serve: Callable[[ApiWorld], str]) -> None:
    """The client returns all clusters, secrets and services, also if there are more than fit on a page."""
    with world.session() as session:
        session.add_all(Cluster(region="south", name=f"c-{n:04}") for n in range(600))
        session.add_all(Secret(tenant="vision", name=f"more-{n:04}", box=b"x") for n in range(600))
        session.add_all(ServiceRow(id=f"sv-{n:04}", tenant="vision", name=f"more-{n:04}") for n in range(600))
    with Client(serve(world), world.raw_keys["operator"]) as client:
        assert len(client.clusters("south")) == 601
        assert len(set(client.secrets("vision"))) == 601
        assert len({one["id"] for one in client.services()}) == 600
