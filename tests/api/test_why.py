"""The queue and `why`: a summary for each phase, and reasons with codes and figures."""

from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import func

from domain.phases import Phase
from domain.reasons import Reason, ReasonCode
from infra.db.logs import Waiting
from infra.db.models import Workload
from tests.api.calls import T0, act, get
from tests.api.published import EVICTED, FULL, publish
from tests.api.world import ApiWorld


async def test_queue_is_in_the_order_of_the_last_scan(world: ApiWorld) -> None:
    """The queue has the scanned workloads in scan order with reasons, then unscanned ones, and no placed ones."""
    first, second, new = (world.add_workload() for _ in range(3))
    running = world.add_workload(Phase.RUNNING)
    other = world.add_workload(tenant="speech")
    publish(world, (second, 3, 9.0), (other, 3, 1.5, "speech"), (running, 3, 1.5), (first, 8, 1.5))
    with world.session() as session:
        session.add(Waiting(workload=second, reasons={"reasons": [FULL]}))
    queue = await get(world, "/v1/queue")
    assert queue["scanned_at"] == "2026-01-01T00:00:00Z"
    assert [entry["id"] for entry in queue["items"]] == [second, other, first, new]
    assert queue["total"] == 4
    assert [entry["rank"] for entry in queue["items"]] == [3, 3, 8, None]
    assert [[r["code"] for r in entry["reasons"]] for entry in queue["items"]] == [
        ["insufficient_capacity"], ["scan_pending"], ["quota_exceeded"], ["scan_pending"],
    ]  # fmt: skip
    mine = await get(world, "/v1/queue", "vision")
    assert [entry["id"] for entry in mine["items"]] == [second, first, new]
    assert [entry["id"] for entry in (await get(world, "/v1/queue", limit=2))["items"]] == [second, other]


async def test_queue_before_the_first_scan(world: ApiWorld) -> None:
    """Before the first scan the queue is in the order of submission."""
    ids = [world.add_workload() for _ in range(3)]
    queue = await get(world, "/v1/queue")
    assert queue["scanned_at"] is None
    assert [entry["id"] for entry in queue["items"]] == ids


async def test_why_a_workload_waits(world: ApiWorld) -> None:
    """For a queued workload, `why` has its position, its rank and the reasons of the regions."""
    other, id_ = world.add_workload(), world.add_workload()
    publish(world, (other, 3, 1.5), (id_, 8, 0.25), preference=(-2.5,))
    with world.session() as session:
        session.add(Waiting(workload=id_, reasons={"reasons": [FULL]}))
    why = await get(world, f"/v1/workloads/{id_}/why")
    assert [r["code"] for r in why["reasons"]] == ["quota_exceeded", "insufficient_capacity"]
    assert (why["position"], why["of"], why["rank"], why["over_quota"], why["credit"]) == (2, 2, 8, True, 0.25)
    assert why["summary"] == (
        "pending: waits at position 2 of 2, over quota, with -2.5 credit among its tenant's workloads of this level:"
        " tenant vision uses 8 of 8 a100 and this workload needs 2 more; "
        "region north can now place 1 of 2 tasks of job trainer; no workload of lower priority can be evicted"
    )


async def test_why_a_workload_is_held(world: ApiWorld) -> None:
    """For a held workload, `why` names the key that holds it and the command that releases it."""
    id_ = world.add_workload(held_by="key-vision")
    publish(world, (id_, 3, 1.5))
    with world.session() as session:
        session.add(Waiting(workload=id_, reasons={"reasons": [FULL]}))
    why = await get(world, f"/v1/workloads/{id_}/why")
    assert [r["code"] for r in why["reasons"]] == ["held"]
    assert why["summary"] == "pending: held by key-vision; `mizzen release` ends the hold"


async def test_why_before_a_scan(world: ApiWorld) -> None:
    """Before the first scan, `why` says that the workload waits for a scan."""
    id_ = world.add_workload()
    why = await get(world, f"/v1/workloads/{id_}/why")
    assert why["summary"] == "pending: waits for the next scan of the queue"
    assert (why["position"], why["rank"], why["level"]) == (None, None, 3)


async def test_why_a_preempted_workload_waits(world: ApiWorld) -> None:
    """For a preempted workload, `why` has the reason of the preemption and the reasons why it waits."""
    id_ = world.add_workload(Phase.PREEMPTED, attempt=2, reason=EVICTED.to_json())
    publish(world, (id_, 3, 1.5))
    with world.session() as session:
        session.add(Waiting(workload=id_, reasons={"reasons": [FULL]}))
    why = await get(world, f"/v1/workloads/{id_}/why")
    assert why["summary"].startswith(
        "preempted: attempt 2 ended: evicted by wl-x (rank 1 against 3); waits at position 1 of 1: region north can"
    )


SUMMARIES = [
    (Phase.PLACING, Reason(ReasonCode.WAITING_FOR_VICTIMS, {"victims": "wl-a, wl-b"}),
     "placing: waits for the slots of wl-a, wl-b, which it evicts"),
    (Phase.PLACING, None, "placing: waits for slots in north"),
    (Phase.MIGRATING, Reason(ReasonCode.COPYING_CHECKPOINT, {"source": "south", "region": "north"}),
     "migrating: its checkpoint is being copied from south to north"),
    (Phase.PROVISIONING, Reason(ReasonCode.STARTING_TASKS, {"tasks": 2, "machines": 1}),
     "provisioning: starting 2 tasks on 1 machine"),
    (Phase.RUNNING, Reason(ReasonCode.AWARDED, {"region": "north", "machines": 1, "victims": 0}),
     "running: attempt 1 has run in north since 2026-01-01T00:00:00+00:00 (isolation none)"),
    (Phase.CHECKPOINTING, EVICTED,
     "checkpointing: saves a checkpoint in north and stops: evicted by wl-x (rank 1 against 3)"),
]  # fmt: skip


@pytest.mark.parametrize(("phase", "reason", "summary"), SUMMARIES, ids=[s[2] for s in SUMMARIES])
async def test_why_a_placed_workload_is_where_it_is(
    shared_world: ApiWorld, phase: Phase, reason: Reason | None, summary: str
) -> None:
    """`why` has a summary for each phase of a placed workload."""
    id_ = shared_world.add_workload(phase, reason=reason.to_json() if reason else None)
    shared_world.add_attempt(id_, 1, "north/alpha/m1", 0, started_at=T0)
    why = await get(shared_world, f"/v1/workloads/{id_}/why")
    assert why["summary"] == summary
    code = ReasonCode.RUNNING if phase is Phase.RUNNING else reason.code if reason else None
    assert [r["code"] for r in why["reasons"]] == ([code.value] if code else [])
    assert (why["position"], why["of"]) == (None, None)


async def test_why_says_how_far_the_start_of_the_tasks_is(shared_world: ApiWorld) -> None:
    """While machines fetch the image, `why` says how far the first of them are."""
    reason = Reason(ReasonCode.STARTING_TASKS, {"tasks": 2, "machines": 1})
    id_ = shared_world.add_workload(Phase.PROVISIONING, reason=reason.to_json())
    told = {"north/alpha/m1": "fetching image shell:1: 12 of 800 MB"}
    shared_world.add_attempt(id_, 1, "north/alpha/m1", 0, preparing=told)
    why = await get(shared_world, f"/v1/workloads/{id_}/why")
    assert [r["code"] for r in why["reasons"]] == ["starting_tasks", "preparing"]
    assert why["reasons"][1]["sentence"] == "machine north/alpha/m1: fetching image shell:1: 12 of 800 MB"


ENDS = [
    (Phase.SUCCEEDED, Reason(ReasonCode.COMPLETED, {"tasks": 2}),
     "succeeded: all 2 tasks ended with exit code 0 (after 1 attempt)"),
    (Phase.FAILED, Reason(ReasonCode.MAX_RUNTIME, {"ran_s": 61, "limit_s": 60}),
     "failed: ran for 61 s; its maximum runtime is 60 s (after 1 attempt)"),
    (Phase.CANCELLED, Reason(ReasonCode.CANCELLED_BY_USER, {"by": "key-vision"}),
     "cancelled: cancelled by key-vision (after 1 attempt)"),
]  # fmt: skip


@pytest.mark.parametrize(("phase", "reason", "summary"), ENDS, ids=[s[2] for s in ENDS])
async def test_why_a_workload_ended(shared_world: ApiWorld, phase: Phase, reason: Reason, summary: str) -> None:
    """For an ended workload, `why` has the outcome and the number of attempts."""
    id_ = shared_world.add_workload(phase, reason=reason.to_json())
    shared_world.add_attempt(id_, 1, "north/alpha/m1", 0, released_at=T0)
    assert (await get(shared_world, f"/v1/workloads/{id_}/why"))["summary"] == summary


async def test_the_time_on_hold_is_no_wait(world: ApiWorld) -> None:
    """`waited_s` is the time since the submission without holds; `eligible_s` begins again at the end of a hold."""
    id_ = world.add_workload(submitted_at=func.now() - timedelta(hours=3))
    await act(world, f"/v1/workloads/{id_}/hold", "vision")
    with world.session() as session:
        session.get_one(Workload, id_).held_at = func.now() - timedelta(hours=2)
    held = await get(world, f"/v1/workloads/{id_}")
    assert (held["waited_s"], held["eligible_s"]) == (pytest.approx(3600, abs=60), None)
    released = (await act(world, f"/v1/workloads/{id_}/release", "vision")).json()
    assert released["eligible_s"] < 60
    publish(world, (id_, 3, 1.5))
    (entry,) = (await get(world, "/v1/queue"))["items"]
    for body in (released, entry, await get(world, f"/v1/workloads/{id_}/why")):
        assert body["waited_s"] == pytest.approx(3600, abs=60)
    (live,) = (await get(world, "/v1/snapshot"))["workloads"]
    assert live["paused_s"] == pytest.approx(7200, abs=60)


async def test_running_time_counts_as_waiting_and_the_last_attempt_begins_the_second_figure(world: ApiWorld) -> None:
    """A preempted workload has waited since its submission, and could be placed since its last attempt ended."""
    now = datetime.now(UTC)
    id_ = world.add_workload(Phase.PREEMPTED, attempt=2, submitted_at=now - timedelta(hours=5))
    for number, hours in ((1, 4), (2, 1)):
        world.add_attempt(id_, number, "north/alpha/m1", 0b1, released_at=now - timedelta(hours=hours))
    ended = world.add_workload(
        Phase.CANCELLED, submitted_at=now - timedelta(hours=5), finished_at=now - timedelta(hours=3)
    )
    found = [await get(world, f"/v1/workloads/{one}") for one in (id_, ended)]
    assert [one["waited_s"] for one in found] == [pytest.approx(5 * 3600, abs=60), pytest.approx(2 * 3600, abs=60)]
    assert [one["eligible_s"] for one in found] == [pytest.approx(3600, abs=60), None]


async def test_expected_start(world: ApiWorld) -> None:
    """`why` and lists have the interval of a workload that waits, as the queue was published; one on hold has none."""
    first, second = world.add_workload(), world.add_workload()
    held = world.add_workload(held_by="somebody")
    from_scan_s = (datetime.now(UTC) - T0).total_seconds()
    publish(
        world, (first, 1, 1.5), (second, 8, 0.25), (held, 8, 0.2),
        starts_s=(from_scan_s + 7200.0, from_scan_s + 32_400.0),
    )  # fmt: skip
    told = [(await get(world, f"/v1/workloads/{id_}/why"))["expected_start"] for id_ in (first, second, held)]
    slots, of, end = "slots that running work holds", "of its tenant", "would change the time"
    assert [told[0]["sentence"], told[1]["sentence"], told[2]] == [
        f"in 2 to 9 h (80 %); it waits for {slots}; fewer GPUs {end}",
        f"in 2 to 9 h (80 %); it waits for 1 workload ahead of it and for {slots}; quota {of} or fewer GPUs {end}",
        None,
    ]
    listed = {w["id"]: w["expected_start"] for w in (await get(world, "/v1/workloads"))["items"]}
    assert [listed[first]["latest"], listed[second]["latest"], listed[held]] == [told[0]["latest"]] * 2 + [None]
