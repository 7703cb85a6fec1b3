"""How often jobs on lent machines are told to save: observed departures, gangs, and what is stored."""

import time
from dataclasses import asdict
from typing import Any

import pytest

from activities.lifecycle.attempt_reports import set_progress
from activities.reclaim.lent_rows import GPU_BYTES
from domain.protocol.machines import MachineNotice
from domain.task_reports import LEAST_SAVE_BYTES, OWNER, BandwidthReport, NoticeReport, TaskProgress
from infra.db.models import Attempt, Cluster, Machine
from infra.db.reclaim import SiteHazard
from infra.db.tenants import Tenant
from tests.activities.owner_departures import depart, paces, pass_hours
from tests.activities.world import World, job

CALM, BUSY, OWNED = "r/lab/calm", "r/hall/busy", "r/own/m"
_BYTES = 3_200_000_000
_STALL_S = 0.5


@pytest.fixture
def fleet(world: World) -> World:
    """Two machines of owners in different buildings, and one of the installation's own."""
    world.region("r")
    for machine in (CALM, BUSY, OWNED):
        world.machine(machine, gpu_type=_gpu_type(machine))
    for cluster in ("lab", "hall"):
        world.alter(Cluster, ("r", cluster), capacity="voluntary")
    return world


def _gpu_type(machine: str) -> str:
    """Returns the type of a machine's GPUs, by which a job chooses it."""
    return machine.rpartition("/")[2]


def _job(world: World, machine: str, **saved: Any) -> str:
    """Runs a job on a machine, whose newest checkpoint has some bytes and took some seconds."""
    gpu_type = _gpu_type(machine)
    with world.session() as session:
        tenant = session.get_one(Tenant, "t")
        tenant.quota_gpus = {**tenant.quota_gpus, gpu_type: 4}
    workload = world.submit(job(types=(gpu_type,)), capacity=("reserved", "voluntary"))
    world.tick()
    world.run(workload)
    assert list(world.holdings(workload)) == [machine]
    values = {"checkpoint_bytes": _BYTES, "checkpoint_write_s": 32.0, "checkpoint_s": _STALL_S, **saved}
    world.alter(Attempt, (workload, 1), **values)
    return workload


def _taken(world: World, machine: str, notice_s: float = 0.0) -> None:
    """Lets the owner of a machine take it back and lend it again."""
    now_s = time.time()
    report = NoticeReport(OWNER, "preempt", True, now_s, now_s + notice_s, "the owner takes the machine back")
    world.machines.noticed(MachineNotice(machine, "boot-1", report))
    world.machine(machine, gpu_type=_gpu_type(machine), word_at_s=time.time())


def test_jobs_on_machines_that_depart_often_save_more_often(fleet: World) -> None:
    """Only jobs on lent machines are told; the interval is equation 9's with the stall, for the hazard told with it."""
    calm, busy = (_job(fleet, machine, checkpoint_write_s=4.0) for machine in (CALM, BUSY))
    _job(fleet, OWNED)
    first = paces(fleet)
    assert sorted(first) == [BUSY, CALM]
    assert [one.run for one in first[CALM].runs] == [f"{calm}.1"]
    for _ in range(8):
        pass_hours(fleet, 1.0)
        _taken(fleet, BUSY)
        after = paces(fleet)
    (of_calm,), (of_busy,) = after[CALM].runs, after[BUSY].runs
    assert of_busy.run == f"{busy}.1"
    assert of_busy.hazard_per_h > 2 * of_calm.hazard_per_h
    assert of_busy.interval_s < of_calm.interval_s
    assert {of_calm.reason, of_busy.reason} <= {"optimum", "network_share", "loss_budget"}
    shares = [(one.hazard_per_h * _BYTES) ** (1 / 3) for one in (of_calm, of_busy)]
    budget = fleet.settings.reclaim.checkpoint_bytes_s / 0.2
    for one, share in zip((of_calm, of_busy), shares, strict=True):
        wanted_s = (2 * _STALL_S / (one.hazard_per_h / 3600)) ** 0.5
        assert one.least_s == pytest.approx(_BYTES / (0.2 * min(_BYTES / 4.0, budget * share / sum(shares))))
        assert one.interval_s == pytest.approx(max(wanted_s, one.least_s), rel=1e-6)


def test_a_background_save_costs_its_stall_and_not_its_transfer(fleet: World) -> None:
    """The cost C of the SDK's cadence counts, else the stall of the newest save, else the whole save, which is most."""
    workload = _job(fleet, CALM)
    fleet.alter(Attempt, (workload, 1), checkpoint_bytes=10_000_000, checkpoint_write_s=4.0)

    def cost_s(cadence_s: float | None, checkpoint_s: float | None) -> float:
        cadence = None if cadence_s is None else {"interval_s": 300.0, "cost_s": cadence_s}
        fleet.alter(Attempt, (workload, 1), cadence=cadence, checkpoint_s=checkpoint_s)
        (pace,) = paces(fleet)[CALM].runs
        assert pace.reason == "optimum"
        return pace.interval_s**2 * pace.hazard_per_h / 3600 / 2

    assert cost_s(0.4, 9.0) == pytest.approx(0.4, rel=1e-3)
    assert cost_s(None, 0.6) == pytest.approx(0.6, rel=1e-3)
    for said in ((None, None), (-1.0, None), (100.0, 0.6)):
        assert cost_s(*said) == pytest.approx(4.0, rel=1e-3)


def test_jobs_share_the_bandwidth_of_their_store(fleet: World) -> None:
    """What jobs of a region that save to the same store write on average, at most, is its budget."""
    jobs = [_job(fleet, machine, checkpoint_write_s=0.1) for machine in (CALM, BUSY)]
    budget = fleet.settings.reclaim.checkpoint_bytes_s

    def used() -> list[float]:
        told = paces(fleet)
        return [_BYTES / told[machine].runs[0].least_s for machine in (CALM, BUSY)]

    assert used() == pytest.approx([budget / 2, budget / 2], rel=1e-3)
    fleet.alter(Attempt, (jobs[0], 1), store_url="s3://lab")
    assert used() == pytest.approx([budget, budget], rel=1e-3)
    fleet.alter(Attempt, (jobs[1], 1), store_url="s3://lab")
    assert used() == pytest.approx([budget / 2, budget / 2], rel=1e-3)


def test_a_save_costs_what_it_writes(fleet: World) -> None:
    """The shortest interval follows from the median of the last saves that tasks report; at first, from the size."""
    workload = _job(fleet, CALM, checkpoint_bytes=None, checkpoint_write_s=None)

    def saved(number: int, sent_bytes: int | None, write_s: float) -> float:
        with fleet.session() as session:
            told = TaskProgress(
                "a", 0, checkpoint_step=number, checkpoint_at_s=float(number), checkpoint_bytes=_BYTES,
                checkpoint_write_s=write_s, checkpoint_sent_bytes=sent_bytes,
            )  # fmt: skip
            for _ in range(2):  # The same save is reported again and again.
                set_progress(session.get_one(Attempt, (workload, 1)), [told])
        (pace,) = paces(fleet)[CALM].runs
        return pace.least_s

    def best(sent_bytes: int, write_s: float) -> float:
        return max(write_s / 0.2, sent_bytes / fleet.settings.reclaim.checkpoint_bytes_s)

    part = _BYTES // 100
    assert saved(1, None, 60.0) == pytest.approx(best(_BYTES, 60.0), rel=1e-3)
    assert saved(2, part, 0.5) == pytest.approx(best(_BYTES, 60.0), rel=1e-3)
    assert saved(3, part, 0.5) == pytest.approx(best(part, 0.5), rel=1e-3)
    # A save of all parts, one of nothing, and one of more than there is change little.
    for number, sent_bytes in enumerate((0, _BYTES, 10 * _BYTES), 4):
        assert saved(number, sent_bytes, 60.0 if sent_bytes else 0.5) == pytest.approx(best(part, 0.5), rel=1e-3)
    for number in (7, 8, 9):
        few = saved(number, 0, 0.5)
    assert few == pytest.approx(best(LEAST_SAVE_BYTES, 0.5), rel=1e-3)
    assert fleet.attempt(workload).saves == [[_BYTES, 60.0]] * 2 + [[0, 0.5]] * 3


@pytest.mark.parametrize("said", [{"checkpoint_bytes": 0}, {"checkpoint_bytes": -5}, {"checkpoint_write_s": 1e-308}])
def test_a_report_that_cannot_be_concerns_no_other_job(fleet: World, said: dict[str, Any]) -> None:
    """A job whose checkpoint has no possible size or time is not told; the others are."""
    _job(fleet, CALM, **said)
    busy = _job(fleet, BUSY)
    assert {machine: [one.run for one in pace.runs] for machine, pace in paces(fleet).items()} == {BUSY: [f"{busy}.1"]}


def test_a_huge_report_takes_no_more_than_the_memory_of_its_job(fleet: World) -> None:
    """A job shares the bandwidth by its size, which counts only up to its memory and that of its GPU."""
    liar = _job(fleet, CALM, checkpoint_bytes=1 << 62, checkpoint_write_s=1.0)
    _job(fleet, BUSY)
    (told,) = paces(fleet)[BUSY].runs
    fleet.alter(Attempt, (liar, 1), checkpoint_bytes=(1 << 20) + GPU_BYTES)
    (of_memory,) = paces(fleet)[BUSY].runs
    assert told.least_s == pytest.approx(of_memory.least_s, rel=1e-3)
    fleet.alter(Attempt, (liar, 1), checkpoint_bytes=_BYTES)
    (of_equals,) = paces(fleet)[BUSY].runs
    assert told.least_s < 10 * of_equals.least_s


def test_the_measured_bandwidth_limits_the_write_speed(fleet: World) -> None:
    """B_eff is the smaller of its mean and the write speed; what is old or not believable does not count."""
    workload = _job(fleet, CALM)
    write_bytes_s = _BYTES / 32.0
    reclaim = fleet.settings.reclaim.model_copy(update={"checkpoint_bytes_s": 10 * write_bytes_s})
    fleet.settings = fleet.settings.model_copy(update={"reclaim": reclaim})

    def least_s(mean_bytes_s: float | None, age_s: float = 0.0) -> float:
        report = None
        if mean_bytes_s is not None:
            report = asdict(BandwidthReport(time.time() - age_s, mean_bytes_s, mean_bytes_s / 2))
        fleet.alter(Attempt, (workload, 1), bandwidth=report)
        (pace,) = paces(fleet)[CALM].runs
        return pace.least_s

    assert least_s(None) == least_s(100 * write_bytes_s) == pytest.approx(5 * 32.0)
    slow = 0.2 * write_bytes_s
    assert least_s(1.06 * slow) == pytest.approx(_BYTES / (0.2 * slow))
    assert least_s(1.06 * slow, age_s=2 * 86400.0) == pytest.approx(5 * 32.0)
    assert least_s(1.0) == pytest.approx(_BYTES / (0.2 * 0.1 * write_bytes_s))


def test_all_tasks_of_a_gang_are_told(fleet: World) -> None:
    """The task that saves may run on a machine that is not lent. Only lent machines add to the hazard."""
    alone = _job(fleet, CALM)
    with fleet.session() as session:
        tenant = session.get_one(Tenant, "t")
        tenant.quota_gpus = {"calm": 4, "m": 4}
    jobs = [job("a", types=("calm",)), job("b", types=("m",))]
    gang = fleet.submit(*jobs, capacity=("reserved", "voluntary"))
    fleet.tick()
    fleet.run(gang)
    fleet.alter(Attempt, (gang, 1), checkpoint_bytes=_BYTES, checkpoint_write_s=32.0)
    told = paces(fleet)
    assert sorted(told) == [CALM, OWNED]
    (there,) = told[OWNED].runs
    hazards = {one.run: one.hazard_per_h for one in told[CALM].runs}
    assert there.run == f"{gang}.1"
    assert hazards[f"{gang}.1"] == hazards[f"{alone}.1"] == there.hazard_per_h


def test_plans_prefer_clusters_that_depart_less_often(fleet: World) -> None:
    """A workload that may run in either building gets the calmer one, however the two are named."""
    for machine in (CALM, BUSY):
        fleet.machine(machine)
    paces(fleet)
    for _ in range(4):
        pass_hours(fleet, 1.0)
        depart(fleet, BUSY)
        paces(fleet)
    with fleet.session() as session:
        calm, busy = (session.get_one(Cluster, ("r", name)).departures_per_h for name in ("lab", "hall"))
    assert busy > 2 * calm > 0
    workload = fleet.submit(job(), capacity=("voluntary",))
    fleet.tick()
    assert list(fleet.holdings(workload)) == [CALM]
    fleet.alter(Cluster, ("r", "hall"), capacity="spot")
    paces(fleet)
    with fleet.session() as session:
        assert session.get_one(Cluster, ("r", "hall")).departures_per_h == 0


def test_announced_departures_are_counted_apart(fleet: World) -> None:
    """A job has time to save after a notice, so only departures without one are emergencies."""
    _job(fleet, CALM)
    paces(fleet)
    before = _state(fleet)
    _taken(fleet, CALM, notice_s=60.0)
    paces(fleet)
    assert _state(fleet)["departures"] == before["departures"] == 0
    with fleet.session() as session:
        site = session.get_one(SiteHazard, "r")
        assert site.noticed is not None and site.noticed["departures"] == 1
        near, _, noticed_near, _ = site.machines[CALM]
        assert noticed_near > 2 * near
    _taken(fleet, CALM)
    paces(fleet)
    paces(fleet)
    assert _state(fleet)["departures"] == 1


def test_a_machine_that_is_lost_has_departed(fleet: World) -> None:
    """A machine that stops answering is one that its owner has switched off."""
    _job(fleet, CALM)
    paces(fleet)
    fleet.machines.lost(fleet.attend(CALM))
    paces(fleet)
    assert _state(fleet)["departures"] == 1
    with fleet.session() as session:
        assert session.get_one(SiteHazard, "r").lent == [BUSY]


def test_exposure_is_the_time_in_which_a_machine_was_lent(fleet: World) -> None:
    """Hours count from one control period to the next, for machines that were lent at the first one."""
    paces(fleet)
    fleet.alter(Machine, BUSY, state="lost")
    pass_hours(fleet, 1.0)
    paces(fleet)
    pass_hours(fleet, 1.0)
    paces(fleet)
    hours = dict(zip(_state(fleet)["nodes"], map(sum, zip(*_state(fleet)["hours"], strict=True)), strict=True))
    assert 1.5 * hours[BUSY] < hours[CALM] < 2.5 * hours[BUSY]


def test_a_job_that_has_not_saved_keeps_its_own_interval(fleet: World) -> None:
    """Without a checkpoint, neither its size nor its write time is known."""
    _job(fleet, CALM, checkpoint_bytes=None)
    assert paces(fleet) == {}


def test_without_lent_machines_nothing_is_stored(world: World) -> None:
    """An installation without owners has no sites."""
    world.region("r")
    world.machine(OWNED)
    assert paces(world) == {}
    with world.session() as session:
        assert session.get(SiteHazard, "r") is None


def _state(world: World) -> dict[str, Any]:
    with world.session() as session:
        return session.get_one(SiteHazard, "r").counts
