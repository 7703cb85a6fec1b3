"""Lists come in pages: each item once, in order, whatever the size of a page."""

import pytest

from domain.phases import Phase
from infra.db.models import Region, Tenant
from tests.api.test_workloads import T0, get
from tests.api.world import World


async def _walk(world: World, path: str, limit: int) -> tuple[list[object], int]:
    """All items by pages of `limit`, and the number of pages."""
    items: list[object] = []
    more: dict[str, str] = {}
    pages = 0
    while True:
        page = await get(world, path, limit=limit, **more)
        assert len(page["items"]) <= limit
        items += page["items"]
        pages += 1
        if page["next_cursor"] is None:
            return items, pages
        more = {"cursor": page["next_cursor"]}


@pytest.mark.parametrize("path", ["/v1/keys", "/v1/tenants", "/v1/regions"])
async def test_lists_are_paged(world: World, path: str) -> None:
    """Pages of one and of two items have together what one page has."""
    with world.session() as session:
        session.add_all(Tenant(name=f"more-{n}", level=3, quota_gpus={}) for n in range(3))
        session.add_all(Region(name=f"more-{n}", bucket_url="file:///nowhere") for n in range(3))
    whole, pages = await _walk(world, path, 500)
    assert pages == 1 and len(whole) > 3
    assert await _walk(world, path, 1) == (whole, len(whole))
    assert await _walk(world, path, 2) == (whole, -(-len(whole) // 2))
    async with world.client("operator") as client:
        assert (await client.get(f"{path}?limit=501")).status_code == 422


@pytest.mark.parametrize("what", ["attempts", "allocations"])
async def test_what_a_workload_had_is_paged(world: World, what: str) -> None:
    """An allocation on a page of its own has its tasks."""
    id_ = world.add_workload(Phase.RUNNING)
    for number in range(1, 4):
        world.add_attempt(id_, number, "north/alpha/m1", 0b11, released_at=T0)
    path = f"/v1/workloads/{id_}/{what}"
    whole, pages = await _walk(world, path, 500)
    assert (pages, len(whole)) == (1, 3)
    assert await _walk(world, path, 1) == (whole, 3)
    assert await _walk(world, path, 2) == (whole, 2)
