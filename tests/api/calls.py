"""Calls of the API, and what the tests of several endpoints have in common."""

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import select

from infra.db.logs import Outbox
from tests.api.world import ApiWorld

T0 = datetime(2026, 1, 1, tzinfo=UTC)


async def get(world: ApiWorld, path: str, key: str = "operator", **params: Any) -> Any:
    async with world.client(key) as client:
        answer = await client.get(path, params=params)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def act(world: ApiWorld, path: str, key: str = "operator", body: object = None, method: str = "POST") -> Any:
    async with world.client(key) as client:
        return await client.request(method, path, json=body)


async def walk(world: ApiWorld, path: str, limit: int, **only: str) -> tuple[list[Any], int]:
    """Reads a list in pages of `limit`; returns all items and the number of pages."""
    items: list[Any] = []
    more: dict[str, str] = {}
    pages = 0
    while True:
        page = await get(world, path, limit=limit, **only, **more)
        assert len(page["items"]) <= limit
        items += page["items"]
        pages += 1
        if page["next_cursor"] is None:
            return items, pages
        more = {"cursor": page["next_cursor"]}


def mail(world: ApiWorld, workload: str | None = None) -> list[tuple[str, str | None, Any]]:
    """Returns the messages in the outbox, all or of one workload."""
    with world.session() as session:
        found = session.scalars(select(Outbox).order_by(Outbox.id)).all()
    return [(m.kind, m.workload, m.body) for m in found if workload in (None, m.workload)]
