"""Repair in place against its plain reference, and what it never does."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import hypothesis.strategies as st
import pytest
from hypothesis import given

import reference.repair
from domain.scheduling import JobPlacement, JobRequest, MachineState, PlacementRequest, Plan, RegionSnapshot
from domain.spread import SpreadLevel
from domain.topology import TopologyRule
from rms.repair import DamagedGang, repair, shrink
from tests.decisions.fleets import gpu_job, in_pool, machine, regions, request, requests, running


def continued(machines: list[MachineState], *placed: JobPlacement, jobs: tuple[JobRequest, ...]) -> Plan | None:
    gang = DamagedGang(PlacementRequest("w", 9, jobs), placed)
    found = repair("here", machines, gang)
    assert found == reference.repair.repair("here", machines, gang)
    return found


def on(*machines: tuple[str, int], name: str = "train", cluster: str = "c1") -> JobPlacement:
    return JobPlacement(name, cluster, "a100", machines)


def placed(found: Plan | None) -> list[tuple[tuple[str, int], ...]] | None:
    return None if found is None else [job.machines for job in found.jobs]


def test_the_missing_tasks_go_to_free_slots_and_the_others_stay() -> None:
    """The fullest machine with room takes the tasks of the lost one; what other work holds does not count as room."""
    fleet = [machine("m1", used=8), machine("m2", used=8), machine("m4", used=1), machine("m5", used=4)]
    found = continued(fleet, on(("m1", 1), ("m2", 1), ("m3", 1)), jobs=(gpu_job(3, 4),))
    assert placed(found) == [(("m1", 1), ("m2", 1), ("m5", 1))]


def test_a_machine_that_the_gang_keeps_may_take_more_of_its_tasks() -> None:
    """The tasks of a machine are counted together."""
    fleet = [machine("m1", used=4), machine("m2", used=8)]
    assert placed(continued(fleet, on(("m1", 1), ("m2", 1), ("m3", 1)), jobs=(gpu_job(3, 4),))) == [
        (("m1", 2), ("m2", 1))
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("fleet", "job"),
    [
        ([machine("m1", used=8), machine("m4", used=5)], gpu_job(2, 4)),
        ([machine("m1", used=8), machine("m4", gpu_type="h100")], gpu_job(2, 4, "a100", "h100")),
        ([machine("m1", used=8), machine("m4", cluster="c2")], gpu_job(2, 4)),
        ([machine("m1", used=8), in_pool(machine("m4"), "p")], gpu_job(2, 4)),
        ([machine("m4"), machine("m5")], gpu_job(2, 4)),
    ],
    ids=["no room", "other type", "other cluster", "pool of others", "most is lost"],
)
def test_when_a_gang_returns_to_the_queue(fleet: list[MachineState], job: JobRequest) -> None:
    """The spare must have room, be alike and near, and half of the tasks must stay."""
    assert continued(fleet, on(("m1", 1), ("m3", 1)), jobs=(job,)) is None


def test_a_gang_that_could_be_on_fewer_machines_returns_to_the_queue() -> None:
    """If one machine has room for all tasks, they are not left on several."""
    hurt = on(("m1", 1), ("m2", 1), ("m3", 1))
    fleet = [machine("m1", used=8), machine("m2", used=8), machine("m4", used=6)]
    assert placed(continued(fleet, hurt, jobs=(gpu_job(3, 2),))) is not None
    assert continued([*fleet, machine("m5")], hurt, jobs=(gpu_job(3, 2),)) is None


def test_topology() -> None:
    """A job that requires a level, or has slices, is placed as a whole; a preferred level does not matter."""
    fleet = [machine("m1", used=8), machine("m4", used=4, rack="r2")]
    for rule, there in (
        (TopologyRule(required=SpreadLevel.RACK), False), (TopologyRule(slice_tasks=2), False),
        (TopologyRule(preferred=SpreadLevel.RACK), True),
    ):  # fmt: skip
        job = JobRequest("train", 2, 4, ("a100",), 0, 0, topology=rule)
        assert (continued(fleet, on(("m1", 1), ("m3", 1)), jobs=(job,)) is not None) == there


@given(regions(), requests(), st.integers(0, 1 << 30))
def test_as_the_reference(snapshot: RegionSnapshot, request: PlacementRequest, seed: int) -> None:
    """Whatever is lost, the result is that of the reference, tasks on open machines stay, and none gets too many."""
    chance = Random(seed)
    ids, gone = [m.id for m in snapshot.machines], ["x0", "x1"]
    placements = []
    for job in request.jobs:
        first = chance.choice(snapshot.machines)
        alike = [m.id for m in snapshot.machines if (m.cluster, m.pool) == (first.cluster, first.pool)]
        many = chance.choices([*alike, *gone][: 1 + chance.randrange(len(alike) + 2)] + gone, k=job.tasks)
        where = tuple((one, many.count(one)) for one in sorted(set(many)))
        gpu_type = chance.choice(job.gpu_types) if job.gpus_per_task else None
        placements.append(JobPlacement(job.name, first.cluster, gpu_type, where))
    tasks_of = [dict(placement.machines) for placement in placements]
    machines = [_larger(one, request.jobs, [tasks.get(one.id, 0) for tasks in tasks_of]) for one in snapshot.machines]
    gang = DamagedGang(replace(request, spread=None, displaces=frozenset()), tuple(placements))
    others = snapshot.running if chance.random() < 0.8 else ()
    found = repair("here", machines, gang, lambda: others, snapshot.now_s)
    assert found == reference.repair.repair("here", machines, gang, others, snapshot.now_s)
    if found is None:
        return
    free = {m.id: [m.free_gpus, m.free_cpus_milli, m.free_memory_bytes] for m in machines}
    for one in others:
        if one.id in found.victims:
            assert one.rank > request.rank and one.evictable and one.id not in request.may_not_evict
            for h in one.holdings:
                if h.machine in free:
                    freed = h.gpus, h.cpus_milli, h.memory_bytes
                    free[h.machine] = [left + more for left, more in zip(free[h.machine], freed, strict=True)]
    for job, before, after in zip(request.jobs, placements, found.jobs, strict=True):
        assert after.tasks == before.tasks
        new = dict(after.machines)
        for one, tasks in before.machines:
            if one in ids:
                assert new[one] >= tasks
                new[one] -= tasks
        for one, tasks in new.items():
            amounts = job.gpus_per_task, job.cpus_milli_per_task, job.memory_bytes_per_task
            free[one] = [left - tasks * amount for left, amount in zip(free[one], amounts, strict=True)]
            assert min(free[one]) >= 0 or not tasks


@given(st.integers(0, 1 << 30))
def test_victims_as_the_reference(seed: int) -> None:
    """On a full fleet, the tasks of a lost machine go to victims near the others, or the gang returns to the queue."""
    found = full_fleet_repair(seed)
    if found is not None and found.victims:
        assert set(dict(found.jobs[0].machines)) >= {"m0", "m1"}


def test_some_random_gangs_evict_for_their_repair() -> None:
    """The random cases above contain those for which they are."""
    found = [full_fleet_repair(seed) for seed in range(40)]
    assert sum(one is not None and bool(one.victims) for one in found) > 4 < found.count(None)


def full_fleet_repair(seed: int) -> Plan | None:
    """Returns where a gang continues that has lost `m2`, on a fleet of which other workloads hold almost all slots."""
    chance = Random(seed)
    gpus = chance.choice((2, 4))
    fleet, others = [], []
    for n in (0, 1, *range(3, chance.randint(6, 9))):
        own = gpus if n < 2 else 0
        slots, used = 8 - own, 0
        while used < slots and chance.random() < 0.95:
            size = chance.randint(1, slots - used)
            held = [(f"m{n}", size)]
            if others and chance.random() < 0.2:
                held += [(h.machine, h.gpus) for h in others.pop().holdings]
            others.append(
                replace(
                    running(
                        f"w{n}{used}", *held, rank=chance.choice((2, 7, 9, 12)),
                        checkpoint_at_s=chance.choice((None, 0.0, 900.0)), evictable=chance.random() < 0.9,
                    ),
                    started_at_s=chance.choice((0.0, 500.0)), protected_until_s=chance.choice((0.0, 0.0, 2000.0)),
                )
            )  # fmt: skip
            used += size
        fleet.append(machine(f"m{n}", used=used + own, cluster="c1" if n < 6 else "c2"))
    immune = frozenset(one.id for one in others if chance.random() < 0.1)
    request = PlacementRequest("w", chance.choice((1, 7, 8)), (gpu_job(3, gpus),), immune)
    gang = DamagedGang(request, (on(("m0", 1), ("m1", 1), ("m2", 1)),))
    found = repair("here", fleet, gang, lambda: others, 1000.0)
    assert found == reference.repair.repair("here", fleet, gang, others, 1000.0)
    return found


def _larger(machine: MachineState, jobs: Sequence[JobRequest], tasks: Sequence[int]) -> MachineState:
    """Returns a machine that has the resources of tasks beside its free ones."""
    sizes = list(zip(jobs, tasks, strict=True))
    return replace(
        machine,
        gpus=machine.gpus + sum(number * job.gpus_per_task for job, number in sizes),
        cpus_milli=machine.cpus_milli + sum(number * job.cpus_milli_per_task for job, number in sizes),
        memory_bytes=machine.memory_bytes + sum(number * job.memory_bytes_per_task for job, number in sizes),
    )


def shrunk(
    fleet: Sequence[MachineState], *tasks: tuple[str, int], least: int = 2, ahead: Sequence[PlacementRequest] = ()
) -> list[tuple[tuple[str, int], ...]] | None:
    """Returns where an evicted workload of 1-GPU tasks continues."""
    job = replace(gpu_job(least, 1), most_tasks=20)
    gang = DamagedGang(PlacementRequest("w", 12, (job,)), (on(*tasks),))
    found = shrink("here", fleet, gang, ahead)
    assert found == reference.repair.shrink("here", fleet, gang, ahead)
    return placed(found)


def test_a_victim_keeps_what_its_evictor_leaves() -> None:
    """Of 8 tasks on two machines, those remain for which there is room, if they are not fewer than its fewest."""
    fleet = [machine("m1", used=7), machine("m2", used=4)]
    for least, where in ((2, [(("m1", 1), ("m2", 4))]), (5, [(("m1", 1), ("m2", 4))]), (6, None)):
        assert shrunk(fleet, ("m1", 4), ("m2", 4), least=least) == where


def test_a_victim_returns_to_the_queue_for_a_better_place() -> None:
    """Where a new place has more tasks, or as many on fewer machines, the queue gives it that place."""
    fleet = [machine("m1", used=7), machine("m2", used=4)]
    assert shrunk([*fleet, machine("m3", used=7)], ("m1", 4), ("m2", 4)) is None
    small = [machine("m1", used=7), machine("m2", used=7), machine("m3", used=7)]
    assert shrunk(small[:2], ("m1", 4), ("m2", 4)) is not None
    assert shrunk([*small[:2], machine("m3", used=6)], ("m1", 4), ("m2", 4)) is None


def test_a_victim_does_not_pass_others() -> None:
    """It keeps nothing if a workload that comes before it fits into what is left, whatever that workload may evict."""
    fleet = [machine("m1", used=8), machine("m2", used=4)]
    for gpus, stays in ((4, False), (5, True)):
        found = shrunk(fleet, ("m1", 4), ("m2", 4), ahead=[request(gpu_job(1, gpus), rank=1)])
        assert (found is not None) == stays


@given(regions(), st.lists(requests(), max_size=2), st.integers(1, 4), st.integers(0, 1 << 30))
def test_shrink_as_the_reference(
    snapshot: RegionSnapshot, ahead: list[PlacementRequest], least: int, seed: int
) -> None:
    """Whatever is left, the result is that of the reference; no machine gets more tasks than it had, or than fit."""
    chance = Random(seed)
    first = chance.choice(snapshot.machines)
    alike = [
        m for m in snapshot.machines if (m.cluster, m.pool, m.gpu_type) == (first.cluster, first.pool, first.gpu_type)
    ]
    gpus = 0 if first.gpu_type is None else chance.choice((0, 1, 2))
    types: tuple[str, ...] = (str(first.gpu_type),) if gpus else ()
    job = JobRequest("job", least, gpus, types, chance.choice((500, 4000)), 0, most_tasks=least + chance.randint(0, 9))
    tasks = chance.choices([*(m.id for m in alike), "gone"], k=chance.randint(1, job.most_tasks or 1))
    where = tuple((m, tasks.count(m)) for m in sorted(set(tasks)))
    before = JobPlacement("job", first.cluster, types[0] if gpus else None, where)
    gang = DamagedGang(PlacementRequest("w", chance.choice((3, 12)), (job,)), (before,))
    found = shrink("here", snapshot.machines, gang, ahead)
    assert found == reference.repair.shrink("here", snapshot.machines, gang, ahead)
    if found is not None:
        (after,), free = found.jobs, {m.id: m for m in snapshot.machines}
        assert least <= after.tasks < before.tasks and not found.victims
        for one, many in after.machines:
            assert many <= dict(before.machines)[one] and many * gpus <= free[one].free_gpus
            assert many * job.cpus_milli_per_task <= free[one].free_cpus_milli
