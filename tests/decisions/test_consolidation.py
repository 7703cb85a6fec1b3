"""Consolidation against its plain reference, and over long random histories: no loop, and never too many moves."""

import random
from dataclasses import replace

import pytest

import reference.consolidation
from domain.scheduling import Holding, JobRequest, MachineState
from domain.spread import SpreadLevel
from domain.topology import TopologyRule
from rms.consolidation import RESTART_S, Consolidation, Mover, consolidation, moves_left, wanted_types

TYPES = ("a100", "h100")


def machine(id_: str, free: int, gpus: int = 8, cluster: str = "c", kind: str = "a100", **more: object) -> MachineState:
    """Returns a machine with as many CPUs and bytes of memory for each GPU as a task asks for."""
    return MachineState(
        id_,
        cluster,
        "k",
        kind,
        gpus,
        free,
        10 * free,
        10 * free,
        10 * gpus,
        10 * gpus,
        **more,  # type: ignore[arg-type]
    )


def mover(id_: str, *held: tuple[str, int], unsaved_s: float = 0.0, **more: object) -> Mover:
    """Returns a workload of one job with one task on each machine."""
    gpus = held[0][1]
    job = JobRequest("main", len(held), gpus, TYPES, 10 * gpus, 10 * gpus)
    holdings = tuple(Holding(m, g, 10 * g, 10 * g) for m, g in held)
    return Mover(id_, 1, 12, (job,), holdings, unsaved_s, **more)  # type: ignore[arg-type]


def best(machines: list[MachineState], movers: list[Mover], most: int = 8) -> Consolidation | None:
    found = consolidation("r", machines, movers, TYPES, most)
    assert found == reference.consolidation.consolidation("r", machines, movers, TYPES, most)
    return found


def targets(found: Consolidation | None) -> list[str]:
    assert found is not None
    return [m for plan in found.plans for job in plan.jobs for m, _ in job.machines]


def test_a_machine_is_emptied_onto_the_fullest_piece() -> None:
    """The workload leaves its machine for the piece on which the fewest GPUs remain free, not for a whole machine."""
    fleet = [machine("m1", 6), machine("m2", 4), machine("m3", 2), machine("m4", 8)]
    found = best(fleet, [mover("w", ("m1", 2))])
    assert targets(found) == ["m3"] and found is not None and (found.machine, found.freed) == ("m1", 1)


def test_other_work_on_the_machine_must_be_movable_too() -> None:
    """A machine is emptied only if all that hold its GPUs can move, and all find room."""
    fleet = [machine("m1", 4), machine("m2", 2)]
    assert best(fleet, [mover("w", ("m1", 2))]) is None
    assert best(fleet, [mover("w", ("m1", 2)), mover("v", ("m1", 2))]) is None
    fleet[1] = machine("m2", 4)
    found = best(fleet, [mover("w", ("m1", 2)), mover("v", ("m1", 2))])
    assert targets(found) == ["m2", "m2"]
    assert best(fleet, [mover("w", ("m1", 2)), mover("v", ("m1", 2))], most=1) is None


def test_a_gang_that_frees_two_machines_comes_first_then_the_least_lost_work() -> None:
    """Whole machines count more than lost work; with as many, the work since the checkpoint decides."""
    fleet = [machine("m1", 4), machine("m2", 4), machine("m3", 6), machine("m4", 4), machine("m5", 4)]
    gang, small, fresh = mover("gang", ("m1", 4), ("m2", 4)), mover("a", ("m3", 2)), mover("b", ("m3", 2))
    assert best(fleet, [gang, small]).movers == (gang,)  # type: ignore[union-attr]
    fleet = [machine("m1", 6), machine("m3", 6), machine("m4", 5)]
    small, fresh = mover("a", ("m1", 2), unsaved_s=60.0), mover("b", ("m3", 2), unsaved_s=30.0)
    assert best(fleet, [small, fresh]).movers == (fresh,)  # type: ignore[union-attr]
    assert fresh.lost_gpu_s == 2 * (30.0 + RESTART_S)


def test_a_workload_stays_in_its_cluster_pool_and_type() -> None:
    """Pieces elsewhere, machines that it avoids, and other types take nothing."""
    here = machine("m1", 6)
    for other in (
        machine("m2", 2, cluster="d"), machine("m2", 2, kind="h100"), machine("m2", 2, pool="p", capacity="pooled"),
    ):  # fmt: skip
        assert best([here, other], [mover("w", ("m1", 2))]) is None
    assert best([here, machine("m2", 2)], [mover("w", ("m1", 2), avoids=frozenset({"m2"}))]) is None
    assert best([here, machine("m2", 2)], [mover("w", ("m1", 2), ("gone", 2))]) is None
    assert consolidation("r", [here, machine("m2", 2)], [mover("w", ("m1", 2))], {"h100"}, 8) is None


def test_required_topology_is_obeyed() -> None:
    """A gang whose tasks must share a machine finds no place on two pieces."""
    fleet = [machine("m1", 4), machine("m2", 2), machine("m3", 2)]
    gang = mover("w", ("m1", 2), ("m1", 2))
    together = replace(gang.jobs[0], topology=TopologyRule(required=SpreadLevel.MACHINE))
    gang = replace(gang, holdings=(Holding("m1", 4, 40, 40),))
    assert targets(best(fleet, [gang])) == ["m2", "m3"]
    assert best(fleet, [replace(gang, jobs=(together,))]) is None


def test_the_hour_is_bounded() -> None:
    """No hour has more moves than the setting says; 0 switches consolidation off."""
    assert moves_left(10_000.0, [], 0) == 0
    assert moves_left(10_000.0, [6_400.0, 6_401.0, 9_000.0], 3) == 1


def test_only_types_of_gangs_that_need_several_gpus_on_a_machine_are_wanted() -> None:
    """A single GPU fits on a piece."""
    one, two = JobRequest("a", 4, 1, ("a100",), 1, 1), JobRequest("b", 1, 2, ("h100",), 1, 1)
    assert wanted_types([(one,), (one, two)]) == {"h100"}


class Fleet:
    """A random fleet with running workloads, some of which may be moved."""

    def __init__(self, seed: int) -> None:
        self.chance = chance = random.Random(seed)
        self.free: dict[str, MachineState] = {}
        for k in range(chance.randrange(2, 9)):
            gpus = chance.choice([2, 4, 8])
            one = machine(
                f"m{k}", gpus, gpus, cluster=chance.choice("cd"), kind=chance.choice(TYPES),
                pool=chance.choice(["", "", "p"]), capacity="reserved",
            )  # fmt: skip
            self.free[one.id] = replace(one, rack=chance.choice("kl"))
        self.movers: dict[str, Mover] = {}
        self.count = 0
        for _ in range(chance.randrange(1, 14)):
            self.start()

    def start(self) -> None:
        """Starts a workload on random machines of one group."""
        first = self.chance.choice(sorted(self.free.values(), key=lambda m: m.id))
        gpus, tasks = self.chance.choice([1, 1, 2, 3]), self.chance.choice([1, 1, 1, 2])
        alike = [
            m for m in self.free.values()
            if (m.dynamic_cluster, m.gpu_type) == (first.dynamic_cluster, first.gpu_type) and m.free_gpus >= gpus
        ]  # fmt: skip
        if len(alike) < tasks:
            return
        self.count += 1
        held = [(m.id, gpus) for m in self.chance.sample(alike, tasks)]
        unsaved_s = self.chance.choice([0.0, 100.0, 1000.0])
        avoids = frozenset(m for m in self.free if self.chance.random() < 0.05)
        one = mover(f"w{self.count}", *held, unsaved_s=unsaved_s, avoids=avoids)
        self.take(one, held, -1)
        self.movers[one.workload] = one

    def take(self, one: Mover, held: list[tuple[str, int]], sign: int) -> None:
        """Takes (`sign` -1) or frees what a workload has on machines."""
        for id_, gpus in held:
            m = self.free[id_]
            self.free[id_] = replace(
                m, free_gpus=m.free_gpus + sign * gpus, free_cpus_milli=m.free_cpus_milli + sign * 10 * gpus,
                free_memory_bytes=m.free_memory_bytes + sign * 10 * gpus,
            )  # fmt: skip

    def movable(self) -> list[Mover]:
        """Returns most of the workloads; the others are within quota, for example."""
        return [one for one in self.movers.values() if int(one.workload[1:]) % 5]

    def whole(self) -> int:
        return sum(m.free_gpus == m.gpus for m in self.free.values())

    def make(self, found: Consolidation) -> None:
        """Makes the moves, and checks that each place had room."""
        for one, plan in zip(found.movers, found.plans, strict=True):
            gpus = one.jobs[0].gpus_per_task
            self.take(one, [(h.machine, h.gpus) for h in one.holdings], 1)
            held = [(m, gpus * tasks) for m, tasks in plan.jobs[0].machines]
            self.take(one, held, -1)
            self.movers[one.workload] = replace(one, holdings=tuple(Holding(m, g, 10 * g, 10 * g) for m, g in held))
        assert all(0 <= m.free_gpus <= m.gpus for m in self.free.values())


@pytest.mark.parametrize("seed", range(300))
def test_the_result_equals_the_reference(seed: int) -> None:
    """On random fleets, the fast and the plain code choose the same moves to the same places."""
    fleet = Fleet(seed)
    most = fleet.chance.choice([1, 2, 8])
    args = "r", list(fleet.free.values()), fleet.movable(), TYPES, most
    assert consolidation(*args) == reference.consolidation.consolidation(*args)


@pytest.mark.rotating
def test_consolidation_ends_and_keeps_its_bound() -> None:
    """In 5,000 rounds on changing fleets, each consolidation adds whole machines, a fleet without changes comes to rest
    within as many as it has machines, and no hour has more moves than allowed.
    """
    rounds, moved_at_s, now_s, per_h, seed = 0, list[float](), 0.0, 4, 0
    total = 0
    while rounds < 5_000:
        fleet, seed = Fleet(1_000 + seed), seed + 1
        for _ in range(40):
            rounds += 1
            now_s += 120.0
            if fleet.chance.random() < 0.8:
                if fleet.movers and fleet.chance.random() < 0.5:
                    gone = fleet.movers.pop(fleet.chance.choice(sorted(fleet.movers)))
                    fleet.take(gone, [(h.machine, h.gpus) for h in gone.holdings], 1)
                else:
                    fleet.start()
            left = moves_left(now_s, moved_at_s, per_h)
            found = consolidation("r", fleet.free.values(), fleet.movable(), TYPES, left)
            if found is not None:
                before = fleet.whole()
                fleet.make(found)
                assert fleet.whole() == before + found.freed
                moved_at_s += [now_s] * len(found.movers)
                total += len(found.movers)
            assert sum(at_s > now_s - 3600.0 for at_s in moved_at_s) <= per_h
        for quiet in range(len(fleet.free) + 1):
            found = consolidation("r", fleet.free.values(), fleet.movable(), TYPES, 100)
            if found is None:
                break
            assert quiet < len(fleet.free), "it loops"
            fleet.make(found)
    assert total > 100
