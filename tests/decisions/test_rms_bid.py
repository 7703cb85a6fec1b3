"""Bids on random regions: equality with the reference, and invariants of plans."""

from collections import Counter
from dataclasses import replace
from random import Random

from hypothesis import example, given, settings
from hypothesis import strategies as st

from domain.priority import OVER_QUOTA_RANK, level_of
from domain.reasons import ReasonCode
from domain.scheduling import PlacementRequest, Plan, RegionSnapshot
from reference import bids as reference
from rms.bid import bid
from tests.depth import examples

from . import PROPERTY
from .fleets import crowded, regions, requests

SEEDS = st.integers(0, 2**32)
TWO_PASSES = 2874
"""Seed of a region in which a victim can be dropped only after a later victim was dropped."""
LEFT_OUT = 3372
"""Seed of a region in which a victim can be dropped only with machines that were left out."""


@settings(PROPERTY, max_examples=examples(200))
@given(regions(), requests())
def test_equals_the_reference(snapshot: RegionSnapshot, request: PlacementRequest) -> None:
    """The bid equals the reference's bid: plan, victims, quality or reasons."""
    assert bid(snapshot, request) == reference.bid(snapshot, request)


@settings(PROPERTY, max_examples=examples(600))
@given(SEEDS)
@example(TWO_PASSES)
@example(LEFT_OUT)
def test_equals_the_reference_in_a_crowd(seed: int) -> None:
    """The bid equals the reference's if several victims of several jobs are chosen among many."""
    assert bid(*crowded(seed)) == reference.bid(*crowded(seed))


@settings(PROPERTY, max_examples=examples(300))
@given(regions(), requests())
def test_plans_are_safe(snapshot: RegionSnapshot, request: PlacementRequest) -> None:
    """A plan has whole jobs in permitted clusters, overdraws no machine, and evicts only evictable workloads."""
    _check_safe(snapshot, request)


@settings(PROPERTY, max_examples=examples(300))
@given(SEEDS)
@example(TWO_PASSES)
@example(LEFT_OUT)
def test_plans_are_safe_in_a_crowd(seed: int) -> None:
    """Plans are safe if several victims are chosen among many."""
    _check_safe(*crowded(seed))


def _check_safe(snapshot: RegionSnapshot, request: PlacementRequest) -> None:
    answer = bid(snapshot, request)
    assert (answer.plan is None) == bool(answer.reasons)
    if answer.plan is not None:
        _check_whole(snapshot, request, answer.plan)
        _check_room(snapshot, request, answer.plan, set(answer.plan.victims))
        _check_victims(snapshot, request, answer.plan)
        _check_quality(snapshot, request, answer.plan)


def _check_whole(snapshot: RegionSnapshot, request: PlacementRequest, plan: Plan) -> None:
    machines = {m.id: m for m in snapshot.machines}
    assert [p.job for p in plan.jobs] == [job.name for job in request.jobs]
    for placement, job in zip(plan.jobs, request.jobs, strict=True):
        assert job.tasks <= placement.tasks <= (max(job.tasks, job.most_tasks) if not plan.victims else job.tasks)
        assert all(tasks > 0 for _, tasks in placement.machines)
        ids = [machine for machine, _ in placement.machines]
        assert ids == sorted(set(ids))
        assert {machines[id_].cluster for id_ in ids} == set(placement.cluster.split("+"))
        assert "+" not in placement.cluster or job.span_clusters
        if job.gpus_per_task:
            assert placement.gpu_type in job.gpu_types
            assert {machines[id_].gpu_type for id_ in ids} == {placement.gpu_type}
        else:
            assert placement.gpu_type is None


def _fits(snapshot: RegionSnapshot, request: PlacementRequest, plan: Plan, victims: set[str]) -> bool:
    """Returns whether free resources and the holdings of these victims are enough for the plan."""
    room: Counter[tuple[str, str]] = Counter()
    for m in snapshot.machines:
        room.update(
            {(m.id, "gpus"): m.free_gpus, (m.id, "cpus"): m.free_cpus_milli, (m.id, "mem"): m.free_memory_bytes}
        )
    for workload in snapshot.running:
        if workload.id in victims:
            for h in workload.holdings:
                room.update({(h.machine, "gpus"): h.gpus, (h.machine, "cpus"): h.cpus_milli})
                room.update({(h.machine, "mem"): h.memory_bytes})
    jobs = {job.name: job for job in request.jobs}
    for placement in plan.jobs:
        job = jobs[placement.job]
        for machine, tasks in placement.machines:
            room[machine, "gpus"] -= tasks * job.gpus_per_task
            room[machine, "cpus"] -= tasks * job.cpus_milli_per_task
            room[machine, "mem"] -= tasks * job.memory_bytes_per_task
    return min(room.values()) >= 0


def _check_room(snapshot: RegionSnapshot, request: PlacementRequest, plan: Plan, victims: set[str]) -> None:
    assert _fits(snapshot, request, plan, victims)
    assert request.avoids.isdisjoint(machine for job in plan.jobs for machine, _ in job.machines)
    for victim in victims:
        assert not _fits(snapshot, request, plan, victims - {victim})


def _check_victims(snapshot: RegionSnapshot, request: PlacementRequest, plan: Plan) -> None:
    running = {w.id: w for w in snapshot.running}
    assert list(plan.victims) == sorted(set(plan.victims))
    for id_ in plan.victims:
        assert running[id_].rank > request.rank
        assert running[id_].evictable
        assert id_ not in request.may_not_evict
        own = request.tenant != "" and running[id_].tenant == request.tenant and request.rank < OVER_QUOTA_RANK
        assert not own or running[id_].rank < OVER_QUOTA_RANK or level_of(running[id_].rank) > request.rank
    for protected in plan.victims:
        # Without this victim, and with no other evictions, there is no plan: this victim is needed.
        gone = {w.id for w in snapshot.running if w.id in plan.victims and w.id != protected}
        assert bid(_without(snapshot, gone), request).plan is None


def _without(snapshot: RegionSnapshot, gone: set[str]) -> RegionSnapshot:
    """Returns the snapshot after these workloads released their holdings; no other workload may be evicted."""
    freed: Counter[tuple[str, int]] = Counter()
    for workload in snapshot.running:
        if workload.id in gone:
            for h in workload.holdings:
                freed.update({(h.machine, 0): h.gpus, (h.machine, 1): h.cpus_milli, (h.machine, 2): h.memory_bytes})
    machines = tuple(
        replace(
            m,
            free_gpus=m.free_gpus + freed[m.id, 0],
            free_cpus_milli=m.free_cpus_milli + freed[m.id, 1],
            free_memory_bytes=m.free_memory_bytes + freed[m.id, 2],
        )
        for m in snapshot.machines
    )
    left = tuple(replace(w, evictable=False) for w in snapshot.running if w.id not in gone)
    return replace(snapshot, machines=machines, running=left)


def _check_quality(snapshot: RegionSnapshot, request: PlacementRequest, plan: Plan) -> None:
    running = {w.id: w for w in snapshot.running}
    machines = {m.id: m for m in snapshot.machines}
    victims = [running[id_] for id_ in plan.victims]
    quality = plan.quality
    # Workloads that the request displaces count as over-quota.
    ranks = [v.rank + 7 if v.id in request.displaces and v.rank < 8 else v.rank for v in victims]
    assert quality.victims_by_rank == tuple(ranks.count(rank) for rank in range(1, 15))
    assert quality.youngest_victim_started_at_s == max((v.started_at_s for v in victims), default=float("-inf"))
    assert quality.machines == sum(len(p.machines) for p in plan.jobs)
    assert quality.racks == sum(
        len({(m.cluster, m.rack, m.pool) for m in (machines[id_] for id_, _ in p.machines)}) for p in plan.jobs
    )
    assert quality.type_preference == sum(
        job.gpu_types.index(p.gpu_type) for p, job in zip(plan.jobs, request.jobs, strict=True) if p.gpu_type
    )
    assert quality.lost_gpu_s >= 0


@settings(PROPERTY, max_examples=examples(150))
@given(regions(), requests(), st.randoms(use_true_random=False))
def test_the_order_of_the_snapshot_does_not_matter(
    snapshot: RegionSnapshot, request: PlacementRequest, rng: Random
) -> None:
    """The order of machines, workloads and holdings in the snapshot does not change the bid."""
    _check_order(snapshot, request, rng)


@settings(PROPERTY, max_examples=examples(200))
@given(SEEDS)
def test_the_order_of_the_snapshot_does_not_matter_in_a_crowd(seed: int) -> None:
    """The order of the snapshot does not change the bid if several victims are chosen among many."""
    _check_order(*crowded(seed), Random(seed))


def _check_order(snapshot: RegionSnapshot, request: PlacementRequest, rng: Random) -> None:
    shuffled = replace(
        snapshot,
        machines=tuple(rng.sample(snapshot.machines, len(snapshot.machines))),
        running=tuple(
            replace(w, holdings=tuple(rng.sample(w.holdings, len(w.holdings))))
            for w in rng.sample(snapshot.running, len(snapshot.running))
        ),
    )
    assert bid(shuffled, request) == bid(snapshot, request)


@settings(PROPERTY, max_examples=examples(200))
@given(SEEDS)
def test_a_job_that_is_free_to_go_evicts_nobody(seed: int) -> None:
    """A workload that fits on free machines gets a plan without victims."""
    snapshot, request = crowded(seed)
    gone = {w.id for w in snapshot.running if Random(seed + int(w.id[1:])).random() < 0.4}
    peaceful = _without(snapshot, gone)
    if bid(peaceful, request).plan is not None:
        again = replace(peaceful, running=tuple(replace(w, evictable=True) for w in peaceful.running))
        plan = bid(again, request).plan
        assert plan is not None and plan.victims == ()


@settings(PROPERTY, max_examples=examples(200))
@given(SEEDS)
def test_refusals_tell_the_truth(seed: int) -> None:
    """The placeable tasks of a refusal fit on their own; a `no_hardware` job does not fit in an empty region."""
    snapshot, request = crowded(seed)
    told = bid(snapshot, request).reasons
    left_out = {ReasonCode.ISOLATION_TOO_WEAK: request.too_open, ReasonCode.MACHINES_AVOIDED: request.avoids}
    for reason in told:
        if reason.code is ReasonCode.NOT_TOGETHER:
            assert int(str(reason.detail["places"])) < int(str(reason.detail["groups"]))
    elsewhere = ReasonCode.SPREAD_REQUIRED, ReasonCode.NOT_TOGETHER, ReasonCode.IN_OTHER_POOLS
    told = tuple(reason for reason in told if reason.code not in elsewhere)
    reasons = [reason for reason in told if reason.code not in left_out]
    for reason in told[len(reasons) :]:
        assert left_out[reason.code].issuperset(reason.detail["machines"])  # type: ignore[arg-type]
    for reason in reasons:
        job = next(job for job in request.jobs if job.name == reason.detail["job"])
        if reason.code is ReasonCode.NO_HARDWARE:
            empty = tuple(
                replace(m, free_gpus=m.gpus, free_cpus_milli=m.cpus_milli, free_memory_bytes=m.memory_bytes)
                for m in snapshot.machines
            )
            alone = replace(request, jobs=(job,))
            assert bid(replace(snapshot, machines=empty, running=()), alone).plan is None
        else:
            assert len(reasons) == 1
            placeable = int(str(reason.detail["placeable"]))
            assert placeable < job.tasks
            if placeable:
                part = replace(request, jobs=(replace(job, tasks=placeable),))
                assert bid(snapshot, part).plan is not None
