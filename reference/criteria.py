"""Plain reference implementation of the criteria by which `rms.bid` compares options, for tests and benchmarks only.

It follows MAST 4.3 on machine ids and dictionaries, and repeats the list of `domain.criteria.PlanQuality`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from statistics import median

from domain.capacity import NANO_DEPARTURES, NANO_USD, nano_usd_per_h
from domain.criteria import PlanQuality
from domain.priority import LOWEST_RANK
from domain.scheduling import Holding, JobRequest, MachineState, RegionSnapshot, RunningWorkload
from domain.spread import SpreadLevel

Spread = dict[str, int]
"""Maps machine ids to numbers of tasks."""


@dataclass(frozen=True)
class PlacementTarget:
    """A cluster (empty string: all clusters) and GPU type for a job, and the machine sets to try there, in order."""

    cluster: str
    gpu_type: str | None
    preference: int
    attempts: tuple[tuple[MachineState, ...], ...]
    together: bool = False
    """Whether the level that the job prefers, a machine or a rack, counts as required."""


@dataclass(frozen=True)
class PlacementOption:
    """A placement option for one job, with its victims."""

    job: JobRequest
    place: PlacementTarget
    spread: Spread
    opened: int
    """Machines of which all GPUs were free and some remain free."""
    pieces: int
    """GPUs that remain free on its machines."""
    victims: tuple[RunningWorkload, ...]


def quality(
    snapshot: RegionSnapshot, choices: Sequence[PlacementOption], victims: Sequence[RunningWorkload]
) -> PlanQuality:
    """Returns the criteria of a plan that consists of these choices and evicts these victims."""
    return PlanQuality(
        victims_by_rank=tuple(sum(1 for v in victims if v.rank == rank) for rank in range(1, LOWEST_RANK + 1)),
        lost_gpu_s=sum(lost_gpu_ms(snapshot, v) for v in victims) / 1000,
        youngest_victim_started_at_s=max((v.started_at_s for v in victims), default=-inf),
        missing_tasks=sum(max(0, c.job.most_tasks - c.job.tasks) for c in choices),
        spanning=sum(not c.place.cluster for c in choices),
        apart=sum(_is_apart(snapshot, c) for c in choices),
        type_preference=sum(c.place.preference for c in choices),
        capacity_preference=sum(_last_kind(snapshot, c) for c in choices),
        away=sum(max(away for away, _ in _moves(snapshot, c)) for c in choices),
        move_s=sum(max(score_us for _, score_us in _moves(snapshot, c)) for c in choices) / 1e6,
        departures_per_h=sum(_nano_departures_per_h(snapshot, c) for c in choices) / NANO_DEPARTURES,
        usd_per_h=sum(_nano_usd_per_h(snapshot, c) for c in choices) / NANO_USD,
        racks=sum(_count_racks(snapshot, c) for c in choices),
        machines=sum(len(c.spread) for c in choices),
        opened=sum(c.opened for c in choices),
        pieces=sum(c.pieces for c in choices),
    )


def _is_apart(snapshot: RegionSnapshot, choice: PlacementOption) -> bool:
    level, used = choice.job.topology.preferred, [m for m in snapshot.machines if m.id in choice.spread]
    names: dict[SpreadLevel, set[tuple[str, ...]]] = {
        SpreadLevel.MACHINE: {(m.id,) for m in used},
        SpreadLevel.RACK: {(m.cluster, m.rack, m.pool) for m in used},
        SpreadLevel.CLUSTER: {(m.dynamic_cluster,) for m in used},
        SpreadLevel.ZONE: {(m.zone,) for m in used},
    }
    return level is not None and len(names[level]) > 1


def criteria(snapshot: RegionSnapshot, option: PlacementOption) -> tuple[object, ...]:
    """Returns the key by which options for one job are compared, which is a total order. The smallest is the best."""
    return (*quality(snapshot, [option], option.victims).key, option.place.cluster, sorted(option.spread))


def lost_gpu_ms(snapshot: RegionSnapshot, victim: RunningWorkload) -> int:
    """Returns the work that an eviction loses, in thousandths of a GPU second."""
    cluster_of = {m.id: m.dynamic_cluster for m in snapshot.machines}

    def age(workload: RunningWorkload) -> float:
        assert workload.last_checkpoint_at_s is not None
        return max(0.0, snapshot.now_s - workload.last_checkpoint_at_s)

    def held_here(workload: RunningWorkload) -> list[Holding]:
        return [h for h in workload.holdings if h.machine in cluster_of and (h.gpus or h.cpus_milli or h.memory_bytes)]

    if victim.lost_s is not None:
        lost_s = victim.lost_s
    elif victim.last_checkpoint_at_s is not None:
        lost_s = age(victim)
    else:
        reporting = [w for w in snapshot.running if w.last_checkpoint_at_s is not None]
        here = []
        known = held_here(victim)
        if known:
            most = max(h.gpus for h in known)
            home = min(cluster_of[h.machine] for h in known if h.gpus == most)
            here = [w for w in reporting if any(cluster_of[h.machine] == home for h in held_here(w))]
        lost_s = median([age(w) for w in here or reporting]) if reporting else 0.0
    return round(sum(h.gpus for h in victim.holdings) * lost_s * 1000)


def _last_kind(snapshot: RegionSnapshot, choice: PlacementOption) -> int:
    return max(choice.job.capacity.index(m.capacity) for m in snapshot.machines if m.id in choice.spread)


def _moves(snapshot: RegionSnapshot, choice: PlacementOption) -> list[tuple[int, int]]:
    """Returns the cost of a move to each machine of a choice."""
    return [choice.job.move_to(snapshot.region, m.cluster) for m in snapshot.machines if m.id in choice.spread]


def _nano_departures_per_h(snapshot: RegionSnapshot, choice: PlacementOption) -> int:
    tasks = choice.spread
    return sum(tasks.get(m.id, 0) * round(m.departures_per_h * NANO_DEPARTURES) for m in snapshot.machines)


def _nano_usd_per_h(snapshot: RegionSnapshot, choice: PlacementOption) -> int:
    job, price = choice.job, 0
    for m in snapshot.machines:
        gpu_usd_per_h = m.gpu_usd_per_h if job.gpus_per_task else 0.0
        one = nano_usd_per_h(job.gpus_per_task, gpu_usd_per_h, job.cpus_milli_per_task, m.core_usd_per_h)
        price += choice.spread.get(m.id, 0) * one
    return price


def _count_racks(snapshot: RegionSnapshot, option: PlacementOption) -> int:
    return len({(m.cluster, m.rack, m.pool) for m in snapshot.machines if m.id in option.spread})
