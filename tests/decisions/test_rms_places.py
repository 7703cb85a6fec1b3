"""The clusters of a bid, by example: one or several, by capacity kind and price."""

from collections.abc import Sequence
from dataclasses import replace

from domain.capacity import USUAL
from domain.scheduling import JobRequest, MachineState, RegionSnapshot
from rms.bid import bid

from .fleets import gpu_job, machine, plan_of, region, request, running


def _two_clusters(*, used: int = 0) -> RegionSnapshot:
    return region(
        [machine("c1-m", used=used, cluster="c1"), machine("c2-m", cluster="c2")], [running("low", ("c1-m", used))]
    )


def test_tasks_span_clusters_only_where_the_job_allows_it() -> None:
    """A gang that fits in no single cluster spans several only if its job allows it; else it gets `no_hardware`."""
    wide = gpu_job(2, 8)
    assert bid(_two_clusters(), request(wide)).plan is None
    plan = plan_of(bid(_two_clusters(), request(replace(wide, span_clusters=True))))
    assert [(j.cluster, j.machines) for j in plan.jobs] == [("c1+c2", (("c1-m", 1), ("c2-m", 1)))]
    assert plan.quality.spanning == 1


def test_spanning_is_the_last_resort() -> None:
    """A gang spans clusters only if no single one has enough free machines, but before any workload is evicted."""
    wide = replace(gpu_job(2, 4), span_clusters=True)
    used = machine("c1-m", used=4, cluster="c1")
    whole = [used, machine("c2-m", cluster="c2", gpu_type="h100")]
    plan = plan_of(bid(region(whole), request(replace(wide, gpu_types=("a100", "h100")))))
    assert (plan.jobs[0].cluster, plan.jobs[0].gpu_type) == ("c2", "h100")
    parts = [used, machine("c2-m", used=4, cluster="c2")]
    plan = plan_of(bid(region(parts, [running("low", ("c1-m", 4))]), request(wide)))
    assert (plan.jobs[0].cluster, plan.victims) == ("c1+c2", ())
    plan = plan_of(bid(_two_clusters(used=8), request(replace(gpu_job(2, 8), span_clusters=True))))
    assert (plan.jobs[0].cluster, plan.victims) == ("c1+c2", ("low",))


def test_spanning_clusters_may_cost_a_less_important_victim() -> None:
    """A gang spans clusters if that costs a less important victim; at equal cost it stays in one cluster."""
    machines = [
        machine("a1", cluster="a"),
        machine("a2", used=8, cluster="a"),
        machine("b1", used=8, cluster="b"),
    ]
    wide = replace(gpu_job(2, 8), span_clusters=True)
    for rank, victim, cluster in ((7, "less", "a+b"), (4, "more", "a"), (3, "more", "a")):
        holders = [running("more", ("a2", 8), rank=4), running("less", ("b1", 8), rank=rank)]
        plan = plan_of(bid(region(machines, holders), request(wide, rank=1)))
        assert (plan.victims, plan.jobs[0].cluster) == ((victim,), cluster)
    plain = plan_of(bid(region(machines, holders[:1]), request(gpu_job(2, 8), rank=1)))
    assert plain.victims == ("more",)


def test_the_kind_of_capacity_and_the_price() -> None:
    """Only the named capacity kinds are used, in their order, then the cheaper cluster, then fewer racks.

    A preferred GPU type comes before a preferred kind, and no workload is evicted for either.
    """
    machines = [
        machine("own", cluster="own"),
        replace(machine("dear", cluster="dear"), capacity="spot", gpu_usd_per_h=2.0, core_usd_per_h=0.05),
        replace(machine("cheap", cluster="cheap"), capacity="spot", gpu_usd_per_h=1.0),
        replace(machine("lent", cluster="lent"), capacity="voluntary"),
        replace(machine("new", gpu_type="h100", cluster="new"), capacity="on_demand", gpu_usd_per_h=9.0),
    ]

    def chosen(*kinds: str, of: Sequence[MachineState] = machines, types: tuple[str, ...] = ("a100",)) -> str | None:
        job = JobRequest("j", 2, 2, types, 1000, 0, capacity=kinds or USUAL)
        plan = bid(region(list(of)), request(job)).plan
        return None if plan is None else plan.jobs[0].cluster

    assert chosen() == "own"
    assert chosen("spot", "reserved") == "cheap"
    assert chosen("spot", of=machines[:2]) == "dear"
    assert chosen("on_demand") is None
    assert chosen("voluntary", "spot") == "lent"
    assert chosen(of=machines[3:4]) is None, "voluntary machines are used only if the document names that kind"
    assert chosen("spot", "on_demand", types=("h100", "a100")) == "new"
    plan = plan_of(bid(region(machines[1:2]), request(JobRequest("j", 2, 2, ("a100",), 1000, 0))))
    assert (plan.quality.capacity_preference, plan.quality.usd_per_h) == (2, 8.1)
    busy = machine("own", used=8, cluster="own")
    plan = plan_of(bid(region([busy, machines[1]], [running("low", ("own", 8))]), request(gpu_job(1, 8))))
    assert (plan.jobs[0].cluster, plan.victims) == ("dear", ())


def test_a_gang_over_several_clusters_is_only_where_it_may_be() -> None:
    """A job spans only clusters of the capacity kinds that its document names."""
    machines = [
        replace(machine(name, 4, cluster=name), capacity=kind, gpu_usd_per_h=price)
        for name, kind, price in (("a", "reserved", 0.5), ("b", "spot", 1.0), ("c", "voluntary", 0.0))
    ]
    holders = [running("lent", ("c", 4))]
    wide = JobRequest("j", 8, 1, ("a100",), 0, 0, span_clusters=True)
    plan = plan_of(bid(region(machines, holders), request(wide)))
    assert plan.jobs[0].cluster == "a+b" and plan.victims == ()
    assert (plan.quality.capacity_preference, plan.quality.usd_per_h) == (2, 6.0)
    assert bid(region(machines, holders), request(replace(wide, capacity=("reserved", "on_demand")))).plan is None
