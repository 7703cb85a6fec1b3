"""Workloads over the API: lists, filters, pages, details and actions."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import func, select

from domain.phases import PLACED_PHASES, QUEUED_PHASES, TERMINAL_PHASES, Phase
from domain.reasons import Reason, ReasonCode
from infra.db.logs import Audit, Event, Outbox
from infra.db.models import Attempt, Workload
from tests.api.calls import T0, act, get, mail
from tests.api.world import ApiWorld


def written(world: ApiWorld) -> tuple[int, int, int]:
    """Returns the numbers of events, audit entries and outbox messages."""
    with world.session() as session:
        kinds = (Event, Audit, Outbox)
        a, b, c = (session.scalar(select(func.count()).select_from(kind)) or 0 for kind in kinds)
        return a, b, c


def level_of(world: ApiWorld, workload: str) -> int | None:
    with world.session() as session:
        level: int | None = session.get_one(Workload, workload).level
        return level


async def test_list_filters(world: ApiWorld) -> None:
    """The list can be filtered by tenant, phase, label and name; all given filters must match."""
    a = world.add_workload(Phase.RUNNING, name="a", labels={"team": "x", "run": "1"})
    b = world.add_workload(Phase.PENDING, name="b", labels={"team": "x"})
    c = world.add_workload(Phase.FAILED, name="a", tenant="speech", labels={"team": "y"})

    async def ids(**params: Any) -> list[str]:
        return [item["id"] for item in (await get(world, "/v1/workloads", **params))["items"]]

    assert await ids() == [c, b, a]
    assert await ids(tenant="vision") == [b, a]
    assert await ids(phase=["running", "failed"]) == [c, a]
    assert await ids(name="a") == [c, a]
    assert await ids(label="team=x") == [b, a]
    assert await ids(label=["team=x", "run=1"]) == [a]
    assert await ids(label=["team=x", "team=y"]) == []
    assert await ids(tenant="vision", phase="pending", label="team=x") == [b]
    assert await ids(name="nothing") == []


async def test_pages_hold_each_workload_once(world: ApiWorld) -> None:
    """Pages of any size have together each workload exactly once, also while new workloads are added."""
    ids = [world.add_workload() for _ in range(7)]
    for limit in (1, 2, 3, 7, 500):
        seen: list[str] = []
        cursor: dict[str, str] = {}
        while True:
            page = await get(world, "/v1/workloads", limit=limit, **cursor)
            assert len(page["items"]) <= limit
            seen += [item["id"] for item in page["items"]]
            if limit == 2:
                world.add_workload()
            if page["next_cursor"] is None:
                break
            cursor = {"cursor": page["next_cursor"]}
        assert seen[-len(ids) :] == ids[::-1]
        assert len(set(seen)) == len(seen)


@pytest.mark.parametrize(
    "query",
    ["limit=0", "limit=501", "limit=x", "limit=99999999999999999999", "phase=asleep", "label=team", "label==x",
     "cursor=" + "x" * 101],
)  # fmt: skip
async def test_bad_filters(shared_world: ApiWorld, query: str) -> None:
    """An invalid filter is an error that names it."""
    async with shared_world.client() as client:
        answer = await client.get(f"/v1/workloads?{query}")
    assert (answer.status_code, answer.json()["type"]) == (422, "urn:mizzen:problem:invalid-request")
    assert answer.json()["errors"][0]["path"].startswith(f"query.{query.partition('=')[0]}")


async def test_view_of_a_running_workload(world: ApiWorld) -> None:
    """The details have the placement, the progress over all attempts, and the number of preemptions."""
    id_ = world.add_workload(Phase.RUNNING)
    evicted = Reason(ReasonCode.EVICTED, {"evictor": "wl-x", "evictor_rank": 1, "rank": 3}).to_json()
    lost = Reason(ReasonCode.MACHINE_LOST, {"machine": "north/alpha/m1"}).to_json()
    world.add_attempt(id_, 1, "north/alpha/m1", 0b11, released_at=T0, outcome=evicted, last_step=40,
                      checkpoint_step=30, checkpoint_at=T0, checkpoint_bytes=99, checkpoint_s=0.5,
                      checkpoint_write_s=2.0, lost_s=20.0)  # fmt: skip
    world.add_attempt(id_, 2, "north/alpha/m1", 0b11, released_at=T0 + timedelta(hours=1), outcome=lost, lost_s=1.5)
    cadence = {"interval_s": 805.0, "cost_s": 30.0, "mtbf_s": 10800.0, "step_s": 2.0, "source": "hazard"}
    measured = {"at_s": 1767225600.0, "bytes_s": 2e7, "lower_bytes_s": 1e7}
    used = [{"job": "trainer", "task": 1, "gpus": 1, "percent": 50, "used_bytes": 2 << 30}]
    world.add_attempt(id_, 3, "south/beta/m1", 0b1010, last_step=35, resumed_step=30, started_at=T0, cadence=cadence,
                      bandwidth=measured, gpu_use=used,
                      metrics={"loss": -0.5},
                      curve=[[31, T0.timestamp(), {}], [35, T0.timestamp() + 1, {"loss": -0.5}]],
                      load={"state": "loaded", "error": None, "skipped": 1})  # fmt: skip
    view = await get(world, f"/v1/workloads/{id_}")
    assert view["placement"] == [
        {"machine": "south/beta/m1", "job": "trainer", "task": 0, "slots": [1]},
        {"machine": "south/beta/m1", "job": "trainer", "task": 1, "slots": [3]},
    ]
    age_s = view["progress"].pop("checkpoint_age_s")
    assert (datetime.now(UTC) - T0).total_seconds() - 60 < age_s <= (datetime.now(UTC) - T0).total_seconds()
    assert view["progress"] == {
        "step": 35, "metrics": {"loss": -0.5}, "checkpoint_step": 30,
        "checkpoint_at": "2026-01-01T00:00:00Z", "checkpoint_bytes": 99,
        "checkpoint_s": 0.5, "checkpoint_write_s": 2.0, "cadence": cadence,
        "load": {"state": "loaded", "error": None, "skipped": 1}, "failing": None, "notice": None,
        "at_risk_s": 10.0,  # five steps of two seconds since the resumed step
    }  # fmt: skip
    assert view["lost_s"] == 21.5
    assert (view["preemptions"], view["attempt"], view["region"]) == (1, 3, "south")
    attempts = (await get(world, f"/v1/workloads/{id_}/attempts"))["items"]
    assert [a["attempt"] for a in attempts] == [1, 2, 3]
    points = (await get(world, f"/v1/workloads/{id_}/progress"))["points"]
    assert [(p["attempt"], p["step"], p["at"], p["metrics"]) for p in points] == [
        (3, 31, "2026-01-01T00:00:00Z", {}), (3, 35, "2026-01-01T00:00:01Z", {"loss": -0.5}),
    ]  # fmt: skip
    assert [(a["outcome"] or {}).get("code") for a in attempts] == ["evicted", "machine_lost", None]
    assert attempts[0]["gpus"] == {"a100": 2}
    shown = {"measured_at": "2026-01-01T00:00:00Z", "mean_bytes_s": 2e7, "lower_bytes_s": 1e7}
    assert [a["gpu_use"] for a in attempts] == [[], [], used]
    assert [a["bandwidth"] for a in attempts] == [None, None, shown]
    allocations = (await get(world, f"/v1/workloads/{id_}/allocations"))["items"]
    assert [(a["machine"], a["slots"]) for a in allocations] == [
        ("north/alpha/m1", [0, 1]), ("north/alpha/m1", [0, 1]), ("south/beta/m1", [1, 3]),
    ]  # fmt: skip
    (listed,) = (await get(world, "/v1/workloads"))["items"]
    listed["progress"].pop("checkpoint_age_s")
    assert listed.pop("waited_s") >= view.pop("waited_s")
    assert listed == {
        k: v
        for k, v in view.items()
        if k not in ("spec", "after", "notifications", "placement", "cost_usd", "unpriced_h")
    }
    assert (attempts[2]["cadence"], attempts[1]["lost_s"], attempts[0]["checkpoint_write_s"]) == (cadence, 1.5, 2.0)


@pytest.mark.parametrize("phase", list(Phase))
async def test_cancel_in_every_phase(shared_world: ApiWorld, phase: Phase) -> None:
    """A queued workload is cancelled immediately, a placed one by a message to its workflow, an ended one never."""
    world = shared_world
    id_ = world.add_workload(phase)
    answer = await act(world, f"/v1/workloads/{id_}/cancel", "vision")
    if phase is Phase.CANCELLED:
        assert (answer.status_code, mail(world, id_)) == (202, [])
    elif phase in TERMINAL_PHASES:
        assert (answer.status_code, answer.json()["type"]) == (409, "urn:mizzen:problem:wrong-phase")
        assert mail(world, id_) == []
    else:
        queued = phase in QUEUED_PHASES
        assert answer.status_code == 202
        assert answer.json()["phase"] == ("cancelled" if queued else phase.value)
        with world.session() as session:
            row = session.get_one(Workload, id_)
            told = {"kind": "cancel", "attempt": row.attempt if queued else 0, "detail": {"by": "key-vision"}}
            assert mail(world, id_) == ([] if queued and not row.attempt else [("mail", id_, told)])
            cancelled = select(Event).where(Event.workload == id_, Event.kind == "workload.cancelled")
            ended = session.scalars(cancelled).all()
            assert (row.finished_at is not None, len(ended)) == (queued, int(queued))
            if queued:
                reason = Reason(ReasonCode.CANCELLED_BY_USER, {"by": "key-vision"})
                assert row.reason == ended[0].reason == reason.to_json()
            audit = session.scalars(select(Audit).where(Audit.target == id_)).one()
            assert (audit.action, audit.actor) == ("workload.cancel", "key-vision")


async def test_cancel_by_label(world: ApiWorld) -> None:
    """`cancel` by labels cancels all live workloads with the labels, and only those of the caller's tenant."""
    mine = [world.add_workload(p, labels={"team": "x"}) for p in (Phase.PENDING, Phase.RUNNING)]
    world.add_workload(Phase.SUCCEEDED, labels={"team": "x"})
    world.add_workload(Phase.RUNNING, labels={"team": "y"})
    other = world.add_workload(Phase.RUNNING, tenant="speech", labels={"team": "x"})
    answer = await act(world, "/v1/workloads/cancel", "vision", {"labels": {"team": "x"}})
    assert (answer.status_code, answer.json()) == (202, {"cancelled": mine})
    with world.session() as session:
        assert session.get_one(Workload, mine[0]).phase == "cancelled", "a queued workload must end at once"
    assert [m[1] for m in mail(world) if m[0] == "mail"] == mine[1:]
    answer = await act(world, "/v1/workloads/cancel", "vision", {"labels": {"team": "x"}, "tenant": "speech"})
    assert answer.json() == {"cancelled": []}
    answer = await act(world, "/v1/workloads/cancel", "operator", {"labels": {"team": "x"}, "tenant": "speech"})
    assert answer.json() == {"cancelled": [other]}


async def test_cancel_by_no_label_cancels_nothing(world: ApiWorld) -> None:
    """A `cancel` without labels is an error, because it would match all workloads."""
    world.add_workload(Phase.RUNNING)
    bodies: list[object] = [{}, {"labels": {}}, {"labels": None}, None]
    for body in bodies:
        answer = await act(world, "/v1/workloads/cancel", body=body)
        assert answer.status_code == 422
    assert mail(world) == []


@pytest.mark.parametrize("phase", list(Phase))
async def test_hold_and_release(shared_world: ApiWorld, phase: Phase) -> None:
    """Only queued workloads can be held; hold and release are idempotent, and each wakes the scheduler once."""
    world, before = shared_world, written(shared_world)

    def changes() -> tuple[int, ...]:
        return tuple(now - then for now, then in zip(written(world), before, strict=True))

    id_ = world.add_workload(phase)
    held = await act(world, f"/v1/workloads/{id_}/hold", "vision")
    if phase not in QUEUED_PHASES:
        assert (held.status_code, held.json()["type"]) == (409, "urn:mizzen:problem:wrong-phase")
        assert phase.value in held.json()["detail"]
        assert changes() == (0, 0, 0)
        return
    assert (held.status_code, held.json()["held_by"]) == (202, "key-vision")
    assert (await act(world, f"/v1/workloads/{id_}/hold", "operator")).json()["held_by"] == "key-vision"
    assert changes() == (1, 1, 1)
    released = await act(world, f"/v1/workloads/{id_}/release", "vision")
    assert (released.status_code, released.json()["held_by"]) == (202, None)
    assert (await act(world, f"/v1/workloads/{id_}/release", "vision")).status_code == 202
    assert changes() == (2, 2, 2)
    with world.session() as session:
        kinds = session.scalars(select(Event.kind).where(Event.workload == id_).order_by(Event.id)).all()
    assert kinds == ["workload.held", "workload.released"]
    assert [m[0] for m in mail(world)][-2:] == ["wake", "wake"]


async def test_a_clock_that_is_set_back_shortens_no_pause(world: ApiWorld) -> None:
    """A hold that ends before it began counts as no pause."""
    id_ = world.add_workload()
    await act(world, f"/v1/workloads/{id_}/hold", "vision")
    with world.session() as session:
        session.get_one(Workload, id_).held_at = func.now() + timedelta(hours=1)
    await act(world, f"/v1/workloads/{id_}/release", "vision")
    with world.session() as session:
        assert session.get_one(Workload, id_).paused_s == 0.0


@pytest.mark.parametrize("phase", list(Phase))
async def test_preempt(shared_world: ApiWorld, phase: Phase) -> None:
    """A preemption message has the current attempt; workloads that are not placed cannot be preempted."""
    world = shared_world
    id_ = world.add_workload(phase, attempt=4)
    answer = await act(world, f"/v1/workloads/{id_}/preempt")
    if phase in PLACED_PHASES:
        assert answer.status_code == 202
        assert mail(world, id_) == [("mail", id_, {"kind": "preempt", "attempt": 4, "detail": {"by": "key-operator"}})]
    else:
        assert (answer.status_code, answer.json()["type"]) == (409, "urn:mizzen:problem:wrong-phase")
        assert mail(world, id_) == []


async def test_priority_goes_down_only(world: ApiWorld) -> None:
    """A workload's priority can only be lowered, from the tenant's level and from its own."""
    id_ = world.add_workload(Phase.RUNNING)
    path = f"/v1/workloads/{id_}"

    async def change(level: object) -> tuple[int, Any]:
        answer = await act(world, path, "vision", {"level": level}, "PATCH")
        return answer.status_code, answer.json()

    assert (await change(2))[0] == 422
    status, view = await change(3)
    assert (status, view["level"], level_of(world, id_), written(world)) == (200, 3, None, (0, 0, 0))
    status, view = await change(5)
    assert (status, view["level"], level_of(world, id_), written(world)) == (200, 5, 5, (1, 1, 1))
    status, problem = await change(4)
    assert (status, problem["errors"][0]["path"], level_of(world, id_)) == (422, "level", 5)
    assert (await change(7))[0] == 200
    for bad in (8, 0, -1, "7", 6.5, None, True, 10**30):
        status, problem = await change(bad)
        assert (status, problem["errors"][0]["path"]) == (422, "level")
    assert level_of(world, id_) == 7


async def test_priority_of_ended_workloads_stays(world: ApiWorld) -> None:
    """An ended workload's priority cannot be changed."""
    id_ = world.add_workload(Phase.FAILED)
    assert (await act(world, f"/v1/workloads/{id_}", body={"level": 7}, method="PATCH")).status_code == 409


@pytest.mark.parametrize("id_", ["wl-nothing", "x" * 5000, "%F0%9F%92%A9", "%2e%2e%2fetc", "wl-1%0A", "'; --"])
async def test_unknown_ids(shared_world: ApiWorld, id_: str) -> None:
    """Unknown and malformed ids return 404."""
    async with shared_world.client() as client:
        for path in ("", "/why", "/attempts", "/allocations", "/events", "/logs"):
            answer = await client.get(f"/v1/workloads/{id_}{path}")
            assert answer.status_code == 404, (path, answer.text)
            assert answer.json()["type"] == "urn:mizzen:problem:not-found"


async def test_nul_in_urls(shared_world: ApiWorld) -> None:
    """NUL, which Postgres does not allow in text, is an error anywhere in a URL."""
    async with shared_world.client() as client:
        for path in ("/v1/workloads/a%00b", "/v1/workloads?name=%00", "/v1/machines?region=a%00"):
            answer = await client.get(path)
            assert (answer.status_code, answer.json()["type"]) == (400, "urn:mizzen:problem:malformed-request")


async def test_level_follows_the_tenant(world: ApiWorld) -> None:
    """The effective level is the lower priority of the tenant's level and the workload's own."""
    a, b = world.add_workload(), world.add_workload(level=5)
    async with world.client() as client:
        await client.put("/v1/tenants/vision", json={"level": 4})
    levels = {w["id"]: w["level"] for w in (await get(world, "/v1/workloads"))["items"]}
    assert levels == {a: 4, b: 5}


async def test_list_of_many_needs_few_queries(world: ApiWorld) -> None:
    """The number of queries for a page does not grow with the page."""
    from sqlalchemy import event

    engine = world.app.state.mizzen.engine
    queries: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda *args: queries.append(args[2]))
    numbers = []
    for total in (1, 30):
        while world.counter < total:
            id_ = world.add_workload()
            with world.session() as session:
                session.add(
                    Attempt(workload=id_, attempt=1, region="north", plan={"jobs": []}, gpu_types={}, cpus_milli=0)
                )
        queries.clear()
        await get(world, "/v1/workloads")
        numbers.append(len(queries))
    assert numbers[0] == numbers[1]
