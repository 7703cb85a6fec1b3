"""The scan: equality with its reference, quotas that are never exceeded, and the rules of MAST 4.2 by example."""

from collections import Counter, defaultdict
from dataclasses import replace
from math import inf
from random import Random

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from domain.reasons import ReasonCode
from domain.scheduling import PlacedWorkload, QueueSnapshot, Ranked, TenantState
from gms.scan import scan
from reference import queue_scan as reference
from tests.depth import examples

from . import PROPERTY
from .queues import WEIGHTS, displacing, job, queue, queued, snapshots, tenant

# ---------------------------------------------------------------------------------------------------------- properties


@settings(PROPERTY, max_examples=examples(300))
@given(st.one_of(snapshots(), displacing()))
def test_equals_the_reference(snapshot: QueueSnapshot) -> None:
    """The scan gives exactly the reference's queue, credits, types, reasons and placed ranks."""
    assert scan(snapshot) == reference.scan(snapshot)
    assert scan(snapshot, flat=True) == reference.scan(snapshot, flat=True)


@settings(PROPERTY, max_examples=examples(200))
@given(snapshots(), st.data())
def test_never_over_quota_as_within_quota(snapshot: QueueSnapshot, data: st.DataObject) -> None:
    """A tenant's placed work within quota fits its quota, and so does pending work together with all work before it.

    The property holds for every eligible GPU type of each job. Before a pending workload come the tenant's placed
    workloads of its level and above, and pending ones of a higher level, or of its level with more credit.
    """
    result = scan(snapshot)
    owners = {t.name: t for t in snapshot.tenants}
    pending, used = {w.id: w for w in snapshot.pending}, defaultdict[str, Counter[str]](Counter)
    for level in range(1, 8):
        for placed in (p for p in snapshot.placed if result.placed_ranks[p.id] == level):
            used[placed.tenant].update({**placed.gpus, "cpus": placed.cpus_milli})
        for ranked in (r for r in result.queue if r.rank == level):
            tenant, need = pending[ranked.id].tenant, Counter[str]()
            for one, types in zip(pending[ranked.id].jobs, ranked.gpu_types, strict=True):
                if one.gpus:
                    need[data.draw(st.sampled_from(types))] += one.gpus
                need["cpus"] += one.cpus_milli
            used[tenant].update(need)
            assert all(used[tenant][r] <= _quota(owners[tenant], r) for r, amount in need.items() if amount)
    held = defaultdict[str, Counter[str]](Counter)
    for placed in snapshot.placed:
        if result.placed_ranks[placed.id] < 8:
            held[placed.tenant].update({**placed.gpus, "cpus": placed.cpus_milli})
    assert all(n <= _quota(owners[name], r) for name, amounts in held.items() for r, n in amounts.items())


def _quota(owner: TenantState, resource: str) -> float:
    if resource == "cpus":
        return inf if owner.quota_cpus_milli is None else owner.quota_cpus_milli
    return owner.quota_gpus.get(resource, 0)


@settings(PROPERTY, max_examples=examples(150))
@given(snapshots())
def test_what_is_pending_changes_no_rank(snapshot: QueueSnapshot) -> None:
    """The rank of a placed workload does not depend on pending workloads."""
    assert scan(snapshot).placed_ranks == scan(replace(snapshot, pending=())).placed_ranks


def _award(snapshot: QueueSnapshot, ranked: Ranked) -> QueueSnapshot:
    """Returns the snapshot after a pending workload is placed with its most tasks, on its most preferred types."""
    (own,) = (w for w in snapshot.pending if w.id == ranked.id)
    gpus = Counter[str]()
    jobs = [one.sized(ranked.most_tasks or one.tasks) for one in own.jobs]
    for one, types in zip(jobs, ranked.gpu_types, strict=True):
        gpus.update({types[0]: one.gpus} if one.gpus else {})
    cpus_milli = sum(one.cpus_milli for one in jobs)
    placed = PlacedWorkload(own.id, own.tenant, snapshot.now_s, gpus, cpus_milli, own.requested_level)
    left = tuple(w for w in snapshot.pending if w is not own)
    return replace(snapshot, pending=left, placed=(*snapshot.placed, placed))


@settings(PROPERTY, max_examples=examples(200))
@given(st.one_of(snapshots(), displacing()))
def test_an_award_displaces_what_it_says(snapshot: QueueSnapshot) -> None:
    """An award of a tenant's first pending workload keeps its rank, and makes exactly its `displaces` over-quota."""
    before, seen = scan(snapshot), set[str]()
    tenants = {w.id: w.tenant for w in snapshot.pending}
    for ranked in before.queue:
        if tenants[ranked.id] in seen or ranked.over_quota:
            continue
        seen.add(tenants[ranked.id])
        after = scan(_award(snapshot, ranked)).placed_ranks
        assert after[ranked.id] == ranked.rank
        if all(len(types) < 2 for types in ranked.gpu_types):
            lost = {id_ for id_, rank in before.placed_ranks.items() if rank < 8 <= after[id_]}
            assert lost == set(ranked.displaces)


@settings(PROPERTY, max_examples=examples(200))
@given(st.one_of(snapshots(), displacing()))
def test_tasks_above_the_fewest_make_nothing_over_quota(snapshot: QueueSnapshot) -> None:
    """If all workloads within quota are awarded, elastic ones with their most tasks, all of them stay within quota.

    They make no more placed workloads over-quota than with their fewest tasks.
    """
    ranked = [one for one in scan(snapshot).queue if not one.over_quota]
    most, fewest = snapshot, snapshot
    for one in ranked:
        most, fewest = _award(most, one), _award(fewest, replace(one, most_tasks=0))
    with_most, with_fewest = scan(most).placed_ranks, scan(fewest).placed_ranks
    assert with_most == with_fewest
    assert all(with_most[one.id] == one.rank for one in ranked)


def test_an_elastic_workload_gets_what_the_others_leave() -> None:
    """With a quota of 8, of which 1 is held and 3 wait, an elastic workload of 2 to 6 tasks has at most 4 tasks.

    A second one has what the first one leaves. Over quota, the quota does not limit the tasks.
    """
    elastic, fixed = replace(job(2, 1), most_tasks=6), job(3, 1)
    placed = [PlacedWorkload("p", "vision", 0.0, {"a100": 1}, 0)]
    pending = [queued("first", elastic), queued("fixed", fixed, at_s=1.0)]
    result = scan(queue([tenant(a100=8)], pending, placed))
    assert [(one.id, one.most_tasks) for one in result.queue] == [("first", 4), ("fixed", 0)]
    pending = [queued("first", elastic), queued("second", elastic, at_s=1.0), queued("third", elastic, at_s=2.0)]
    result = scan(queue([tenant(a100=6)], pending, placed))
    assert [(one.id, one.most_tasks, one.over_quota) for one in result.queue] == [
        ("first", 3, False), ("second", 2, False), ("third", 0, True),
    ]  # fmt: skip


def test_snapshots_displace() -> None:
    """The drawn snapshots include a workload that displaces several others."""
    find(
        displacing(),
        lambda snapshot: any(len(r.displaces) > 1 for r in scan(snapshot).queue),
        settings=settings(PROPERTY, max_examples=100, phases=[Phase.generate]),
    )


@settings(PROPERTY, max_examples=examples(150))
@given(snapshots(), st.randoms(use_true_random=False))
def test_the_order_of_the_snapshot_does_not_matter(snapshot: QueueSnapshot, rng: Random) -> None:
    """The order of tenants, pending and placed workloads in the snapshot does not change ranks or the queue."""
    shuffled = replace(
        snapshot,
        tenants=tuple(rng.sample(snapshot.tenants, len(snapshot.tenants))),
        pending=tuple(rng.sample(snapshot.pending, len(snapshot.pending))),
        placed=tuple(rng.sample(snapshot.placed, len(snapshot.placed))),
    )
    assert scan(shuffled) == scan(snapshot)


@settings(PROPERTY, max_examples=examples(150))
@given(snapshots())
def test_ranks_and_levels_are_what_they_are_said_to_be(snapshot: QueueSnapshot) -> None:
    """A workload has its tenant's level or a lower requested one; its rank is the level, plus 7 if it is over-quota."""
    owners = {t.name: t for t in snapshot.tenants}
    pending = {w.id: w for w in snapshot.pending}
    result = scan(snapshot)
    assert {r.id for r in result.queue} == {w.id for w in snapshot.pending if not w.held}
    assert set(result.placed_ranks) == {p.id for p in snapshot.placed}
    for ranked in result.queue:
        workload = pending[ranked.id]
        accepted = tuple(one.gpu_types for one in workload.jobs)
        level = max(owners[workload.tenant].level, workload.requested_level or 1)
        if ranked.over_quota:
            assert (ranked.rank, ranked.level, ranked.gpu_types) == (level + 7, level, accepted)
            assert ranked.reason is not None and ranked.reason.code is ReasonCode.QUOTA_EXCEEDED
            numbers = ranked.reason.detail
            assert float(str(numbers["used"])) + float(str(numbers["needs"])) > float(str(numbers["quota"]))
        else:
            assert ranked.rank == ranked.level == level
            assert ranked.reason is None
            for types, all_types in zip(ranked.gpu_types, accepted, strict=True):
                assert set(types) <= set(all_types) and bool(types) == bool(all_types)


@settings(PROPERTY, max_examples=examples(150))
@given(snapshots())
def test_the_queue_is_in_its_documented_order(snapshot: QueueSnapshot) -> None:
    """Without use of people, the queue is sorted by rank, then by more credit, by earlier submission, then by id."""
    snapshot = replace(snapshot, weights=replace(snapshot.weights, w_user=0.0, w_short=0.0))
    submitted = {w.id: w.submitted_at_s for w in snapshot.pending}

    def order(ranked: Ranked) -> tuple[int, float, float, str]:
        return (ranked.rank, -ranked.credit, submitted[ranked.id], ranked.id)

    result = scan(snapshot)
    assert list(result.queue) == sorted(result.queue, key=order)


@settings(PROPERTY, max_examples=examples(150))
@given(snapshots())
def test_a_held_workload_counts_for_nothing(snapshot: QueueSnapshot) -> None:
    """A snapshot without its held workloads gives the same result."""
    assert scan(replace(snapshot, pending=tuple(w for w in snapshot.pending if not w.held))) == scan(snapshot)


@settings(PROPERTY, max_examples=examples(150))
@given(snapshots())
def test_a_tenant_cannot_use_up_the_quota_of_another(snapshot: QueueSnapshot) -> None:
    """Workloads of other tenants do not change which of a tenant's workloads are over-quota."""
    mine = snapshot.tenants[0].name
    alone = scan(
        replace(
            snapshot,
            pending=tuple(w for w in snapshot.pending if w.tenant == mine),
            placed=tuple(p for p in snapshot.placed if p.tenant == mine),
        )
    )
    together = scan(snapshot)
    ids = {w.id for w in snapshot.pending if w.tenant == mine}
    assert tuple(r for r in together.queue if r.id in ids) == alone.queue
    assert {id_: together.placed_ranks[id_] for id_ in alone.placed_ranks} == alone.placed_ranks


# ------------------------------------------------------------------------------------------------------------- credit


def _credits(snapshot: QueueSnapshot) -> dict[str, float]:
    return {ranked.id: ranked.credit for ranked in scan(snapshot).queue}


def test_credit_grows_with_age_up_to_the_cap() -> None:
    """Expression 10: a hundredth of a credit per second of age, 0 before the submission, and constant after the cap."""
    ages = {"young": 9900.0, "hour": 6400.0, "old": 0.0, "future": 10_500.0}
    pending = [queued(id_, job(1, 1), at_s=at_s) for id_, at_s in ages.items()]
    got = _credits(queue([tenant(a100=8)], pending, now_s=10_000.0))
    assert got == {"young": 1.0, "hour": 36.0, "old": 36.0, "future": 0.0}


def test_credit_favours_tenants_that_used_less_than_average() -> None:
    """Expression 11: no use, the average of the tenants with a quota, and twice the average give 10, 0 and -10."""
    tenants = [
        tenant("idle", share=0.0, a100=1),
        tenant("even", share=0.2, a100=1),
        tenant("busy", share=0.4, a100=1),
        tenant("guest", share=0.9, cpus_milli=0, a100=0),
    ]
    pending = [queued(t.name, job(1, 1), of=t.name, at_s=1000.0) for t in tenants[:3]]
    assert _credits(queue(tenants, pending)) == pytest.approx({"idle": 10.0, "even": 0.0, "busy": -10.0})


@pytest.mark.parametrize("cpus_milli", [None, 1])
def test_a_quota_of_cpus_alone_is_a_quota(cpus_milli: int | None) -> None:
    """A tenant with a CPU quota, even an unlimited one, but no GPUs counts in the average."""
    tenants = [tenant("cpu", share=0.5, cpus_milli=cpus_milli), tenant("gpu", share=0.0, a100=1)]
    pending = [queued("w", job(1, 1), of="gpu", at_s=1000.0), queued("v", job(1, 0), of="cpu", at_s=1000.0)]
    assert _credits(queue(tenants, pending)) == {"w": 10.0, "v": -10.0}


def test_no_use_anywhere_gives_no_fair_share_credit() -> None:
    """If no tenant has used resources, the fair-share term is 0."""
    assert _credits(queue([tenant(a100=1)], [queued("w", job(1, 1), at_s=1000.0)])) == {"w": 0.0}


# -------------------------------------------------------------------------------------------------------------- quota


def test_the_oldest_award_uses_quota_first() -> None:
    """Within a level, quota goes to the earliest awards; a later award that still fits is within quota."""
    placed = [
        PlacedWorkload("a-late-small", "vision", 30.0, {"a100": 2}, 0, requested_level=5),
        PlacedWorkload("b-late-large", "vision", 20.0, {"a100": 4}, 0, requested_level=5),
        PlacedWorkload("c-early", "vision", 10.0, {"a100": 6}, 0, requested_level=5),
    ]
    result = scan(queue([tenant(a100=8)], [queued("next", job(1, 1), requested_level=5)], placed))
    assert result.placed_ranks == {"c-early": 5, "b-late-large": 12, "a-late-small": 5}
    assert result.queue[0].over_quota


def test_quota_goes_to_the_most_important_level_first() -> None:
    """An urgent workload is within quota although a sweep of its tenant uses all of it; a second sweep is not."""
    placed = [PlacedWorkload("sweep", "vision", 10.0, {"a100": 8}, 0, requested_level=7)]
    pending = [queued("more", job(1, 1), requested_level=7, at_s=0.0), queued("urgent", job(1, 8), at_s=900.0)]
    result = scan(queue([tenant(level=1, a100=8)], pending, placed))
    assert result.placed_ranks == {"sweep": 7}
    assert [(r.id, r.rank, r.displaces) for r in result.queue] == [("urgent", 1, ("sweep",)), ("more", 14, ())]
    assert (
        str(result.queue[1].reason) == "quota_exceeded: tenant vision uses 16 of 8 a100 and this workload needs 1 more"
    )


def test_an_award_takes_quota_from_what_is_less_important() -> None:
    """Placed workloads of the most important level use quota first, whatever their award times."""
    placed = [
        PlacedWorkload("sweep", "vision", 10.0, {"a100": 8}, 0, requested_level=7),
        PlacedWorkload("urgent", "vision", 20.0, {"a100": 4}, 0),
    ]
    assert scan(queue([tenant(level=1, a100=8)], [], placed)).placed_ranks == {"urgent": 1, "sweep": 14}


def test_only_as_much_is_displaced_as_is_needed() -> None:
    """If half of the quota is needed, only the sweep that was awarded last is displaced; for all of it, both are."""
    placed = [PlacedWorkload(f"sweep{k}", "vision", 10.0 * k, {"a100": 4}, 0, requested_level=7) for k in (1, 2)]
    pending = [queued("first", job(1, 4), at_s=0.0), queued("second", job(1, 4), at_s=1.0)]
    result = scan(queue([tenant(level=1, a100=8)], pending, placed))
    assert [(r.id, r.displaces) for r in result.queue] == [("first", ("sweep2",)), ("second", ("sweep1", "sweep2"))]


def test_credit_decides_who_gets_the_quota() -> None:
    """Of two workloads that do not both fit, the older one is within quota; a third that fits in the rest is too."""
    pending = [queued("young", job(1, 8), at_s=900.0), queued("old", job(1, 6), at_s=100.0), queued("tiny", job(1, 2))]
    ranks = {r.id: r.rank for r in scan(queue([tenant(a100=8)], pending)).queue}
    assert ranks == {"old": 3, "tiny": 3, "young": 10}


def test_over_quota_comes_after_level_7() -> None:
    """An over-quota workload of a level-1 tenant with much credit waits behind a within-quota one of level 7."""
    tenants = [tenant("top", 1, a100=1), tenant("low", 7, a100=8)]
    pending = [queued("over", job(1, 2), of="top", at_s=0.0), queued("within", job(1, 2), of="low", at_s=999.0)]
    assert [(r.id, r.rank, r.level) for r in scan(queue(tenants, pending)).queue] == [("within", 7, 7), ("over", 8, 1)]


def test_over_quota_work_keeps_its_level() -> None:
    """Of two over-quota workloads, the one of the better level comes first, whatever their credits are."""
    tenants = [tenant("top", 2, a100=0), tenant("low", 5, a100=0)]
    pending = [queued("old", job(1, 2), of="low", at_s=0.0), queued("new", job(1, 2), of="top", at_s=999.0)]
    snapshot = queue(tenants, pending)
    assert [(r.id, r.rank, r.level) for r in scan(snapshot).queue] == [("new", 9, 2), ("old", 12, 5)]
    assert [(r.id, r.rank, r.level) for r in scan(snapshot, flat=True).queue] == [("old", 8, 5), ("new", 8, 2)]


def test_a_wish_only_lowers() -> None:
    """A requested level lowers a workload's priority and never raises it above its tenant's."""
    pending = [
        queued("lower", job(1, 1), requested_level=6),
        queued("higher", job(1, 1), requested_level=1),
        queued("none", job(1, 1)),
    ]
    levels = {r.id: r.level for r in scan(queue([tenant(a100=8)], pending)).queue}
    assert levels == {"lower": 6, "higher": 3, "none": 3}


def test_a_choice_of_types_counts_against_all_of_them() -> None:
    """A workload that accepts two GPU types uses quota of both until it is placed."""
    pending = [
        queued("either", job(1, 4, "a100", "h100"), at_s=0.0),
        queued("a100", job(1, 1, "a100"), at_s=1.0),
        queued("h100", job(1, 1, "h100"), at_s=2.0),
    ]
    result = {r.id: r for r in scan(queue([tenant(a100=4, h100=5)], pending)).queue}
    assert result["either"].gpu_types == (("a100", "h100"),)
    assert result["a100"].over_quota and not result["h100"].over_quota


def test_types_without_quota_are_struck_from_the_choice() -> None:
    """If the accepted types do not all fit, each job keeps the first type that fits after the jobs before it."""
    jobs = (
        job(1, 4, "h100", "a100", name="first"),
        job(1, 4, "h100", "a100", name="second"),
        job(2, 0, cpus_milli=1000, name="third"),
    )
    only = scan(queue([tenant(a100=4, h100=4)], [queued("w", *jobs)])).queue[0]
    assert (only.over_quota, only.gpu_types) == (False, (("h100",), ("a100",), ()))


def test_the_reason_names_the_first_type_that_is_lacking() -> None:
    """The reason has the most preferred type of the first job that does not fit, with its use, quota and need."""
    placed = [PlacedWorkload("p", "vision", 0.0, {"h100": 3}, 0)]
    jobs = (job(1, 1, "h100", name="first"), job(1, 4, "h100", "a100", name="second"))
    only = scan(queue([tenant(a100=2, h100=4)], [queued("w", *jobs)], placed)).queue[0]
    assert only.gpu_types == (("h100",), ("h100", "a100"))
    assert str(only.reason) == "quota_exceeded: tenant vision uses 3 of 4 h100 and this workload needs 5 more"


def test_cpus_are_told_in_cores() -> None:
    """CPUs beyond quota make a workload over-quota, and its reason counts cores."""
    placed = [PlacedWorkload("p", "vision", 0.0, {}, 1500)]
    pending = [queued("w", job(3, 1, cpus_milli=1000))]
    only = scan(queue([tenant(a100=8, cpus_milli=4000)], pending, placed)).queue[0]
    assert str(only.reason) == "quota_exceeded: tenant vision uses 1.5 of 4 cpus and this workload needs 3 more"


@pytest.mark.parametrize("held", [False, True])
def test_an_unknown_tenant_is_an_error(held: bool) -> None:
    """A workload of a tenant that the snapshot lacks is an error that names both, even if it is held."""
    with pytest.raises(ValueError, match=r"workload 'w' has tenant 'nobody'"):
        scan(queue([tenant()], [queued("w", job(1, 1), of="nobody", held=held)]))
    with pytest.raises(ValueError, match=r"workload 'p' has tenant 'nobody'"):
        scan(queue([tenant()], [], [PlacedWorkload("p", "nobody", 0.0, {}, 0)]))


def test_an_empty_snapshot_is_an_empty_queue() -> None:
    """An empty snapshot gives an empty queue."""
    result = scan(QueueSnapshot(0.0, (), (), (), WEIGHTS))
    assert (result.queue, dict(result.placed_ranks)) == ((), {})


def test_people_share_the_places_of_their_tenant() -> None:
    """The person with the smaller share gets the earlier places; the places of the tenant do not change."""
    mine = [queued(f"a{n}", job(1, 1), at_s=100.0 * n, user="ann") for n in range(3)]
    his = [queued("b", job(1, 1), at_s=900.0, user="bob")]
    other = queued("other", job(1, 1), at_s=50.0, of="speech")
    tenants = [tenant(a100=100, users={"ann": 0.5}), tenant("speech", a100=100)]
    plain = scan(queue([*tenants[1:], tenant(a100=100)], [*mine, *his, other])).queue
    assert [one.id for one in plain] == ["a0", "other", "a1", "a2", "b"]
    shared = scan(queue(tenants, [*mine, *his, other])).queue
    assert [one.id for one in shared] == ["b", "other", "a0", "a1", "a2"]
    assert [one.credit for one in shared] == [one.credit for one in plain]


def test_age_outweighs_a_persons_use_in_the_end() -> None:
    """Use counts at most as much as the age of `2 * w_user / w_age`, whatever the share is."""
    old = queued("a", job(1, 1), at_s=-3000.0, user="ann")
    tenants = [tenant(a100=100, users={"ann": 1.0, "bob": 1e-9})]
    assert [one.id for one in scan(queue(tenants, [old, queued("b", job(1, 1), at_s=0.0, user="bob")])).queue] == [
        "a", "b",
    ]  # fmt: skip


def test_short_workloads_come_first_within_a_tenant_and_level() -> None:
    """The limit of the GPU hours orders the workloads of a tenant, not the tenants; an unknown one is the last."""
    sizes = [inf, 1e7, 1e5, 60.0]
    mine = [queued(f"w{n}", job(1, 1), at_s=0.5 * n, gpu_s=size) for n, size in enumerate(sizes)]
    other = queued("other", job(1, 1), at_s=0.25, of="speech")
    found = scan(queue([tenant(a100=100), tenant("speech", a100=100)], [*mine, other])).queue
    assert [one.id for one in found] == ["w3", "other", "w2", "w1", "w0"]


def test_a_workload_is_overtaken_for_a_limited_time() -> None:
    """However many short workloads come, one without a limit waits only for those of the next `w_short / w_age`."""
    old = queued("old", job(1, 1), at_s=0.0)
    guard_s = WEIGHTS.w_short / WEIGHTS.w_age
    assert guard_s < WEIGHTS.age_cap_s
    short = [queued(f"s{n}", job(1, 1), at_s=at_s, gpu_s=0.0) for n, at_s in enumerate((guard_s - 1, guard_s + 1))]
    found = scan(queue([tenant(a100=100)], [old, *short], now_s=2000.0)).queue
    assert [one.id for one in found] == ["s0", "old", "s1"]
