"""Bids by example: packing, the choice of victims, lost work and refusals, one rule per test."""

from dataclasses import replace

import pytest

from domain.scheduling import (
    Bid,
    Holding,
    JobRequest,
    MachineState,
    MoveCost,
    PlacementRequest,
    Plan,
    RegionSnapshot,
    RunningWorkload,
)
from reference.bids import best
from reference.bids import bid as reference_bid
from rms.award import StalePlan, award
from rms.bid import bid, bid_in
from rms.gang import Planner
from rms.region import RegionColumns

from .fleets import GIB, gpu_job, machine, plan_of, region, request, running


def _machines(answer: Bid) -> dict[str, int]:
    """Returns the number of tasks by machine of a plan with one job."""
    (placement,) = plan_of(answer).jobs
    return dict(placement.machines)


# ------------------------------------------------------------------------------------------------------------- packing


def test_a_small_task_does_not_break_up_an_idle_machine() -> None:
    """A 1-GPU task goes to the machine with the smallest fragment, an 8-GPU task to the idle machine."""
    snapshot = region([machine("idle"), machine("half", used=4), machine("rest", used=7), machine("full", used=8)])
    assert _machines(bid(snapshot, request(gpu_job(1, 1)))) == {"rest": 1}
    assert _machines(bid(snapshot, request(gpu_job(3, 1)))) == {"half": 3}
    assert _machines(bid(snapshot, request(gpu_job(1, 8)))) == {"idle": 1}


def test_whole_machines_first_and_best_fit_for_the_rest() -> None:
    """Ten 1-GPU tasks fill the idle machine, and the other two use a fragment instead of another large machine."""
    snapshot = region([machine("a", used=1), machine("b"), machine("c", used=6)])
    assert _machines(bid(snapshot, request(gpu_job(10, 1)))) == {"b": 8, "c": 2}


def test_one_rack_before_fewer_machines_elsewhere() -> None:
    """A job that fits in one rack stays in it; the rack with the fewest machines is chosen, then the smallest."""
    snapshot = region(
        [
            machine("a1", rack="a"),
            machine("b1", rack="b", used=4),
            machine("b2", rack="b", used=4),
            machine("b3", rack="b", used=4),
            machine("c1", rack="c", used=2),
            machine("c2", rack="c", used=2),
        ]
    )
    assert _machines(bid(snapshot, request(gpu_job(12, 1)))) == {"c1": 6, "c2": 6}
    assert _machines(bid(snapshot, request(gpu_job(3, 4)))) == {"b1": 1, "b2": 1, "b3": 1}


def test_the_largest_racks_first_beyond_one_rack() -> None:
    """A job larger than any rack takes the largest rack completely, and the best fit for the rest."""
    machines = [machine(f"a{n}", rack="a") for n in range(2)]
    machines += [machine(f"b{n}", rack="b") for n in range(3)]
    machines += [machine("c0", rack="c", used=5), machine("c1", rack="c")]
    assert _machines(bid(region(machines), request(gpu_job(26, 1)))) == {"b0": 8, "b1": 8, "b2": 8, "c0": 2}


def test_a_job_without_gpus_leaves_gpu_machines_alone() -> None:
    """CPU tasks go to machines without GPUs, and to other machines only if those are not enough."""
    machines = [machine("gpu", cpus_milli=8000), machine("cpu", 0, gpu_type=None, cpus_milli=4000)]
    job = JobRequest("load", 2, 0, (), 2000, GIB)
    few = plan_of(bid(region(machines), request(job)))
    assert few.jobs[0].machines == (("cpu", 2),) and few.jobs[0].gpu_type is None
    assert _machines(bid(region(machines), request(JobRequest("load", 3, 0, (), 2000, GIB)))) == {"gpu": 3}


def test_the_preferred_type_before_fewer_machines() -> None:
    """The first accepted GPU type is used although another type would need fewer machines."""
    machines = [machine("a1", 4), machine("a2", 4), machine("h", 8, gpu_type="h100")]
    both = gpu_job(8, 1, "a100", "h100")
    assert _machines(bid(region(machines), request(both))) == {"a1": 4, "a2": 4}
    assert _machines(bid(region(machines), request(gpu_job(8, 1, "h100", "a100")))) == {"h": 8}


def test_a_job_stays_in_one_cluster_and_jobs_may_be_in_two() -> None:
    """Two jobs of four GPUs fit in two clusters of four; one job of eight does not."""
    machines = [machine("m1", 4, cluster="c1"), machine("m2", 4, cluster="c2")]
    two = request(gpu_job(4, 1, name="one"), gpu_job(4, 1, name="two"))
    assert [p.cluster for p in plan_of(bid(region(machines), two)).jobs] == ["c1", "c2"]
    assert bid(region(machines), request(gpu_job(8, 1))).plan is None


# ------------------------------------------------------------------------------------------------------------- victims


def test_ten_gpus_from_four_five_and_twelve() -> None:
    """To free 10 GPUs from victims with 4, 5 and 12 GPUs, scanned in this order, only the one with 12 is evicted."""
    machines = [machine("m1", 16, used=16), machine("m2", 5, used=5)]
    workloads = [
        running("four", ("m1", 4), started_at_s=1.0),
        running("five", ("m2", 5), started_at_s=2.0),
        running("twelve", ("m1", 12), started_at_s=3.0),
    ]
    plan = plan_of(bid(region(machines, workloads), request(gpu_job(10, 1))))
    assert plan.victims == ("twelve",)
    assert plan.jobs[0].machines == (("m1", 10),)


def test_a_job_without_gpus_measures_victims_by_their_cpus() -> None:
    """For a CPU job, the victim with more CPUs is chosen, although the other has more GPUs."""
    place = MachineState("m", "c1", "r1", "a100", 8, 0, 0, 0, 64_000, 64 * GIB)
    workloads = (
        RunningWorkload("gpus", 8, 1.0, (Holding("m", 7, 24_000, 0),), 0.0),
        RunningWorkload("cpus", 8, 2.0, (Holding("m", 1, 40_000, 0),), 0.0),
    )
    snapshot = RegionSnapshot("here", 1000.0, (place,), workloads)
    assert plan_of(bid(snapshot, request(JobRequest("load", 5, 0, (), 8000, 0)))).victims == ("cpus",)


def test_an_overdrawn_machine_takes_nothing_from_the_others() -> None:
    """A machine whose free resources are negative gets no tasks and does not reduce the space on others."""
    assert _machines(bid(region([machine("over", used=16), machine("m")]), request(gpu_job(8, 1)))) == {"m": 8}


def test_the_lowest_priority_goes_first() -> None:
    """The lowest priority is evicted first: over-quota before level 7 before level 6, whatever their runtimes."""
    machines = [machine(f"m{rank}", used=8) for rank in (6, 7, 8)]
    workloads = [running(f"w{rank}", (f"m{rank}", 8), rank=rank, started_at_s=rank) for rank in (6, 7, 8)]
    assert plan_of(bid(region(machines, workloads), request(gpu_job(1, 8)))).victims == ("w8",)
    assert plan_of(bid(region(machines, workloads), request(gpu_job(2, 8)))).victims == ("w7", "w8")


def test_of_equal_priority_the_longest_running_goes() -> None:
    """Of equal priorities, the longest-running workload is evicted, so that new ones are protected."""
    machines = [machine("m1", used=8), machine("m2", used=8)]
    workloads = [running("new", ("m1", 8), started_at_s=500.0), running("old", ("m2", 8), started_at_s=5.0)]
    assert plan_of(bid(region(machines, workloads), request(gpu_job(1, 8)))).victims == ("old",)


@pytest.mark.parametrize(
    ("victim", "asking"),
    [
        (running("w", ("m", 8), rank=3), request(gpu_job(1, 8), rank=3)),
        (running("w", ("m", 8), rank=2), request(gpu_job(1, 8), rank=3)),
        (running("w", ("m", 8), rank=8), request(gpu_job(1, 8), rank=8)),
        (running("w", ("m", 8), rank=8, evictable=False), request(gpu_job(1, 8), rank=3)),
        (running("w", ("m", 8), rank=8), request(gpu_job(1, 8), rank=3, may_not_evict=frozenset({"w"}))),
    ],
    ids=["equal", "higher", "both over-quota", "protected", "it evicted us"],
)
def test_who_may_not_be_evicted(victim: RunningWorkload, asking: PlacementRequest) -> None:
    """A workload of equal or higher priority, a protected one, and an evictor of this workload are not evicted."""
    answer = bid(region([machine("m", used=8)], [victim]), asking)
    assert answer.plan is None
    assert answer.reasons[0].detail["evictable"] == 0


def test_who_is_immune_is_not_evicted() -> None:
    """While `second` is immune to its former victim `first`, `first` does not evict it even with a higher rank."""
    place = [machine("m", used=8)]
    second = bid(region(place, [running("first", ("m", 8), rank=8)]), request(gpu_job(1, 8), rank=5))
    assert plan_of(second).victims == ("first",)
    now = region(place, [running("second", ("m", 8), rank=5)])
    assert plan_of(bid(now, request(gpu_job(1, 8), rank=2))).victims == ("second",)
    back = request(gpu_job(1, 8), rank=2, may_not_evict=frozenset({"second"}))
    assert bid(now, back).plan is None


def test_equals_of_a_tenant_do_not_evict_each_other() -> None:
    """Over-quota work is evicted within its tenant by better levels only, and by every level of other tenants."""
    place, wide = [machine("m", used=8)], replace(running("wide", ("m", 8), rank=11), tenant="t")
    asking = [replace(request(gpu_job(1, 2), rank=rank), tenant="t") for rank in (4, 5, 3)]
    made = [bid(region(place, [wide]), one) for one in (*asking, replace(asking[0], tenant="u"))]
    assert [answer.plan is None for answer in made] == [True, True, False, False]
    assert str(made[0].reasons[0]) == (
        "insufficient_capacity: region here can now place 0 of 1 task of job train; no workload of lower priority can"
        " be evicted; it does not evict 1 over-quota workload of its own tenant with an equal or better level"
    )
    columns = RegionColumns.of(region(place, [wide]))
    with pytest.raises(StalePlan, match="'wide' is not an evictable"):
        award(columns, plan_of(made[3]), asking[0])


def test_a_region_may_have_one_over_quota_rank() -> None:
    """With one rank for all over-quota work (MAST), its levels are unknown, so the rule does not apply."""
    columns = RegionColumns("here", flat_over_quota=True)
    columns.put_machine(machine("m", used=8))
    columns.refresh(0.0)
    columns.put_running(replace(running("wide", ("m", 8), rank=8), tenant="t"))
    columns.refresh(0.0)
    asking = replace(request(gpu_job(1, 2), rank=4), tenant="t")
    assert plan_of(bid_in(Planner(columns), asking)).victims == ("wide",)


def test_memory_and_cpus_count_too() -> None:
    """A task that finds GPUs but no memory evicts the workload that holds the memory."""
    place = MachineState("m", "c1", "r1", "a100", 8, 4, 64_000, 0, 64_000, 64 * GIB)
    hog = RunningWorkload("hog", 8, 0.0, (Holding("m", 4, 0, 64 * GIB),), 0.0)
    job = JobRequest("train", 1, 1, ("a100",), 0, GIB)
    assert plan_of(bid(region([place], [hog]), request(job))).victims == ("hog",)


def test_a_cluster_where_less_work_is_lost() -> None:
    """Of equal victims in two clusters, the one with the more recent checkpoint is evicted."""
    machines = [machine("m1", used=8, cluster="c1"), machine("m2", used=8, cluster="c2")]
    workloads = [running("stale", ("m1", 8), checkpoint_at_s=100.0), running("fresh", ("m2", 8), checkpoint_at_s=990.0)]
    plan = plan_of(bid(region(machines, workloads), request(gpu_job(1, 8))))
    assert plan.victims == ("fresh",)
    assert plan.quality.lost_gpu_s == 80.0


def test_what_a_victim_holds_elsewhere_serves_the_next_job() -> None:
    """A victim is evicted completely: the second job uses the machines that the first job's victim frees elsewhere."""
    machines = [machine("m1", used=8, cluster="c1"), machine("m2", used=8, cluster="c2", gpu_type="h100")]
    wide = running("wide", ("m1", 8), ("m2", 8))
    two = request(gpu_job(1, 8, name="one"), gpu_job(1, 8, "h100", name="two"))
    plan = plan_of(bid(region(machines, [wide]), two))
    assert plan.victims == ("wide",)
    assert [p.machines for p in plan.jobs] == [(("m1", 1),), (("m2", 1),)]


def test_a_victim_that_a_later_job_makes_needless_is_spared() -> None:
    """The first job's victim is dropped if the second job's victim frees enough for both."""
    machines = [machine("m1", 4, used=4), machine("m2", 8, used=8), machine("m3", 4, used=4, gpu_type="h100")]
    workloads = [
        running("small", ("m1", 4), rank=8, started_at_s=1.0),
        running("wide", ("m2", 8), ("m3", 4), rank=7, started_at_s=2.0),
    ]
    two = request(gpu_job(1, 4, name="one"), gpu_job(1, 4, "h100", name="two"))
    plan = plan_of(bid(region(machines, workloads), two))
    assert plan.victims == ("wide",)
    assert [p.machines for p in plan.jobs] == [(("m2", 1),), (("m3", 1),)]


def test_a_plan_anew_that_would_block_a_later_job_is_not_taken() -> None:
    """An earlier job does not move to a later job's victim if the later job would then not fit."""
    machines = [
        machine("a1", 4, cluster="a", rack="r1"),
        machine("a2", 4, cluster="a", rack="r2"),
        machine("b1", 8, used=8, cluster="b", memory_bytes=128 * GIB),
    ]
    large = JobRequest("large", 1, 8, ("a100",), 0, 100 * GIB)
    plan = plan_of(bid(region(machines, [running("w", ("b1", 8))]), request(gpu_job(8, 1, name="spread"), large)))
    assert [p.machines for p in plan.jobs] == [(("a1", 4), ("a2", 4)), (("b1", 1),)]
    assert plan.victims == ("w",)


# ------------------------------------------------------------------------------------------------------------ refusals


def test_no_hardware_is_told_for_every_job() -> None:
    """Every job that fits in no empty cluster is named with its needs, whatever is free."""
    jobs = (
        gpu_job(1, 1, name="fits"),
        gpu_job(2, 8, "a100", "h100", name="wide"),
        JobRequest("big", 1, 0, (), 500, 99 * GIB),
    )
    answer = bid(region([machine("m", used=8)]), request(*jobs))
    said = "no_hardware: region here has no cluster whose machines can hold job"
    assert [str(reason) for reason in answer.reasons] == [
        f"{said} wide (2 tasks, each with 8 GPUs of type a100 or h100)",
        f"{said} big (1 task with 0.5 CPUs, 99 GiB of memory)",
    ]


def test_no_hardware_names_the_capacity_kinds_that_a_region_lacks() -> None:
    """A region with only lent machines says which kinds a job accepts, though these are the default."""
    lent = replace(machine("m"), capacity="voluntary")
    for answer in (bid, reference_bid):
        (reason,) = answer(region([lent]), request(gpu_job(1, 1))).reasons
        assert str(reason).endswith("(1 task with 1 GPU of type a100, on reserved or on demand or spot machines)")


def test_a_region_without_machines_has_no_hardware() -> None:
    """A region without machines refuses every request."""
    assert [r.code.value for r in bid(region([]), request(gpu_job(1, 1))).reasons] == ["no_hardware"]


def test_insufficient_capacity_in_numbers() -> None:
    """The refusal has the number of tasks of the first job that fit, including evictions."""
    machines = [machine("m1", used=8), machine("m2", used=6), machine("m3", used=8, cluster="c2")]
    workloads = [
        running("low", ("m1", 4), rank=8),
        running("mid", ("m3", 4), rank=7),
        running("high", ("m1", 4), ("m2", 6), ("m3", 4), rank=1),
    ]
    answer = bid(region(machines, workloads), request(gpu_job(2, 1, name="one"), gpu_job(5, 1, name="two"), rank=2))
    (reason,) = answer.reasons
    assert str(reason) == (
        "insufficient_capacity: region here can now place 4 of 5 tasks of job two, even if it evicts 2 workloads"
        " of lower priority"
    )


# ----------------------------------------------------------------------------------------------------------- the award


def test_the_best_plan_is_the_one_that_comes_first() -> None:
    """The best plan has no victims, else less lost work, then the first region name; without plans there is none."""

    def offer(name: str, *workloads: RunningWorkload) -> Plan:
        made = region([machine("m", used=8 if workloads else 0)], list(workloads))
        return plan_of(bid(RegionSnapshot(name, 1000.0, made.machines, made.running), request(gpu_job(1, 8))))

    costly = offer("a", running("w", ("m", 8), checkpoint_at_s=0.0))
    cheap = offer("b", running("w", ("m", 8), checkpoint_at_s=999.0))
    free, twin = offer("d"), offer("c")
    assert best([]) is None
    assert best([costly, cheap]) is cheap
    assert best([costly, free, cheap, twin]) is twin
    assert best([twin, cheap, free, costly]) is twin


# ------------------------------------------------------------------------------------------------ what is displaced


def test_what_it_displaces_goes_first() -> None:
    """Of two workloads of equal rank, the one that the request displaces is evicted, although the other one would be.

    A displaced workload that the request's rank may not evict is not evicted.
    """
    machines = [machine("m1", used=8), machine("m2", used=8)]
    others, own = running("others", ("m1", 8), rank=7), running("own", ("m2", 8), rank=7, started_at_s=500.0)
    snapshot = region(machines, [others, own])
    urgent = request(gpu_job(1, 8), rank=1)
    plain = bid(snapshot, urgent).plan
    assert plain is not None and plain.victims == ("others",)
    told = bid(snapshot, replace(urgent, displaces=frozenset({"own", "elsewhere"}))).plan
    assert told is not None and told.victims == ("own",)
    assert told.quality.victims_by_rank == (0,) * 13 + (1,)
    assert told.quality.key < plain.quality.key
    equal = replace(urgent, rank=7, displaces=frozenset({"own"}))
    assert bid(snapshot, equal).plan is None


def test_ranks_are_as_before_once_a_bid_is_made() -> None:
    """A bid with displaced workloads does not change the region: the next bid equals one on a fresh region."""
    machines = [machine(f"m{k}", used=8) for k in range(3)]
    holders = [running(f"w{k}", (f"m{k}", 8), rank=4 + k, started_at_s=100.0 * k) for k in range(3)]
    snapshot = region(machines, holders)
    planner = Planner(RegionColumns.of(snapshot))
    asked = [request(gpu_job(tasks, 8), rank=rank) for tasks in (1, 2) for rank in (1, 5)]
    for one in asked * 2:
        shoving = replace(one, displaces=frozenset({"w0", "w1"}))
        assert bid_in(planner, shoving) == bid(snapshot, shoving)
        assert bid_in(planner, one) == bid(snapshot, one)


# ---------------------------------------------------------------------------------- work that left an owner's machine


@pytest.mark.parametrize("is_full", [False, True], ids=["free", "evicting"])
def test_a_job_moves_to_the_cluster_with_the_least_score(is_full: bool) -> None:
    """Of two equal clusters the score decides: for each job anew, on the same columns, and as in the reference.

    A cluster outside of the building that the job leaves comes last, however low its score is.
    """
    clusters = ("c1", "c2", "c3")
    machines = [machine(f"in-{c}", used=8 if is_full else 0, cluster=c) for c in clusters]
    victims = [running(f"w-{c}", (f"in-{c}", 8)) for c in clusters] if is_full else []
    snapshot = region(machines, victims)
    planner = Planner(RegionColumns.of(snapshot))
    for best_at in (*clusters, *reversed(clusters)):
        moves = tuple(MoveCost(f"here/{c}", c != best_at, 9 if c == best_at else 5) for c in clusters)
        scores = tuple(MoveCost(f"here/{c}", False, 5 if c == best_at else 9) for c in clusters)
        for own in (moves, scores):
            wanted = request(replace(gpu_job(2, 4), moves=own))
            found = bid_in(planner, wanted)
            assert _machines(found) == {f"in-{best_at}": 2}
            assert found == reference_bid(snapshot, wanted)
    assert _machines(bid_in(planner, request(gpu_job(2, 4)))) == {"in-c1": 2}
