"""The models of other schedulers behave as their documentation says, on small fleets by hand and on random ones."""

from dataclasses import replace

import pytest

from research.rivals import policies
from research.rivals.queues import filled
from simulation.errors import SimulationError
from simulation.hardware import Hardware
from simulation.run import Run
from simulation.workloads import SimulatedWorkload
from tests.depth import few
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
@pytest.mark.parametrize("seed", few(range(6), 2))
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
    """Models of other schedulers reject workloads with several jobs."""
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


def test_slurm_preempts_by_quality_of_service_and_limits_accounts() -> None:
    """The lowest and newest job is requeued for a higher one; an account at its limit waits beside free GPUs."""
    work = [
        workload("old", 8, 0, 2000, level=7, tenant="other"),
        workload("new", 8, 5, 2000, level=7, tenant="other"),
        workload("middle", 8, 5, 2000, level=4, tenant="other"),
        workload("urgent", 8, 50, 1000, level=1, tenant="mine"),
        workload("more", 8, 60, 100, level=1, tenant="mine"),
    ]
    tenants = [tenant("mine", a100=8), tenant("other", a100=24)]
    seen = happenings(scenario(machines("east", 3), work, tenants), "slurm-qos")[1]
    assert when(seen, "evicted") == {"new": 50}
    assert when(seen, "awarded")["more"] == when(seen, "finished")["urgent"]
    seen = happenings(scenario(machines("east", 4), work, tenants), "slurm-qos")[1]
    assert when(seen, "evicted") == {}
    assert when(seen, "awarded")["more"] == when(seen, "finished")["urgent"] == 1050


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


def test_kueue_with_fair_sharing_levels_what_queues_borrow() -> None:
    """A queue that borrows more loses workloads to one that borrows less, until their shares are equal."""
    work = [workload(f"a{k}", 8, k, 5000, tenant="a") for k in range(4)]
    work += [workload(f"b{k}", 8, 100 + k, 5000, tenant="b") for k in range(4)]
    tenants = [tenant("a", a100=0), tenant("b", a100=0)]
    fair, plain = (
        when(happenings(scenario(machines("east", 4), work, tenants), policy)[1], "evicted")
        for policy in ("kueue-fair", "kueue-best-effort")
    )
    assert set(fair) == {"a3", "a2"} and plain == {}


# ---------------------------------------------------------------------------------------------------- KAI and Volcano


def test_shares_are_filled_by_weight_up_to_what_is_requested() -> None:
    """What a queue does not request goes to the others in proportion to their weights."""
    assert filled(12, {"a": 1, "b": 2}, {"a": 100, "b": 100}) == pytest.approx({"a": 4, "b": 8})
    assert filled(12, {"a": 1, "b": 2, "c": 3}, {"a": 100, "b": 2, "c": 4}) == pytest.approx({"a": 6, "b": 2, "c": 4})
    assert filled(12, {"a": 1, "b": 0}, {"a": 5, "b": 0}) == pytest.approx({"a": 5, "b": 0})


@pytest.mark.parametrize("policy", ["kai", "volcano"])
def test_fair_queues_reclaim_shares_and_preempt_within_a_queue(policy: str) -> None:
    """A queue reclaims its quota from one above its share, the lowest priority and the newest workload first.

    Within the queue, a higher priority preempts a lower one.
    """
    work = [
        workload("important", 8, 0, 5000, level=2, tenant="borrower"),
        workload("lent1", 8, 10, 5000, level=4, tenant="borrower"),
        workload("lent2", 8, 20, 5000, level=4, tenant="borrower"),
        workload("back", 8, 100, 5000, level=7, tenant="owner"),
        workload("urgent", 8, 200, 100, level=1, tenant="owner"),
    ]
    tenants = [tenant("borrower", a100=16), tenant("owner", a100=8)]
    seen = happenings(scenario(machines("east", 3), work, tenants), policy)[1]
    evicted = [(one.at_s, one.workload) for one in seen if one.what == "evicted"]
    assert evicted[:2] == [(100, "lent2"), (200, "back")]
    assert when(seen, "awarded")["urgent"] == 200


def test_volcano_keeps_a_queue_at_its_share_and_kai_does_not() -> None:
    """While another queue requests more than is free, a queue above its share gets nothing from Volcano."""
    work = [
        workload("first", 8, 0, 5000, tenant="a"),
        workload("large", 8, 10, 100, tenant="b", tasks=2),
        workload("second", 8, 20, 100, tenant="a"),
    ]
    tenants = [tenant("a", a100=8), tenant("b", a100=8)]
    kai, volcano = (
        when(happenings(scenario(machines("east", 2), work, tenants), policy)[1], "awarded")
        for policy in ("kai", "volcano")
    )
    assert kai["second"] == 20 and volcano["second"] > 20
