"""Placement runs over the API: one at a time, their results and moves, and the pause."""

from datetime import UTC, datetime

from sqlalchemy import select

from infra.db.logs import Outbox
from infra.db.placement_runs import PlacementMove, PlacementRun
from tests.api.world import ApiWorld


def _mail(world: ApiWorld) -> list[str]:
    with world.session() as session:
        mail = select(Outbox).where(Outbox.kind == "placement_run").order_by(Outbox.id)
        return [row.body["placement_run"] for row in session.scalars(mail)]


async def test_one_placement_run_at_a_time(world: ApiWorld) -> None:
    """A POST starts a placement run and sends its message; another placement run is a conflict while one is open."""
    async with world.client("operator") as client:
        begun = await client.post("/v1/tetris/placement-runs", json={"dry_run": True})
        assert begun.status_code == 202
        placement_run = begun.json()
        assert begun.headers["location"] == f"/v1/tetris/placement-runs/{placement_run['id']}"
        assert (placement_run["state"], placement_run["dry_run"], placement_run["moves"]) == ("planning", True, {})
        assert _mail(world) == [placement_run["id"]]
        again = await client.post("/v1/tetris/placement-runs", json={})
        assert again.status_code == 409
        assert again.json()["detail"] == f"only one placement run can run at a time: {placement_run['id']} is planning"
        assert _mail(world) == [placement_run["id"]]
        wrong = await client.post("/v1/tetris/placement-runs", json={"dry": True})
        assert wrong.status_code == 422 and "dry" in wrong.text


async def test_a_placement_run_and_its_moves(world: ApiWorld) -> None:
    """The moves of a placement run are listed in order and in pages, and are counted by state."""
    with world.session() as session:
        session.add(
            PlacementRun(id="n", dry_run=False, state="ended", deadline_at=datetime.now(UTC), report={"summary": 1})
        )
        session.flush()
        for number, state in enumerate(("done", "left", "done"), 1):
            session.add(
                PlacementMove(
                    placement_run="n", number=number, kind="home", data_table=f"t{number}", source_region="north",
                    target_region="south", size_bytes=10 * number, state=state, why={"total": -1.0},
                    left_because="no room" if state == "left" else None,
                )
            )  # fmt: skip
    async with world.client("operator") as client:
        listed = (await client.get("/v1/tetris/placement-runs")).json()
        assert listed["paused"] is None and [n["id"] for n in listed["items"]] == ["n"]
        placement_run = (await client.get("/v1/tetris/placement-runs/n")).json()
        assert (placement_run["moves"], placement_run["moved_bytes"], placement_run["report"]) == (
            {"done": 2, "left": 1},
            40,
            {"summary": 1},
        )
        first = (await client.get("/v1/tetris/placement-runs/n/moves", params={"limit": 2})).json()
        assert [(m["number"], m["table"], m["left_because"]) for m in first["items"]] == [
            (1, "t1", None), (2, "t2", "no room"),
        ]  # fmt: skip
        rest = (await client.get("/v1/tetris/placement-runs/n/moves", params={"cursor": first["next_cursor"]})).json()
        assert [m["number"] for m in rest["items"]] == [3] and rest["next_cursor"] is None
        left = (await client.get("/v1/tetris/placement-runs/n/moves", params={"state": "left"})).json()
        assert [m["number"] for m in left["items"]] == [2]
        for path in ("/v1/tetris/placement-runs/none", "/v1/tetris/placement-runs/none/moves"):
            assert (await client.get(path)).status_code == 404


async def test_pausing_and_resuming(world: ApiWorld) -> None:
    """Pause and resume are idempotent; the open placement run gets one message for each change."""
    async with world.client("operator") as client:
        placement_run = (await client.post("/v1/tetris/placement-runs", json={})).json()["id"]
        for _ in range(2):
            paused = await client.put("/v1/tetris/pause", json={"note": "moving racks"})
            assert paused.status_code == 200
        listed = (await client.get("/v1/tetris/placement-runs")).json()
        assert listed["paused"]["note"] == "moving racks" and listed["paused"]["by"] == paused.json()["by"]
        for _ in range(2):
            assert (await client.delete("/v1/tetris/pause")).status_code == 204
        assert (await client.get("/v1/tetris/placement-runs")).json()["paused"] is None
    assert _mail(world) == [placement_run] * 3
