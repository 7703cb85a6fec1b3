"""The simulator on the scheduler's own packages gives the same events as on the reference implementations."""

from dataclasses import replace
from math import inf
from typing import Any

import pytest

from research.traces.synthetic import events_per_s, synthetic
from simulation.errors import SimulationError
from simulation.policies import POLICIES
from simulation.settings import SimulationSettings
from tests.depth import examples
from tests.simulation.scenarios import SURE, happenings, machines, random_scenario, scenario, tenant, when, workload

SEEDS = range(max(3, examples(8)))  # Fewer scenarios may have too few evictions and refusals.
QUICK = SimulationSettings(
    provisioning_p50_s=20, provisioning_p90_s=30, provisioning_p99_s=40, eviction_s=30, flush_succeeds=0.5,
    reserve_after_s=inf, grow=False,
)  # fmt: skip


def _cases() -> list[Any]:
    """Returns all policies on all scenarios; those after the first scenario are long."""
    return [
        pytest.param(policy, seed, marks=[] if seed == SEEDS[0] else pytest.mark.long)
        for seed in SEEDS
        for policy in sorted(POLICIES)
    ]


@pytest.mark.parametrize(("policy", "seed"), _cases())
def test_both_engines_do_the_same(policy: str, seed: int) -> None:
    """Every event of a run, with its time, place and machines, is the same in both engines."""
    scene = random_scenario(seed, QUICK)
    fast, seen = happenings(scene, policy)
    plain, expected = happenings(scene, policy, plain=True)
    assert seen == expected
    assert fast.meter.total == plain.meter.total
    assert fast.simulator.progress == plain.simulator.progress
    assert fast.simulator.progress.finished > 20


def test_random_scenarios_evict_and_refuse() -> None:
    """The random scenarios include evictions, over-quota workloads and waiting workloads."""
    outcomes = [happenings(random_scenario(seed, QUICK))[0] for seed in SEEDS]
    assert sum(run.meter.total.preemptions for run in outcomes) > 20
    assert any(over and count for run in outcomes for (_, over), count in run.meter.total.until["award"].judged.items())
    assert any(
        wait > 60 for run in outcomes for waits in run.meter.total.until["award"].waits_s.values() for wait in waits
    )


def test_a_synthetic_scenario_is_for_both_engines() -> None:
    """A synthetic scenario depends only on its seed, and gives the same events in both engines."""
    scene = synthetic(60, machines=6, load=4.0)
    assert scene == synthetic(60, machines=6, load=4.0) != synthetic(60, seed=1, machines=6, load=4.0)
    fast, seen = happenings(scene)
    assert seen == happenings(scene, plain=True)[1]
    assert fast.meter.total.queued_gpu_s > 0 and max(w.gpus for w in scene.workloads) == 12
    assert all(events_per_s(scene, POLICIES["global"], plain=plain, most=20) > 0 for plain in (False, True))


def test_the_references_reserve_nothing() -> None:
    """The reference engine rejects a setting that asks for reservations."""
    with pytest.raises(SimulationError, match="reserve_after_s: 3600: must be inf for the reference engine"):
        happenings(scenario(machines("east", 1), [workload("w")]), plain=True)


def test_who_may_reserve_or_be_gone_in_time_is_asked_for_itself() -> None:
    """A cached refusal does not apply to a workload that has waited longer or has a shorter maximum runtime."""
    keeper = replace(workload("keeper", duration_s=5000, level=1, tenant="old"), max_runtime_s=5000)
    late = workload("late", tasks=2, submit_s=10, level=2, tenant="old")
    early = workload("early", tasks=2, submit_s=400, level=2, tenant="new")
    slow = workload("slow", submit_s=400, level=3, tenant="new")
    quick = replace(workload("quick", submit_s=401, duration_s=500, level=3, tenant="new"), max_runtime_s=600)
    tenants = [tenant("old", a100=32), tenant("new", a100=32)]
    patient = SURE.model_copy(update={"reserve_after_s": 100.0, "batch": 1})
    awarded = when(
        happenings(scenario(machines("east", 2), [keeper, late, early, slow, quick], tenants, patient))[1], "awarded"
    )
    assert awarded["quick"] == 401
    assert awarded["slow"] > awarded["early"] >= 5000
    assert awarded["slow"] > awarded["late"] >= 5000
