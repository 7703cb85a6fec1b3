"""The choice of clusters for workloads of Kueue: equal to a plain reference, and what it must never do."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random

import pytest

from domain.priority import LOWEST_RANK
from domain.scheduling import JobRequest, PlacementRequest, Plan, RegionSnapshot
from gms.dispatch import KueueWorkload, WorkerCluster, nominate
from reference import bids as reference

from .after_award import after_award
from .fleets import gpu_job, machine

Tables = Mapping[str, frozenset[str]]
CASES = 200


def _cheapest(states: Mapping[str, RegionSnapshot], names: set[str], one: KueueWorkload) -> Plan | None:
    asked = PlacementRequest(one.id, LOWEST_RANK, one.jobs)
    bids = [reference.bid(states[name], asked).plan for name in names]
    return min((plan for plan in bids if plan is not None), key=lambda p: (p.quality.key, p.region), default=None)


def _plain(clusters: Sequence[WorkerCluster], workloads: Sequence[KueueWorkload], tables: Tables) -> dict[str, object]:
    """Nominates on snapshots by reference bids: one workload after the other, each after the ones before it."""
    empty = {one.name: RegionSnapshot(one.name, 0.0, one.machines, ()) for one in clusters}
    states, out = dict(empty), {}

    def take(one: KueueWorkload, names: set[str]) -> str | None:
        plan = _cheapest(states, names, one)
        if plan is None:
            return None
        asked = PlacementRequest(one.id, LOWEST_RANK, one.jobs)
        states[plan.region] = after_award(states[plan.region], plan, asked)
        return plan.region

    ordered = sorted(workloads, key=lambda one: (-one.priority, one.created_at_s, one.id))
    kept = {one.id: [name for name in one.nominated if name in one.clusters and name in empty] for one in ordered}
    for one in [one for one in ordered if one.admitted is not None]:
        if one.admitted in empty:
            take(one, {one.admitted})
    for one in [one for one in ordered if one.admitted is None]:
        for name in kept[one.id]:
            take(one, {name})
    for one in [one for one in ordered if one.admitted is None]:
        names = list(kept[one.id])
        if not names or (one.is_overdue and len(names) < 10):
            near = {
                cluster.name
                for cluster in clusters
                if cluster.name in one.clusters
                and cluster.name not in names
                and all(cluster.region in tables.get(table, ()) for table in one.tables)
            }
            further = take(one, near)
            if further is None and one.is_patient and (plan := _cheapest(empty, near, one)) is not None:
                further = plan.region
            names += [] if further is None else [further]
        out[one.id] = tuple(names)
    return out


def _case(seed: int) -> tuple[list[WorkerCluster], list[KueueWorkload], Tables]:
    """Returns clusters of random size and price; workloads that wait, are nominated, or run; and tables.

    Some clusters are full; some workloads name a table that nobody knows, or clusters that are gone.
    """
    rng = Random(seed)
    clusters = []
    for name in ("c0", "c1", "c2", "c3")[: rng.randint(1, 4)]:
        machines = []
        for k in range(rng.randint(0, 4)):
            gpu_type = rng.choice(("a100", "h100", None))
            state = machine(
                f"{name}m{k}", rng.choice((4, 8)) if gpu_type else 0, gpu_type=gpu_type, cluster=f"{gpu_type}"
            )
            price = {"a100": 1.0, "h100": 3.0, None: 0.0}[gpu_type] * rng.choice((1, 1, 2))
            machines.append(replace(state, gpu_usd_per_h=price, core_usd_per_h=0.0 if gpu_type else 0.1))
        prices = {one.cluster: one for one in machines}  # One price for each cluster of machines.
        machines = [replace(one, gpu_usd_per_h=prices[one.cluster].gpu_usd_per_h) for one in machines]
        clusters.append(WorkerCluster(name, rng.choice(("east", "west")), tuple(machines)))
    tables = {"t0": frozenset({"east"}), "t1": frozenset({"east", "west"}), "t2": frozenset[str]()}
    names = ["c0", "c1", "c2", "c3", "gone"]
    workloads = []
    for k in range(rng.randint(1, 10)):
        types = rng.choice((("a100",), ("h100",), ("a100", "h100")))
        jobs: list[JobRequest] = [gpu_job(rng.randint(1, 3), rng.choice((1, 4, 8)), *types)]
        if rng.random() < 0.3:
            jobs.append(JobRequest("side", 2, 0, (), 4000, 0))
        one = KueueWorkload(
            f"w{k}",
            rng.choice((0, 0, 100)),
            float(rng.randint(0, 5)),
            tuple(jobs),
            frozenset(rng.sample(names, rng.randint(1, 5))),
            tuple(rng.sample(("t0", "t1", "t2", "unknown"), rng.choice((0, 0, 0, 1, 1, 2)))),
        )
        kind = rng.random()
        if kind < 0.2:
            one = replace(one, admitted=rng.choice(names))
        elif kind < 0.5:
            nominated = tuple(rng.sample(names, rng.randint(1, 2)))
            one = replace(one, nominated=nominated, is_overdue=rng.random() < 0.5)
        workloads.append(replace(one, is_patient=rng.random() < 0.2))
    return clusters, workloads, tables


@pytest.mark.parametrize("block", range(4))
def test_nominations_equal_those_of_the_reference(block: int) -> None:
    """In 200 random cases the nominations are the reference's, and the order of the inputs does not matter."""
    kinds = {"new": 0, "kept": 0, "none": 0}
    for seed in range(block * CASES // 4, (block + 1) * CASES // 4):
        clusters, workloads, tables = _case(seed)
        found = nominate(clusters, workloads, tables)
        assert {id_: one.clusters for id_, one in found.items()} == _plain(clusters, workloads, tables), seed
        Random(seed).shuffle(workloads)
        assert nominate(clusters[::-1], workloads, tables) == found
        for one in workloads:
            if one.admitted is None:
                kind = "none" if not found[one.id].clusters else "kept" if one.nominated else "new"
                kinds[kind] += 1
                assert kind != "none" or found[one.id].why
    assert min(kinds.values()) > 10, kinds


def _cluster(name: str, gpus: int, usd_per_h: float = 1.0, region: str = "east") -> WorkerCluster:
    return WorkerCluster(name, region, (replace(machine(f"{name}m", gpus), gpu_usd_per_h=usd_per_h),))


def _workload(id_: str, gpus: int, **more: object) -> KueueWorkload:
    one = KueueWorkload(id_, 0, 0.0, (gpu_job(1, gpus),), frozenset({"a", "b", "c"}))
    return replace(one, **more)  # type: ignore[arg-type]


def test_price_data_and_queue_decide() -> None:
    """The cheapest cluster with the tables and room wins; more important and older workloads choose first."""
    clusters = [_cluster("a", 8, 2.0), _cluster("b", 8, 1.0, "west")]
    tables = {"t": frozenset({"east"})}
    assert nominate(clusters, [_workload("w", 4)], tables)["w"].clusters == ("b",)
    assert nominate(clusters, [_workload("w", 4, tables=("t",))], tables)["w"].clusters == ("a",)
    unknown = nominate(clusters, [_workload("w", 4, tables=("u", "t"))], tables)["w"]
    assert (unknown.clusters, unknown.why) == ((), "unknown tables: u")
    two = [_workload("young", 8, created_at_s=1.0), _workload("old", 8)]
    assert {id_: one.clusters for id_, one in nominate(clusters, two, {}).items()} == {"old": ("b",), "young": ("a",)}
    two[0] = replace(two[0], priority=1)
    assert nominate(clusters, two, {})["young"].clusters == ("b",)


def test_a_nomination_stays_until_it_is_overdue_or_its_cluster_is_gone() -> None:
    """A better cluster changes nothing; an overdue nomination gets one more cluster; a full fleet gets none."""
    clusters = [_cluster("a", 8, 2.0), _cluster("b", 8, 1.0)]
    waits = _workload("w", 8, nominated=("a",))
    assert nominate(clusters, [waits], {})["w"].clusters == ("a",)
    assert nominate(clusters, [replace(waits, is_overdue=True)], {})["w"].clusters == ("a", "b")
    assert nominate(clusters[1:], [waits], {})["w"].clusters == ("b",)
    assert nominate([], [waits], {})["w"].clusters == ()
    full = [waits, _workload("r", 8, admitted="b"), _workload("n", 4)]
    nomination = nominate(clusters, full, {})["n"]
    assert nomination.clusters == () and "a" in (nomination.why or "")
    full[2] = replace(full[2], is_patient=True)
    assert nominate(clusters, full, {})["n"].clusters == ("b",)
