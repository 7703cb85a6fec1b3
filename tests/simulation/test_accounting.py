"""Accounting of work, slots, waits and objectives, on fleets whose figures can be computed by hand."""

from dataclasses import replace

import pytest

from research.rivals.policies import ALL_POLICIES
from simulation.errors import SimulationError
from simulation.ledger import Ledger
from simulation.meter import HOUR_S, Meter
from simulation.settings import SimulationSettings
from tests.simulation.scenarios import SURE, happenings, machines, random_scenario, scenario, when, workload

TWO = [workload("low", level=4), workload("high", level=2, submit_s=250, duration_s=50)]


def test_a_flush_saves_all_work() -> None:
    """A victim whose flush succeeds continues where it was: 250 s are done and 750 s remain."""
    run, seen = happenings(scenario(machines("east", 1), TWO))
    assert when(seen, "finished") == {"high": 310, "low": 310 + 750}
    assert run.to_json()["run"]["lost_gpu_hours_by"] == {"work": 0, "eviction": round(8 * 10 / 3600, 6), "restart": 0}


def test_without_a_flush_it_goes_on_from_its_last_checkpoint() -> None:
    """Without a flush, a victim with checkpoints every 100 s loses the last 50 of 250 s, on 8 GPUs."""
    run, seen = happenings(scenario(machines("east", 1), TWO, settings=replace_settings(flush_succeeds=0)))
    assert when(seen, "finished")["low"] == 310 + 800
    assert run.to_json()["run"]["lost_gpu_hours_by"]["work"] == round(8 * 50 / 3600, 6)
    assert run.to_json()["lost_gpu_hours"] == round(8 * 60 / 3600, 6)


def test_a_restart_is_provisioned_again() -> None:
    """Each attempt waits for its provisioning, and the second attempt's provisioning counts as lost."""
    settings = replace_settings(provisioning_p50_s=20, provisioning_p90_s=20, provisioning_p99_s=20)
    run, seen = happenings(scenario(machines("east", 1), TWO, settings=settings))
    # 20 s provisioned, 230 s worked; 10 s evicted, 20 + 50 s of the evictor; 20 s provisioned, 770 s of work remain.
    assert when(seen, "finished")["low"] == 250 + 10 + 70 + 20 + 770
    assert run.to_json()["run"]["lost_gpu_hours_by"]["restart"] == round(8 * 20 / 3600, 6)


def test_a_victim_may_be_evicted_while_it_is_provisioned() -> None:
    """A victim that is evicted during its provisioning has done no work and starts from the beginning later."""
    settings = replace_settings(provisioning_p50_s=400, provisioning_p90_s=400, provisioning_p99_s=400)
    run, seen = happenings(scenario(machines("east", 1), TWO, settings=settings))
    assert when(seen, "evicted") == {"low": 250}
    assert when(seen, "finished")["low"] == 250 + 10 + 450 + 400 + 1000
    assert run.meter.total.preemptions == 1


def test_age_is_kept_over_preemptions() -> None:
    """A preempted workload keeps its age and comes before a younger workload of its level."""
    younger = workload("younger", submit_s=240)
    seen = happenings(scenario(machines("east", 1), [*TWO, younger]))[1]
    assert when(seen, "awarded")["low"] < when(seen, "awarded")["younger"]


def test_allocation_is_held_over_available() -> None:
    """The allocation rate is the GPU time held over the GPU time available.

    One of two machines is held for 1000 s and the other for 500 s of a run of 1000 s.
    """
    work = [workload("a"), workload("b", duration_s=500)]
    out = happenings(scenario(machines("east", 2), work))[0].to_json()
    assert out["allocation_rate"] == 0.75
    assert out["saturated_allocation_rate"] is None


def test_saturation_is_by_gpu_type_and_needs_more_demand_than_room() -> None:
    """A GPU type is saturated while its queued demand is larger than its free slots.

    8 slots are requested while 4 of 8 are free, so the rate is one half; demand for another GPU type does not count.
    """
    states = machines("east", 1) + machines("east", 1, "v100")
    work = [
        workload("half", gpus=4, duration_s=1000),
        workload("whole", gpus=8, submit_s=400, duration_s=100, level=5),
        workload("other", gpus=8, types=("v100",), duration_s=1100),
    ]
    run = happenings(scenario(states, work))[0]
    assert run.meter.total.saturated_supply_gpu_s == 8 * 600
    assert run.to_json()["saturated_allocation_rate"] == 0.5


def test_queued_and_held_over_supply() -> None:
    """Demand over supply is the GPU time held and queued over the GPU time available.

    8 slots are held for 2000 s and 8 are requested for 1000 s: 24,000 over 16,000 GPU seconds.
    """
    run = happenings(scenario(machines("east", 1), [workload("a"), workload("b")]))[0]
    assert run.to_json()["run"]["demand_over_supply"] == 1.5


def test_objectives_are_judged_at_the_award_or_when_their_time_runs_out() -> None:
    """An objective is judged at the award or when its time is over; level 5 has no objective.

    Two workloads of level 3 have 1800 s: one is awarded in time, the other an hour late.
    """
    work = [
        workload("now", level=3, duration_s=3600),
        workload("late", level=3, submit_s=1, duration_s=10),
        workload("last", level=5, submit_s=2, duration_s=10),
    ]
    run = happenings(scenario(machines("east", 1), work))[0]
    assert run.meter.total.until["award"].judged == {(3, False): 2}
    assert run.meter.total.until["award"].missed == {(3, False): 1}
    assert run.meter.hours[0].until["award"].missed == {(3, False): 1}, "it must be judged at 1801 s, in the first hour"
    waits = run.to_json()["waits"]["within_quota"]
    assert waits["3"] == {"p50": 0, "p95": 3599, "p99": 3599}
    assert waits["5"] == {"p50": 3608, "p95": 3608, "p99": 3608}


def test_a_wait_begins_anew_with_the_notice_of_an_eviction() -> None:
    """The notice of an eviction starts a new wait: evicted at 250 s and awarded at 310 s is a second wait of 60 s."""
    run = happenings(scenario(machines("east", 1), TWO))[0]
    assert run.meter.total.until["award"].judged == {(4, False): 2, (2, False): 1}
    assert run.meter.total.until["award"].waits_s[4, False] == [0, 60]


def test_objectives_are_judged_at_the_start_too() -> None:
    """The wait until the start is judged too; it includes provisioning, the eviction of victims and early evictions."""
    settings = replace_settings(provisioning_p50_s=400, provisioning_p90_s=400, provisioning_p99_s=400)
    run, seen = happenings(scenario(machines("east", 1), TWO, settings=settings))
    started = [
        at for at, what, name in ((e.at_s, e.what, e.workload) for e in seen) if what == "started" and name == "high"
    ]
    start = run.meter.total.until["start"]
    # Awarded immediately, but started after an eviction of 60 s and 400 s of provisioning: its objective is 300 s.
    assert not any(run.meter.total.until["award"].missed.values())
    assert start.missed[2, False] == 1
    assert start.waits_s[2, False] == [started[0] - 250]
    # The other workload was evicted during its provisioning, so its wait began at its submission.
    assert start.judged[4, False] == 1
    [waited_s] = start.waits_s[4, False]
    assert waited_s == pytest.approx(250 + 10 + 450 + 400)


def test_what_still_waits_at_the_end_is_missed_if_its_time_is_over() -> None:
    """At the end of a run, a queued workload past its objective counts as missed, and one before it does not."""
    work = [workload("runs", duration_s=9000), workload("past", submit_s=0.5), workload("fresh", submit_s=1900)]
    run = happenings(scenario(machines("east", 1), work, until_s=2000))[0]
    assert run.meter.total.until["award"].missed == {(4, False): 1}
    assert run.to_json()["run"]["queued_at_end"] == 2
    assert run.to_json()["run"]["ended_s"] == 2000


def test_only_the_measured_span_counts() -> None:
    """Hourly figures cover the whole run, totals only the measured span."""
    work = [workload("a", duration_s=7200), workload("b", submit_s=3600, duration_s=3600)]
    run = happenings(scenario(machines("east", 2), work, measure_from_s=3600.0, measure_to_s=5400.0))[0]
    assert [hour.held_gpu_s / HOUR_S for hour in run.meter.hours] == [8, 16]
    assert run.meter.total.held_gpu_s == 16 * 1800
    assert run.meter.total.until["award"].judged == {(4, False): 1}


def test_hours_add_up_to_the_run() -> None:
    """Every total of a run is the sum of its hours."""
    run = happenings(random_scenario(3, SimulationSettings(eviction_s=30)))[0]
    assert len(run.meter.hours) > 2
    for name in ("held_gpu_s", "supply_gpu_s", "saturated_held_gpu_s", "queued_gpu_s", "preemptions"):
        assert getattr(run.meter.total, name) == pytest.approx(sum(getattr(hour, name) for hour in run.meter.hours))


@pytest.mark.parametrize("policy", sorted(ALL_POLICIES))
def test_nothing_is_held_twice_and_nobody_is_lost(policy: str) -> None:
    """At each event, free and held resources add up on every machine, and every workload is in one phase."""
    scene = random_scenario(7, SimulationSettings(eviction_s=30, flush_succeeds=0.5, checkpoint_interval_s=200))
    run, seen = happenings(scene, policy)
    done = run.simulator.progress
    assert done.workloads == done.arrived == len(scene.workloads)
    assert done.finished + done.queued == done.workloads
    assert len(when(seen, "finished")) == done.finished
    assert set(run.to_json()["run"]["fit_nowhere"]) <= {life.workload.id for life in run.simulator.transitions.states}
    for ledger in run.simulator.transitions.ledgers.values():
        assert ledger.held == {}, "a machine still has an allocation at the end of the run"


def test_a_ledger_refuses_what_another_holds() -> None:
    """A plan that takes a slot of another workload ends the run with an error."""
    run, _ = happenings(scenario(machines("east", 1), [workload("a")]))
    (life,) = run.simulator.transitions.states
    ledger = Ledger(machines("east", 1))
    plan = _plan(life.id)
    ledger.award(plan, life.workload.jobs)
    with pytest.raises(SimulationError, match="and its victims hold"):
        ledger.award(replace(plan, workload="other"), life.workload.jobs)


def test_a_meter_splits_at_hours_and_at_the_measured_span() -> None:
    """A meter splits its figures at hours and at the measured span.

    Half of the supply is held from 0 to 5400 s, and 1800 s of that are measured.
    """
    meter = Meter({"a100": 4}, 1800.0, 3600.0)
    meter.held[0] = 2
    meter.advance(5400)
    assert [hour.held_gpu_s for hour in meter.hours] == [7200, 3600]
    assert meter.total.held_gpu_s == 3600


def replace_settings(**changes: float) -> SimulationSettings:
    """Returns the settings `SURE` with changes."""
    return SURE.model_copy(update=changes)


def _plan(workload_id: str):  # type: ignore[no-untyped-def]
    from domain.criteria import PlanQuality
    from domain.scheduling import JobPlacement, Plan

    quality = PlanQuality(racks=1, machines=1)
    placement = JobPlacement("main", "c1", "a100", (("east/c1/a100-000", 1),))
    return Plan(workload_id, "east", (placement,), (), quality)
