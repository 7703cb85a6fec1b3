"""Outputs over the API: what agents have stored, read in pieces, and what they have not."""

from typing import Any

import pytest
from sqlalchemy import func

from domain import ids
from domain.phases import Phase
from infra.db.models import Workload
from tests.api.world import ApiWorld
from tests.stored_outputs import store_output


def placed(world: ApiWorld, *attempts: str) -> str:
    """Adds a running workload with attempts in these regions; returns its id."""
    id_ = world.add_workload(Phase.RUNNING)
    for number, region in enumerate(attempts, 1):
        machine = next(one for one in ("north/alpha/m1", "south/alpha/m1") if one.startswith(region))
        world.add_attempt(id_, number, machine, 0b1)
    return id_


async def listed(world: ApiWorld, workload: str, **params: Any) -> list[dict[str, Any]]:
    async with world.client("operator") as client:
        answer = await client.get(f"/v1/workloads/{workload}/outputs", params=params)
    assert answer.status_code == 200, answer.text
    items: list[dict[str, Any]] = answer.json()["items"]
    return items


async def test_outputs_are_listed_with_the_reasons(world: ApiWorld) -> None:
    """By name, job, task and attempt. Objects that are no manifests, or not valid, are left out."""
    id_ = placed(world, "north")
    store_output(world.buckets["north"], id_, [b"abc", b"d"], task=1, left_out=["pipe: is no file"], left_out_count=7)
    store_output(world.buckets["north"], id_, [], attempt=2, error="out has 9 GiB")
    store_output(world.buckets["north"], id_, [b"x"], name="report")
    bucket, prefix = world.buckets["north"], ids.output_manifests_prefix(id_)
    for key, body in (("trainer/2/model/1.json", b"{}"), ("odd", b""), ("trainer/x/model/1.json", b"{}")):
        bucket.put(prefix + key, body)
    found = await listed(world, id_)
    assert [(one["name"], one["task"], one["attempt"], one["archive_bytes"], one["error"]) for one in found] == [
        ("model", 0, 2, 0, "out has 9 GiB"), ("model", 1, 1, 4, None), ("report", 0, 1, 1, None),
    ]  # fmt: skip
    assert (found[1]["left_out"], found[1]["left_out_count"]) == (["pipe: is no file"], 7)
    assert [one["task"] for one in await listed(world, id_, name="model", task=1)] == [1]
    assert await listed(world, id_, job="other") == []


async def test_an_output_is_read_from_any_byte(world: ApiWorld) -> None:
    """Over the parts; an unknown one is not found, and one that was not stored neither."""
    id_ = placed(world, "north")
    store_output(world.buckets["north"], id_, [b"abc", b"defg", b"h"])
    store_output(world.buckets["north"], id_, [], attempt=2, error="too large")
    place = {"job": "trainer", "task": 0, "attempt": 1}
    async with world.client("operator") as client:
        for start in (0, 2, 3, 6, 8, 9):
            answer = await client.get(f"/v1/workloads/{id_}/outputs/model", params={**place, "start": start})
            assert (answer.status_code, answer.content) == (200, b"abcdefgh"[start:])
            assert answer.headers["content-type"] == "application/x-tar"
        for wrong in ({"attempt": 2}, {"task": 1}, {"job": "other"}):
            answer = await client.get(f"/v1/workloads/{id_}/outputs/model", params={**place, **wrong})
            assert answer.status_code == 404
        assert (await client.get(f"/v1/workloads/{id_}/outputs/none", params=place)).status_code == 404


@pytest.mark.parametrize("damage", [b"dEfg", b"def", None])
async def test_a_damaged_part_ends_the_response(world: ApiWorld, damage: bytes | None) -> None:
    """No byte of it is sent, so that the client sees that bytes are missing."""
    id_ = placed(world, "north")
    store_output(world.buckets["north"], id_, [b"abc", b"defg", b"h"])
    key = ids.output_part_key(id_, 1, "trainer", 0, "model", 1)
    if damage is None:
        world.buckets["north"].delete(key)
    else:
        world.buckets["north"].put(key, damage)
    async with world.client("operator") as client:
        params = {"job": "trainer", "task": 0, "attempt": 1}
        answer = await client.get(f"/v1/workloads/{id_}/outputs/model", params=params)
    assert (answer.status_code, answer.content) == (200, b"abc")


async def test_deleted_outputs_are_gone(world: ApiWorld) -> None:
    """After their retention time the answer says when they were deleted."""
    id_ = placed(world, "north")
    with world.session() as session:
        session.get_one(Workload, id_).expired_at = func.now()
    async with world.client("operator") as client:
        answer = await client.get(f"/v1/workloads/{id_}/outputs")
    assert answer.status_code == 410 and "were deleted at" in answer.json()["detail"]
