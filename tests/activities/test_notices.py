"""Notices in Postgres: messages to workloads, cordoned machines, effects of a reboot, and final progress of tasks."""

import pytest
from sqlalchemy import select

from domain.hazard import hazard_per_h
from domain.lost_work import lost_work_s
from domain.phases import Phase
from domain.protocol.machines import MachineNotice
from domain.protocol.workloads import FlushedRequest, ReleaseRequest
from domain.reasons import Reason, ReasonCode
from domain.task_reports import CadenceReport, LoadReport, NoticeReport, TaskProgress
from infra.db.logs import Outbox
from infra.db.models import Machine
from tests.activities.invariants import check
from tests.activities.staging import stage_launch
from tests.activities.world import World, job

M, OTHER = "r/c/m", "r/c/other"
NOTICE = NoticeReport("aws", "preempt", True, 100.0, 220.0, "terminate")


@pytest.fixture
def fleet(world: World) -> World:
    """One region with a machine of two slots."""
    world.region("r")
    world.machine(M, 2)
    return world


def _row(world: World) -> Machine:
    with world.session() as session:
        return session.get_one(Machine, M)


def test_a_machine_that_its_platform_takes(fleet: World) -> None:
    """Each workload on a reclaimed machine gets one `preempt`; the machine gets no work until its next boot."""
    first, second = fleet.running(), fleet.running()
    for _ in range(2):
        fleet.machines.noticed(MachineNotice(M, "boot-1", NOTICE))
        for workload in (first, second):
            (mail,) = fleet.mail(workload, "preempt")
            assert mail["detail"] == {"machine": M, "code": "platform_notice", **NOTICE.numbers()}
        assert len(fleet.events(kind="machine.notice")) == 1
    assert Reason.from_json(_row(fleet).cordon or {}).code is ReasonCode.PLATFORM_NOTICE
    assert str(Reason.from_json(_row(fleet).cordon or {})) == (
        "platform_notice: aws reclaims machine r/c/m (preempt): terminate"
    )
    fleet.release(first, Phase.PREEMPTED)
    assert fleet.tick().awarded == 0
    # After an operator has uncordoned the machine, a repeated notice does not cordon it again.
    fleet.alter(Machine, M, cordon=None)
    fleet.machines.noticed(MachineNotice(M, "boot-1", NOTICE))
    assert _row(fleet).cordon is None
    fleet.alter(Machine, M, cordon=_row(fleet).notice)
    fleet.release(second, Phase.PREEMPTED)
    hello = fleet.hello(M, 2, incarnation="boot-2")
    fleet.machines.ready(fleet.attend(M, "boot-2", fleet.machines.register(hello).stop))
    assert (_row(fleet).cordon, _row(fleet).notice, _row(fleet).state) == (None, None, "ready")
    assert fleet.tick().awarded == 2
    check(fleet)


def test_a_machine_that_was_only_stopped_takes_work_again(fleet: World) -> None:
    """A machine that returns from hibernation after its loss gets work again, without a reboot."""
    fleet.machines.noticed(MachineNotice(M, "boot-1", NOTICE))
    fleet.machines.register(fleet.hello(M, 2))
    assert _row(fleet).cordon is not None, "a restart of the agent does not uncordon the machine"
    fleet.machines.lost(fleet.attend(M))
    fleet.machines.register(fleet.hello(M, 2))
    assert (_row(fleet).cordon, _row(fleet).notice) == (None, None)


def test_a_boot_leaves_an_operators_cordon(fleet: World) -> None:
    """A reboot removes a notice's cordon, but not an operator's."""
    theirs = Reason(ReasonCode.CORDONED_BY_OPERATOR, {"by": "ada"}).to_json()
    fleet.alter(Machine, M, cordon=theirs)
    fleet.machines.noticed(MachineNotice(M, "boot-1", NOTICE))
    fleet.machines.register(fleet.hello(M, 2, incarnation="boot-2"))
    assert _row(fleet).cordon == theirs


def test_a_tasks_word_is_about_its_own_attempt(fleet: World) -> None:
    """A notice that a task reports affects only its own attempt, and only if the attempt runs on that machine."""
    mine, theirs = fleet.running(), fleet.running()
    fleet.machine(OTHER, 2)
    before = fleet.dump()
    for stranger in (
        MachineNotice(OTHER, "boot-1", NOTICE, f"{mine}.1"),
        MachineNotice(M, "boot-1", NOTICE, f"{mine}.2"),
    ):
        fleet.machines.noticed(stranger)
    fleet.machines.noticed(MachineNotice(M, "an earlier boot", NOTICE))
    fleet.machines.noticed(MachineNotice("r/c/none", "boot-1", NOTICE))
    assert fleet.dump() == before
    fleet.machines.noticed(MachineNotice(M, "boot-1", NOTICE, f"{mine}.1"))
    assert len(fleet.mail(mine, "preempt")) == 1
    assert fleet.mail(theirs, "preempt") == []
    assert (_row(fleet).cordon, _row(fleet).notice) == (None, None)


def _leaves(fleet: World, workload: str, *progress: TaskProgress) -> None:
    """Releases a workload, as its workflow does, while its tasks are still saving."""
    reason = Reason(ReasonCode.PLATFORM_NOTICE, {"machine": M}).to_json()
    fleet.workloads.release(
        ReleaseRequest(workload, 1, Phase.PREEMPTED.value, reason, list(progress), None, [M], flushing_s=7.0)
    )


def test_a_workload_is_placed_elsewhere_while_its_tasks_save(fleet: World) -> None:
    """A workload is placed elsewhere immediately; its old machine gets no work until its tasks have saved and ended."""
    workload = fleet.running(job(gpus=2))
    _leaves(fleet, workload, TaskProgress("main", 0, step=50, checkpoint_step=40, checkpoint_at_s=1e9))
    with fleet.session() as session:
        bodies = session.scalars(select(Outbox.body).where(Outbox.kind == "unconfirmed")).all()
    assert bodies == [{"machine": M, "run": f"{workload}.1", "grace_s": 7.0}]
    assert fleet.tick().awarded == 0
    fleet.machine(OTHER, 2)
    assert fleet.tick().awarded == 1
    assert set(fleet.holdings(workload)) == {OTHER}
    saved = [TaskProgress("main", 0, step=60, checkpoint_step=60, checkpoint_at_s=2e9, checkpoint_s=1.5)]
    for _ in range(2):
        fleet.workloads.flushed(FlushedRequest(workload, 1, saved))
        attempt = fleet.attempt(workload, 1)
        assert (attempt.last_step, attempt.checkpoint_step, attempt.lost_s) == (60, 60, 0.0)
        assert [e["detail"]["step"] for e in fleet.events(workload, "workload.checkpoint")] == [60]
    assert fleet.workload(workload).attempt == 2
    fleet.machines.ready(fleet.attend(M, stop=[f"{workload}.1"]))
    assert _row(fleet).state == "ready"
    check(fleet)


def test_what_tasks_report_is_kept_with_the_attempt(fleet: World) -> None:
    """The attempt stores cadence and notice of the first task that reports them, and the worst load result."""
    workload = fleet.running(job(tasks=2))
    cadence = CadenceReport(805.0, 30.0, 10800.0, 2.0, "hazard")
    progress = [
        TaskProgress("main", 1, step=100, load=LoadReport("failed", "OSError: gone", 2), notice=NOTICE),
        TaskProgress(
            "main", 0, step=110, resumed_step=80, checkpoint_step=90, checkpoint_at_s=1e9, checkpoint_s=0.5,
            checkpoint_write_s=4.0, cadence=cadence, load=LoadReport("loaded"),
        ),
    ]  # fmt: skip
    fleet.release(workload, Phase.PREEMPTED, progress=progress)
    attempt = fleet.attempt(workload)
    assert attempt.cadence == {
        "interval_s": 805.0, "cost_s": 30.0, "mtbf_s": 10800.0, "step_s": 2.0, "source": "hazard",
    }  # fmt: skip
    assert attempt.load == {"state": "failed", "error": "OSError: gone", "skipped": 2}
    assert attempt.notice is not None and attempt.notice["words"] == "terminate"
    assert attempt.checkpoint_write_s == 4.0
    assert attempt.lost_s == 40.0, "20 steps of 2 s"


def test_work_that_came_to_its_end_lost_nothing(fleet: World) -> None:
    """An attempt that completed has no lost work, with or without a checkpoint."""
    workload = fleet.running()
    fleet.release(workload, Phase.SUCCEEDED, progress=[TaskProgress("main", 0, step=100)])
    assert fleet.attempt(workload).lost_s is None


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ({"began_s": None, "saved_s": 5.0, "until_s": 90.0}, 0.0),
        ({"began_s": 10.0, "saved_s": None, "until_s": 90.0}, 80.0),
        ({"began_s": 10.0, "saved_s": 5.0, "until_s": 90.0}, 80.0),
        ({"began_s": 10.0, "saved_s": 60.0, "until_s": 90.0}, 30.0),
        ({"began_s": 10.0, "saved_s": 95.0, "until_s": 90.0}, 0.0),
        ({"began_s": 10.0, "saved_s": 60.0, "until_s": 90.0, "step": 7, "saved_step": 7}, 0.0),
        ({"began_s": 10.0, "saved_s": 60.0, "until_s": 90.0, "step": 8, "saved_step": 7}, 30.0),
        ({"began_s": 10.0, "saved_s": 60.0, "until_s": 90.0, "step": 9, "saved_step": 7, "step_s": 4.0}, 8.0),
        ({"began_s": 10.0, "saved_s": 60.0, "until_s": 90.0, "step": 99, "saved_step": 7, "step_s": 4.0}, 30.0),
        ({"began_s": 10.0, "saved_s": 60.0, "until_s": 90.0, "step": 3, "saved_step": 7, "step_s": 4.0}, 0.0),
    ],
)
def test_lost_work(given: dict[str, float], seconds: float) -> None:
    """Lost work is the time of the steps since the checkpoint if the step time is known, else the time since it."""
    assert lost_work_s(**given) == seconds  # type: ignore[arg-type]


def test_a_hazard_needs_evidence() -> None:
    """Without enough interruptions or machine hours there is no hazard estimate."""
    assert hazard_per_h(0, 1.0) is None
    assert hazard_per_h(1, 1.0) is None
    assert hazard_per_h(2, 999.0) is None
    assert hazard_per_h(3, 35.0) == 0.1
    assert hazard_per_h(0, 1000.0) == 0.0005
    assert hazard_per_h(5, 0.0) is None
    with pytest.raises(ValueError, match="interruptions=-1"):
        hazard_per_h(-1, 1.0)


def test_a_launch_tells_its_tasks_the_hazard_of_their_cluster(fleet: World) -> None:
    """The launch description holds the cluster's hazard once enough interruptions are observed; evictions do not count.

    Interruptions in other clusters of the region do not count: those have another zone or capacity kind.
    """
    fleet.machine("r/quiet/m", 2, gpu_type="h100")
    for number, phase in enumerate([Phase.PENDING] * 3 + [Phase.PREEMPTED]):
        workload = fleet.running(job(gpus=2), ago_s=3600.0)
        if number == 0:
            assert stage_launch(fleet, workload)[1].checkpoint.machine_hazard_per_h is None
        fleet.release(workload, phase)
        fleet.change(workload, Phase.CANCELLED)
    fleet.configure()  # hazards are cached for a minute
    workload = fleet.running(job(gpus=2), ago_s=0.0)
    launch = stage_launch(fleet, workload)[1]
    hazard = launch.checkpoint.machine_hazard_per_h
    assert hazard is not None and abs(hazard - 3.5 / 4) < 0.01
    assert launch.checkpoint.interval_s is None
    elsewhere = fleet.running(job(gpus=2, types=("h100",)), ago_s=0.0)
    assert stage_launch(fleet, elsewhere)[1].checkpoint.machine_hazard_per_h is None


def test_a_launch_tells_its_tasks_the_rates_of_tiers_and_their_peers(fleet: World) -> None:
    """Failures count as losses of processes only after a checkpoint; machines that are lost within ten minutes count as
    lost together. The machines of a gang are peers of each other.
    """
    for number in range(6):
        saved = [] if number < 2 else [TaskProgress("main", 0, step=9, checkpoint_step=9, checkpoint_at_s=1e9)]
        workload = fleet.running(job(gpus=2), ago_s=3600.0)
        fleet.release(workload, Phase.FAILED, progress=saved)
    fleet.configure()
    workload = fleet.running(job(gpus=2), ago_s=0.0)
    launch = stage_launch(fleet, workload)[1]
    process = launch.checkpoint.process_hazard_per_h
    assert process is not None and abs(process - 4.5 / 4) < 0.01
    assert launch.checkpoint.machine_hazard_per_h is None and launch.checkpoint.both_hazard_per_h is None
    assert launch.memory_peers == {}
    fleet.release(workload, Phase.CANCELLED)
    fleet.machine(OTHER, 2)
    gang = job(tasks=2, gpus=2)
    for number in range(4):
        workload = fleet.running(gang, ago_s=3600.0)
        one, other = sorted({task.machine for task in stage_launch(fleet, workload)[1].tasks})
        assert stage_launch(fleet, workload)[1].memory_peers == {one: other, other: one}
        fleet.release(workload, Phase.PENDING, blames=(one, other)[number % 2])
        fleet.change(workload, Phase.CANCELLED)
    fleet.configure()
    launch = stage_launch(fleet, fleet.running(gang, ago_s=0.0))[1]
    # Three losses are followed by one of the other machine; 14 machine hours.
    both = launch.checkpoint.both_hazard_per_h
    assert both is not None and abs(both - 2 * 3.5 / 14) < 0.02
