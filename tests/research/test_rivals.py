"""The Slurm and Kueue policies behave as their documentation says, on small fleets by hand and on random ones."""

from dataclasses import replace

import pytest

from research.rivals import policies
from simulation.errors import SimulationError
from simulation.hardware import Hardware
from simulation.run import Run
from simulation.workloads import SimulatedWorkload
from tests.simulation.scenarios import (
    SURE,
    happenings,
    machines,
    random_scenario,
    scenario,
    tenant,
    when,
    where,
    workload,
)

RIVALS = list(policies.RIVALS)
KUEUES = ["kueue", "kueue-best-effort"]


@pytest.mark.parametrize("policy", RIVALS)
@pytest.mark.parametrize("seed", range(6))
def test_everything_that_fits_is_done_at_last(policy: str, seed: int) -> None:
    """Every workload that fits is finished in the end, and no slot is allocated twice, which the ledgers check."""
    scene = random_scenario(seed, SURE)
    hardware = Hardware(scene.machines)
    possible = [
        w
        for w in scene.workloads
        if any(w.regions is None or region in w.regions for region in hardware.regions_for(w.jobs[0]))
    ]
    seen = happenings(replace(scene, workloads=possible), policy)[1]
    assert len(possible) > 50
    assert set(when(seen, "finished")) == {w.id for w in possible}


@pytest.mark.parametrize("policy", RIVALS)
def test_gangs_of_several_jobs_are_refused(policy: str) -> None:
    """The Slurm and Kueue policies reject workloads with several jobs."""
    one = workload("two-jobs")
    both = SimulatedWorkload(one.id, one.tenant, one.level, 0.0, 0.0, 10.0, one.jobs * 2, None)
    with pytest.raises(SimulationError, match="two-jobs: has several jobs"):
        Run(scenario(machines("east", 2), [both]), policies.RIVALS[policy])


# --------------------------------------------------------------------------------------------------------------- Slurm


def test_slurm_goes_by_level_first_and_preempts_nothing() -> None:
    """The more important of two queued workloads starts first, and running workloads continue."""
    work = [
        workload("runs", 8, 0, 1000, level=7),
        workload("sweep", 8, 10, 100, level=7),
        workload("urgent", 8, 20, 100, level=1),
    ]
    seen = happenings(scenario(machines("east", 1), work), "slurm")[1]
    assert when(seen, "awarded") == {"runs": 0, "urgent": 1000, "sweep": 1100}
    assert when(seen, "evicted") == {}


def test_slurm_fills_in_only_what_does_not_delay_the_first_that_waits() -> None:
    """EASY backfill: a workload is started if it ends before the start of the first queued one, or uses other machines.

    The time limit is the duration plus the P99 of provisioning.
    """
    limit_s = SURE.provisioning_p99_s
    work = [
        workload("runs", 8, 0, 5000, level=4),
        workload("large", 8, 10, 100, level=2, tasks=2),
        workload("long", 8, 20, 5000, level=4),
        workload("short", 8, 30, 5000 - 31 - limit_s, level=4),
    ]
    seen = happenings(scenario(machines("east", 2), work), "slurm")[1]
    started = when(seen, "awarded")
    assert started["short"] < 100 and started["large"] == 5000 and started["long"] > 5000
    beside = [*work[:2], workload("long", 8, 20, 5000, level=4)]
    seen = happenings(scenario([*machines("east", 2), *machines("west", 1)], beside), "slurm")[1]
    assert (when(seen, "awarded")["long"], where(seen)["long"]) == (20, "west")


def test_slurm_prefers_tenants_that_used_less() -> None:
    """Fair share: of equal workloads, the one whose tenant has used less of its quota starts first."""
    work = [
        workload("first", 8, 0, 1000, tenant="greedy"),
        workload("again", 8, 10, 100, tenant="greedy"),
        workload("modest", 8, 20, 100, tenant="modest"),
    ]
    tenants = [tenant("greedy", a100=8), tenant("modest", a100=8)]
    started = when(happenings(scenario(machines("east", 1), work, tenants), "slurm")[1], "awarded")
    assert (started["modest"], started["again"]) == (1000, 1100)


# --------------------------------------------------------------------------------------------------------------- Kueue


@pytest.mark.parametrize("policy", KUEUES)
def test_kueue_lends_and_reclaims(policy: str) -> None:
    """A queue borrows unused quota; its owner reclaims it, first from the least important and newest workload."""
    work = [
        workload("own", 8, 0, 5000, level=4, tenant="borrower"),
        workload("lent1", 8, 10, 5000, level=4, tenant="borrower"),
        workload("lent2", 8, 20, 5000, level=4, tenant="borrower"),
        workload("back", 8, 30, 100, level=7, tenant="owner"),
    ]
    tenants = [tenant("borrower", a100=8), tenant("owner", a100=16)]
    seen = happenings(scenario(machines("east", 3), work, tenants), policy)[1]
    assert when(seen, "awarded")["lent2"] >= 30  # Evicted, and awarded again later.
    assert when(seen, "evicted") == {"lent2": 30}
    assert when(seen, "awarded")["back"] == 30


@pytest.mark.parametrize("policy", KUEUES)
def test_kueue_preempts_lower_priorities_of_its_own_queue_and_nobody_elses_nominal_quota(policy: str) -> None:
    """A workload that runs within the nominal quota of another queue is not preempted, whatever its priority."""
    work = [
        workload("theirs", 8, 0, 2000, level=7, tenant="other"),
        workload("mine", 8, 0, 2000, level=5, tenant="mine"),
        workload("urgent", 8, 10, 100, level=1, tenant="mine"),
        workload("more", 8, 20, 100, level=1, tenant="mine"),
    ]
    tenants = [tenant("mine", a100=8), tenant("other", a100=8)]
    seen = happenings(scenario(machines("east", 2), work, tenants), policy)[1]
    assert when(seen, "evicted") == {"mine": 10}
    assert when(seen, "awarded")["more"] == 120  # After `urgent`, because both have the same priority.


def test_kueue_strict_heads_hold_up_their_queue() -> None:
    """StrictFIFO: no workload of a queue passes its blocked head; BestEffortFIFO: one that fits does.

    Other queues are not affected.
    """
    work = [
        workload("runs", 8, 0, 1000, tenant="mine"),
        workload("large", 8, 10, 100, tenant="mine", tasks=2),
        workload("small", 1, 20, 100, tenant="mine"),
        workload("other", 1, 30, 100, tenant="other"),
    ]
    tenants = [tenant("mine", a100=16), tenant("other", a100=0)]
    strict, best_effort = (
        when(happenings(scenario(machines("east", 2), work, tenants), policy)[1], "awarded") for policy in KUEUES
    )
    assert strict["small"] > 1000 and best_effort["small"] == 20
    assert strict["other"] == best_effort["other"] == 30
