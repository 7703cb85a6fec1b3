"""Lists, details, `why` and the queue return the same reason, for every state of a workload."""

import random
from datetime import UTC, datetime, timedelta
from typing import Any

from domain.phases import QUEUED_PHASES, TERMINAL_PHASES, Phase
from domain.reasons import Reason, ReasonCode
from infra.db import events
from infra.db.logs import Waiting
from infra.db.models import Workload
from tests.api.calls import T0, get
from tests.api.published import EVICTED, FULL, publish
from tests.api.world import ApiWorld

_STORED = {
    Phase.PENDING: Reason(ReasonCode.SCAN_PENDING),
    Phase.PREEMPTED: EVICTED,
    Phase.RUNNING: Reason(ReasonCode.STARTING_TASKS, {"tasks": 2, "machines": 1}),
    Phase.SUCCEEDED: Reason(ReasonCode.COMPLETED, {"tasks": 2}),
    Phase.FAILED: Reason(ReasonCode.MAX_RUNTIME, {"ran_s": 61, "limit_s": 60}),
    Phase.CANCELLED: Reason(ReasonCode.CANCELLED_BY_USER, {"by": "key-vision"}),
}


def _random_state(world: ApiWorld, chance: random.Random) -> None:
    """Adds workloads in every phase; at random they are held, ranked, over quota, or have reasons of regions."""
    ranked, answered = [], []
    for phase in [*Phase, *chance.choices(sorted(QUEUED_PHASES), k=6)]:
        stored = _STORED.get(phase, Reason(ReasonCode.AWARDED, {"region": "north", "machines": 1, "victims": 0}))
        queued = phase in QUEUED_PHASES
        # On a slow machine a scan must not become overdue between two responses.
        submitted_at = datetime.now(UTC) + timedelta(minutes=10)
        columns: dict[str, Any] = {"reason": stored.to_json(), "region": None if queued else "north"}
        columns["submitted_at"] = submitted_at
        if queued and chance.random() < 0.3:
            columns["held_by"] = "key-vision"
        id_ = world.add_workload(phase, **columns)
        if phase not in (Phase.PENDING, *TERMINAL_PHASES):
            over = "2026-01-02T00:00:00Z" if queued else None
            world.add_attempt(id_, 1, "north/alpha/m1", 0, started_at=T0, released_at=over)
        if queued and chance.random() < 0.7:
            ranked.append((id_, chance.choice([3, 8]), 1.0))
        if queued and chance.random() < 0.7:
            answered.append(id_)
    if ranked:
        publish(world, *ranked)
    with world.session() as session:
        session.add_all(Waiting(workload=id_, reasons={"reasons": [FULL]}) for id_ in answered)


async def test_every_surface_gives_the_same_reason(world: ApiWorld) -> None:
    """The reason in lists and details is the first reason of `why` and of the queue."""
    chance = random.Random(3)
    for _ in range(3):
        _random_state(world, chance)
    listed = {w["id"]: w for w in (await get(world, "/v1/workloads", limit=500))["items"]}
    queue = {entry["id"]: entry["reasons"] for entry in (await get(world, "/v1/queue"))["items"]}
    assert len(listed) == 3 * (len(Phase) + 6)
    assert queue.keys() == {id_ for id_, w in listed.items() if w["queued"]}
    for id_, workload in listed.items():
        shown = (await get(world, f"/v1/workloads/{id_}"))["reason"]
        why = await get(world, f"/v1/workloads/{id_}/why")
        assert workload["reason"] == shown == why["reasons"][0], workload["phase"]
        assert queue.get(id_, why["reasons"]) == why["reasons"]
        assert shown["sentence"] in why["summary"]


async def test_a_running_gang_says_since_when_it_runs(world: ApiWorld) -> None:
    """A running workload has the reason `running` with its start, even if an older reason is stored."""
    id_ = world.add_workload(Phase.RUNNING, reason=_STORED[Phase.RUNNING].to_json(), region="north")
    world.add_attempt(id_, 1, "north/alpha/m1", 0, started_at=T0)
    reason = (await get(world, f"/v1/workloads/{id_}"))["reason"]
    assert reason["code"] == "running"
    assert reason["sentence"] == "attempt 1 has run in north since 2026-01-01T00:00:00+00:00"


async def test_a_scan_that_does_not_come_is_named(world: ApiWorld) -> None:
    """A workload that no scan has included for long has the reason `scan_overdue`, a recent one `scan_pending`."""
    old = datetime.now(UTC) - timedelta(hours=1)
    waits, back = (world.add_workload(submitted_at=old) for _ in range(2))
    with world.session() as session:
        row = session.get_one(Workload, back)
        events.record(session, "workload.released", tenant=row.tenant, workload=back, attempt=0)
    codes = {w["id"]: w["reason"]["code"] for w in (await get(world, "/v1/workloads"))["items"]}
    assert codes == {waits: "scan_overdue", back: "scan_pending"}
    why = await get(world, f"/v1/workloads/{waits}/why")
    assert why["summary"].startswith("pending: no scan of the queue has included it since ")
