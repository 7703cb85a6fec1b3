"""Releases and phase changes: repeated and late calls change nothing, and progress is kept."""

import math
from datetime import UTC, datetime

import pytest
from sqlalchemy import select
from temporalio.exceptions import ApplicationError

from activities.lifecycle.attempt_reports import set_progress
from domain.phases import Phase
from domain.protocol.workloads import TASKS_MAY_RUN, ReleaseRequest, TransitionRequest
from domain.reasons import Reason, ReasonCode
from domain.slots import MAX_SLOTS
from domain.task_reports import GpuReport, LeftFiles, TaskProgress, UnstoredOutput
from infra.db.logs import UsageRun
from infra.db.models import Attempt, Machine, Workload
from tests.activities.invariants import check
from tests.activities.world import World, job

M1, M2 = "r/c/m1", "r/c/m2"


@pytest.fixture
def fleet(world: World) -> World:
    """One region with two machines of one slot."""
    world.region("r")
    world.machine(M1, 1)
    world.machine(M2, 1)
    return world


def test_effects_that_are_carried_out_again_change_nothing(fleet: World) -> None:
    """A repeated phase change or release leaves the database unchanged."""
    workload = fleet.submit(job(tasks=2))
    fleet.tick()
    for phase in (Phase.PROVISIONING, Phase.RUNNING, Phase.CHECKPOINTING):
        assert fleet.change(workload, phase)
        before = fleet.dump()
        assert fleet.change(workload, phase)
        assert fleet.dump() == before
    fleet.release(workload, Phase.PREEMPTED)
    before = fleet.dump()
    fleet.release(workload, Phase.PREEMPTED)
    fleet.release(workload, Phase.FAILED)
    assert fleet.dump() == before
    check(fleet)


def test_attempts_of_one_machine_end_together(world: World) -> None:
    """Attempts that are released in one transaction end as if each was released alone, one that others evict, too; if
    one of them does not exist, none is released.
    """
    world.region("r")
    world.machine(M1, 4)
    first, second, third = (world.running(job(), level=5) for _ in range(3))
    urgent = world.submit(job(tasks=2), level=1)
    world.tick()
    (victim,) = (one for one in (first, second, third) if world.attempt(one).evicting_since is not None)
    done = Reason(ReasonCode.COMPLETED).to_json()
    asked = [
        ReleaseRequest(one, 1, "succeeded", done, [TaskProgress("main", 0, step=k)])
        for k, one in enumerate((third, first, second))
    ]
    before = world.dump()
    with pytest.raises(ApplicationError, match="workload wl-none does not exist"):
        world.workloads.release_all([*asked, ReleaseRequest("wl-none", 1, "succeeded", done)])
    assert world.dump() == before
    world.workloads.release_all(asked)
    for k, one in enumerate((third, first, second)):
        (event,) = world.events(one, "workload.succeeded")
        assert (event["detail"]["machines"], event["detail"]["last_step"]) == ([M1], k)
        attempt = world.attempt(one)
        assert attempt.outcome == done and attempt.released_at is not None
        assert (world.workload(one).phase, world.workload(one).region) == ("succeeded", None)
    assert len(world.mail(urgent, "slots_ready")) == 1 and victim in (first, second, third)
    with world.session() as session:
        assert session.get_one(Machine, M1).held.bit_count() == 2
        assert len(session.scalars(select(UsageRun)).all()) == 3
    after = world.dump()
    world.workloads.release_all(asked)
    assert world.dump() == after
    check(world)


def test_an_attempt_leaves_what_it_read_and_used(fleet: World) -> None:
    """A released attempt records its usage since its tasks started, under its recurring name, if it has one.

    An attempt whose tasks never ran records none.
    """
    fleet.table("words", 10, "r")
    jobs = (job(tasks=2, cpus_milli=3000),)
    recurring = fleet.submit(*jobs, tables=("words",), recurring="nightly", level=5)
    fleet.tick()
    fleet.release(recurring, Phase.PENDING)
    fleet.tick()
    fleet.run(recurring, ago_s=7200)
    fleet.release(recurring, Phase.PREEMPTED)
    alone = fleet.running(*jobs, ago_s=3600)
    fleet.release(alone, Phase.SUCCEEDED)
    with fleet.session() as session:
        first, second = session.scalars(select(UsageRun).order_by(UsageRun.run)).all()
        ended = [session.get_one(Attempt, key).released_at for key in ((recurring, 2), (alone, 1))]
    assert (first.source, first.run, first.job, first.kind) == ("mizzen", f"{recurring}.2", "t/nightly", "ml")
    assert (first.app, first.priority, first.tables) == ("training", 5, ["words"])
    assert (second.run, second.job, second.priority, second.tables) == (f"{alone}.1", f"t/{alone}", 3, [])
    assert [first.ended_at, second.ended_at] == ended
    for row, hours in ((first, 2), (second, 1)):
        assert row.gpu_hours == {"a100": pytest.approx(2 * hours, rel=0.02)}
        assert row.cpu_hours == pytest.approx(6 * hours, rel=0.02)


def test_effects_on_an_older_attempt_change_nothing(fleet: World) -> None:
    """Late calls for an older attempt, after a newer one was awarded, are refused and change nothing."""
    workload = fleet.running(job(tasks=2))
    fleet.release(workload, Phase.PENDING)
    fleet.tick()
    assert fleet.workload(workload).attempt == 2
    before = fleet.dump()
    for phase in (Phase.RUNNING, Phase.CANCELLED, Phase.CHECKPOINTING):
        assert not fleet.change(workload, phase, attempt=1)
    fleet.release(workload, Phase.PENDING, attempt=1)
    fleet.release(workload, Phase.PENDING, attempt=7)
    assert not fleet.change(workload, Phase.CANCELLED, attempt=0)
    assert fleet.dump() == before


def test_a_phase_that_cannot_follow_is_refused_for_good(fleet: World) -> None:
    """An illegal transition or an unknown workload is a non-retryable error and changes nothing."""
    workload = fleet.submit()
    before = fleet.dump()
    with pytest.raises(ApplicationError, match="running cannot follow pending") as caught:
        fleet.change(workload, Phase.RUNNING)
    assert caught.value.non_retryable and caught.value.type == "IllegalTransition"
    with pytest.raises(ApplicationError, match="workload wl-none does not exist") as caught:
        fleet.workloads.transition(TransitionRequest("wl-none", 1, "running", {}))
    assert caught.value.non_retryable
    with pytest.raises(ApplicationError):
        fleet.workloads.release(ReleaseRequest("wl-none", 1, "pending", {}))
    assert fleet.dump() == before


def test_an_end_wakes_the_scheduler_and_is_told_with_its_numbers(fleet: World) -> None:
    """A release clears the region, stores outcome and progress of the attempt, and requests a scan."""
    workload = fleet.running(job(tasks=2))
    wakes = fleet.put_out("wake")
    progress = [
        TaskProgress("main", 0, step=12, resumed_step=4, checkpoint_step=10, checkpoint_at_s=1e9, checkpoint_bytes=77),
        TaskProgress("main", 1, step=11),
    ]
    fleet.release(workload, Phase.SUCCEEDED, progress=progress)
    row, attempt = fleet.workload(workload), fleet.attempt(workload)
    assert (row.phase, row.region) == ("succeeded", None) and row.finished_at is not None
    assert attempt.released_at is not None and attempt.outcome["code"] == "completed"  # type: ignore[index]
    assert (attempt.last_step, attempt.resumed_step, attempt.checkpoint_step) == (12, 4, 10)
    assert attempt.checkpoint_at == datetime.fromtimestamp(1e9, UTC)
    (event,) = fleet.events(workload, "workload.succeeded")
    assert event["detail"] == {"machines": [M1, M2], "last_step": 12, "checkpoint_step": 10, "resumed_step": 4}
    assert event["region"] == "r"
    assert fleet.put_out("wake") == wakes + 1
    check(fleet)


def test_the_use_of_gpus_is_stored_within_what_is_possible(fleet: World) -> None:
    """An agent that is not trusted can report anything; a report without a measurement keeps the last ones."""
    workload = fleet.running(job(tasks=2))
    with fleet.session() as session:
        attempt = session.get_one(Attempt, (workload, 1))
        told = [GpuReport(1, 85, 3 << 27), GpuReport(999, -5, 1 << 80)]
        set_progress(attempt, [TaskProgress("main", task, gpu=gpu) for task, gpu in enumerate(told)])
        set_progress(attempt, [TaskProgress("main", 0), TaskProgress("main", 1)])
    assert fleet.attempt(workload).gpu_use == [
        {"job": "main", "task": 0, "gpus": 1, "percent": 85, "used_bytes": 3 << 27},
        {"job": "main", "task": 1, "gpus": MAX_SLOTS, "percent": 0, "used_bytes": 1 << 50},
    ]


def test_files_that_are_left_are_stored_with_a_warning(fleet: World) -> None:
    """An end with more than 1 MB of files writes an event; impossible reports of an agent are limited."""
    workload = fleet.running(job(tasks=2))
    left = [LeftFiles(M1, "/state/run\0\ud800", 3_000_000, 2e9), LeftFiles("m" * 999, "/b", -5, math.inf)]
    progress = [TaskProgress("main", n, left=one) for n, one in enumerate(left)]
    fleet.release(workload, Phase.PREEMPTED, progress=progress)
    assert fleet.events(workload, "workload.left_files") == []  # It will run again.
    fleet.tick()
    fleet.run(workload, ago_s=60)
    fleet.release(workload, Phase.SUCCEEDED, progress=progress)
    stored = fleet.attempt(workload).left_files
    assert stored is not None
    assert stored[0] == {
        "job": "main", "task": 0, "machine": M1, "path": "/state/run?", "bytes": 3_000_000,
        "until_s": min(2e9, stored[0]["until_s"]),
    }  # fmt: skip
    assert (len(stored[1]["machine"]), stored[1]["bytes"], stored[1]["until_s"]) == (256, 0, 0.0)
    (event,) = fleet.events(workload, "workload.left_files")
    assert (event["detail"]["bytes"], event["detail"]["path"]) == (3_000_000, "/state/run?")


def test_outputs_that_were_not_stored(fleet: World) -> None:
    """They are in the attempt and an event. A path that another task has made is not missing."""
    workload = fleet.running()
    missing, large = UnstoredOutput("model", "out does not exist", is_missing=True), UnstoredOutput("log\0", "x" * 9999)
    progress = [TaskProgress("main", 0, unstored=[missing, large]), TaskProgress("main", 1)]
    fleet.release(workload, Phase.SUCCEEDED, progress=progress)
    assert fleet.attempt(workload).unstored == [{"job": "main", "task": 0, "name": "log", "why": "x" * 2000}]
    (event,) = fleet.events(workload, "workload.outputs_not_stored")
    assert (event["detail"]["outputs"], event["detail"]["name"]) == (1, "log")


def _attempt() -> Attempt:
    return Attempt(workload="w", attempt=1, region="r", plan={}, gpu_types={}, cpus_milli=0)


def test_progress_only_goes_forward() -> None:
    """The newest progress of all tasks is kept; older reports do not overwrite it."""
    attempt = _attempt()
    assert set_progress(attempt, [TaskProgress("a", 0, step=5), TaskProgress("a", 1, step=7, resumed_step=2)])
    assert (attempt.last_step, attempt.resumed_step, attempt.checkpoint_step) == (7, 2, None)
    late = TaskProgress("a", 0, step=6, checkpoint_step=6, checkpoint_at_s=100.0, checkpoint_bytes=1, checkpoint_s=0.5)
    assert set_progress(attempt, [late])
    assert (attempt.last_step, attempt.checkpoint_step, attempt.checkpoint_bytes) == (7, 6, 1)
    older = TaskProgress("a", 0, checkpoint_step=3, checkpoint_at_s=200.0, checkpoint_bytes=9)
    assert not set_progress(attempt, [older, TaskProgress("a", 1)])
    assert (attempt.checkpoint_step, attempt.checkpoint_bytes) == (6, 1)
    assert not set_progress(attempt, [])
    assert set_progress(attempt, [TaskProgress("a", 0, step=8), TaskProgress("a", 1, step=9, metrics={"loss": 0.5})])
    assert [(step, metrics) for step, _, metrics in attempt.curve or []] == [(7, {}), (9, {"loss": 0.5})]


def test_a_save_counts_once_if_the_clock_of_its_task_is_ahead() -> None:
    """Each heartbeat repeats the report of the newest checkpoint. Its time and its cost are those of the first one."""
    attempt = _attempt()
    ahead_s = datetime.now(UTC).timestamp() + 3600
    times = []
    for step in (5, 5, 5, 6):
        told = TaskProgress(
            "a", 0, step=step, checkpoint_step=step, checkpoint_at_s=ahead_s, checkpoint_bytes=100,
            checkpoint_write_s=2.0, checkpoint_sent_bytes=10 * step,
        )  # fmt: skip
        set_progress(attempt, [told])
        times.append(attempt.checkpoint_at)
    assert attempt.saves == [[50, 2.0], [60, 2.0]]
    first, second, third, next_save = times
    assert first == second == third
    assert first is not None and next_save is not None and first < next_save


@pytest.mark.parametrize("at_s", [1e18, 1e300, 4e9])
def test_a_checkpoint_from_the_future_counts_as_made_now(fleet: World, at_s: float) -> None:
    """A checkpoint time in the future is replaced by the current time, and the attempt can be released."""
    workload = fleet.running()
    fleet.release(workload, Phase.PREEMPTED, progress=[TaskProgress("a", 0, checkpoint_step=1, checkpoint_at_s=at_s)])
    saved = fleet.attempt(workload).checkpoint_at
    assert saved is not None and abs(saved.timestamp() - datetime.now(UTC).timestamp()) < 60


def test_a_machine_that_keeps_failing_gangs_is_cordoned(fleet: World) -> None:
    """After two consecutive gangs blame a machine, it is cordoned with a reason and one event; others are not."""
    for failures in (1, 2):
        workload = fleet.running(job(tasks=2), ago_s=0.0)
        fleet.release(workload, Phase.PENDING, blames=M1)
        with fleet.session() as session:
            machine, other = session.get_one(Machine, M1), session.get_one(Machine, M2)
            assert (machine.failed_gangs, other.failed_gangs) == (failures, 0)
            assert (machine.cordon is not None) == (failures == 2) and other.cordon is None
        fleet.change(workload, Phase.CANCELLED)
    assert machine.cordon is not None
    assert machine.cordon["code"] == "keeps_failing_gangs"
    assert machine.cordon["detail"] == {"failures": 2, "workload": workload}
    (event,) = fleet.events(kind="machine.cordoned")
    assert event["machine"] == M1 and event["reason"] == machine.cordon
    waits = fleet.submit(job(tasks=2))
    fleet.tick()
    assert fleet.waiting(waits) == ["no_hardware r"]


def test_gangs_that_fail_together_count_once(fleet: World) -> None:
    """Gangs that lose their machine together count as one failure; a gang placed there later counts again."""
    fleet.alter(Machine, M1, gpus=4)
    fleet.alter(Machine, M2, cordon={"code": "cordoned_by_operator", "detail": {}})
    together = [fleet.running(job()) for _ in range(3)]
    for workload in together:
        fleet.release(workload, Phase.PENDING, blames=M1)
        fleet.change(workload, Phase.CANCELLED)
    with fleet.session() as session:
        machine = session.get_one(Machine, M1)
        assert (machine.failed_workloads, machine.cordon) == (together[:1], None)
    later = fleet.running(job(), ago_s=0.0)
    fleet.release(later, Phase.PENDING, blames=M1)
    with fleet.session() as session:
        machine = session.get_one(Machine, M1)
        assert machine.failed_workloads == [together[0], later] and machine.cordon is not None


def test_an_attempt_whose_tasks_may_run_is_not_released_as_unstarted(fleet: World) -> None:
    """Releasing an attempt as unstarted fails for good, without changes, if its phase says that tasks may run."""
    for phase in (Phase.PROVISIONING, Phase.RUNNING, Phase.CHECKPOINTING):
        workload = fleet.submit(job())
        fleet.tick()
        for passed in (Phase.PROVISIONING, Phase.RUNNING, Phase.CHECKPOINTING):
            fleet.change(workload, passed)
            if passed is phase:
                break
        before = fleet.dump()
        with pytest.raises(ApplicationError, match="may run") as caught:
            fleet.release(workload, Phase.PREEMPTED, unstarted=True)
        assert caught.value.non_retryable and caught.value.type == TASKS_MAY_RUN
        assert fleet.dump() == before
        fleet.release(workload, Phase.PREEMPTED)
        fleet.change(workload, Phase.CANCELLED)
        placed = fleet.submit(job(tasks=2))
        fleet.tick()
        fleet.release(placed, Phase.PREEMPTED, unstarted=True)
        fleet.change(placed, Phase.CANCELLED)


def test_a_single_machine_may_run_tasks_as_soon_as_it_is_awarded(fleet: World) -> None:
    """An attempt on one machine may not be released as unstarted once placed: its tasks start right after the award.

    It may be while it still waits for slots of victims, because no agent was asked to start tasks.
    """
    victims = [fleet.running(job(), level=5) for _ in range(2)]
    waiting = fleet.submit(job())
    fleet.tick()
    fleet.release(waiting, Phase.PREEMPTED, unstarted=True)
    for victim in victims:
        fleet.release(victim, Phase.SUCCEEDED)
    fleet.tick()
    before = fleet.dump()
    with pytest.raises(ApplicationError, match="may run"):
        fleet.release(waiting, Phase.PREEMPTED, unstarted=True)
    assert fleet.dump() == before
    fleet.release(waiting, Phase.PREEMPTED)


def test_one_workload_never_cordons_two_machines(fleet: World) -> None:
    """A workload counts once for a machine, however often it fails there, and not at all after it cordoned another."""
    bad = fleet.running(job(tasks=2))
    for _ in range(3):
        fleet.release(bad, Phase.PENDING, blames=M1)
        fleet.tick()
        fleet.run(bad)
    with fleet.session() as session:
        machine = session.get_one(Machine, M1)
        assert (machine.failed_gangs, machine.failed_workloads, machine.cordon) == (1, [bad], None)
    fleet.change(bad, Phase.CHECKPOINTING)
    fleet.release(bad, Phase.PENDING)
    other = fleet.submit(job(tasks=2), level=3)
    fleet.alter(Workload, bad, held_by="a test")
    fleet.tick()
    fleet.release(other, Phase.PENDING, blames=M1)
    with fleet.session() as session:
        machine = session.get_one(Machine, M1)
        assert machine.failed_workloads == [bad, other] and machine.cordon is not None
    fleet.change(other, Phase.CANCELLED)
    # A job of one task on the remaining machine.
    single = fleet.submit(job(tasks=1))
    fleet.tick()
    with fleet.session() as session:
        session.get_one(Machine, M1).failed_workloads = [single, other]
    fleet.release(single, Phase.PENDING, blames=M2)
    with fleet.session() as session:
        assert session.get_one(Machine, M2).failed_gangs == 0


def test_a_success_forgets_the_failures(fleet: World) -> None:
    """Only consecutive failures count: a success on the machine resets the count, a preemption does not."""
    ends = [(Phase.PENDING, M1), (Phase.PREEMPTED, None), (Phase.SUCCEEDED, None), (Phase.PENDING, M1)]
    for phase, blamed in ends:
        workload = fleet.running(job(tasks=2))
        fleet.release(workload, phase, blames=blamed)
        if phase is not Phase.SUCCEEDED:
            fleet.change(workload, Phase.CANCELLED)
    with fleet.session() as session:
        machine = session.get_one(Machine, M1)
        assert (machine.failed_gangs, machine.cordon) == (1, None)


def test_a_machine_that_the_gang_did_not_use_is_not_blamed(fleet: World) -> None:
    """Blame for a machine on which the attempt held nothing is ignored."""
    workload = fleet.running(job(tasks=1))
    (own,) = fleet.holdings(workload)
    fleet.release(workload, Phase.PENDING, blames=M2 if own == M1 else M1)
    with fleet.session() as session:
        assert [session.get_one(Machine, m).failed_gangs for m in (M1, M2)] == [0, 0]


def test_a_gang_that_runs_says_since_when(fleet: World) -> None:
    """The row and the event of `running` have the same reason, with the start time of the attempt."""
    workload = fleet.submit(job())
    fleet.tick()
    fleet.change(workload, Phase.PROVISIONING)
    fleet.change(workload, Phase.RUNNING)
    reason, started_at = fleet.workload(workload).reason, fleet.attempt(workload).started_at
    assert reason is not None and started_at is not None
    assert reason["code"] == "running" and reason["detail"]["since"] == started_at.astimezone(UTC).isoformat(
        timespec="seconds"
    )
    (event,) = fleet.events(workload, "workload.running")
    assert event["reason"] == reason
