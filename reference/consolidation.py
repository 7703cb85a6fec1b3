"""Plain reference implementation of `rms.consolidation`, for tests only: tries to empty every piece of a region."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from domain.scheduling import MachineState, PlacementRequest, Plan, RegionSnapshot
from reference.bids import bid
from rms.consolidation import Consolidation, Mover


def consolidation(
    region: str, machines: Iterable[MachineState], movers: Iterable[Mover], types: Collection[str], most_moves: int
) -> Consolidation | None:
    """Returns the best consolidation of a region, with the same result as `rms.consolidation.consolidation`."""
    fleet = {one.id: one for one in machines}
    pieces = {id_: one for id_, one in fleet.items() if one.gpu_type in types and 0 < one.free_gpus < one.gpus}
    found = []
    for piece in pieces.values():
        alike = {id_: one for id_, one in pieces.items() if _group(one) == _group(piece)}
        leaving = [
            mover
            for mover in sorted(movers, key=lambda mover: (-mover.gpus, mover.workload))
            if any(h.machine == piece.id for h in mover.holdings) and all(h.machine in alike for h in mover.holdings)
        ]
        after = {id_: one.free_gpus for id_, one in alike.items()}
        for mover in leaving:
            for h in mover.holdings:
                after[h.machine] += h.gpus
        whole = [id_ for id_, free in after.items() if free == fleet[id_].gpus]
        if not leaving or len(leaving) > most_moves or piece.id not in whole:
            continue
        left = {h.machine for mover in leaving for h in mover.holdings}
        plans = _places(region, [one for id_, one in alike.items() if id_ not in left], leaving)
        if plans is not None:
            found.append(Consolidation(tuple(leaving), piece.id, len(whole), tuple(plans)))
    return min(found, key=lambda one: one.key, default=None)


def _group(machine: MachineState) -> tuple[str, str | None]:
    return machine.dynamic_cluster, machine.gpu_type


def _places(region: str, targets: Sequence[MachineState], movers: Sequence[Mover]) -> list[Plan] | None:
    """Places one mover after the other on the target machines; None if one of them does not fit."""
    free = {one.id: one for one in targets}
    plans = []
    for mover in movers:
        if not free:
            return None
        some = next(iter(free.values()))
        types = () if some.gpu_type is None else (some.gpu_type,)
        jobs = tuple(
            replace(job, capacity=(some.capacity,), gpu_types=types if job.gpus_per_task else ()) for job in mover.jobs
        )
        request = PlacementRequest(mover.workload, mover.rank, jobs, avoids=mover.avoids, tenant=mover.tenant)
        plan = bid(RegionSnapshot(region, 0.0, tuple(free.values()), ()), request).plan
        if plan is None:
            return None
        plans.append(plan)
        for job, placed in zip(jobs, plan.jobs, strict=True):
            for machine, tasks in placed.machines:
                one = free[machine]
                free[machine] = replace(
                    one,
                    free_gpus=one.free_gpus - tasks * job.gpus_per_task,
                    free_cpus_milli=one.free_cpus_milli - tasks * job.cpus_milli_per_task,
                    free_memory_bytes=one.free_memory_bytes - tasks * job.memory_bytes_per_task,
                )
    return plans
