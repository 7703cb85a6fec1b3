"""Consolidation: moves over-quota workloads to partly used machines, so that whole machines become free.

A *piece* is a machine of which some GPUs are free and some are not. All workloads of one piece move to other pieces of
the same cluster, pool and GPU type. Machines that are whole, or that a mover leaves, take none of them. So each
consolidation increases the number of whole machines, and a series of them ends.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from domain.scheduling import Holding, JobRequest, MachineState, PlacementRequest, Plan
from rms.bid import bid_in
from rms.gang import Planner
from rms.plans import need_of
from rms.region import RegionColumns

RESTART_S = 300.0
"""Time of a move in which the workload's GPUs do no work: the last save, the stop and the new start."""
SETTLED_S = 1800.0
"""A workload that started less than this ago is not moved: it is the more likely to end soon the younger it is."""
MOST_UNSAVED_S = 1800.0
"""A workload whose last checkpoint is older than this is not moved."""
CONSIDER_S = 60.0
"""Shortest time between two searches for moves."""
MOST_WAITING = 256
"""Number of workloads at the head of the queue for which whole machines are wanted."""
_HOUR_S = 3600.0


@dataclass(frozen=True)
class Mover:
    """A running workload that may be moved."""

    workload: str
    attempt: int
    rank: int
    jobs: tuple[JobRequest, ...]
    holdings: tuple[Holding, ...]
    unsaved_s: float
    """Seconds of work since its last checkpoint."""
    tenant: str = ""
    avoids: frozenset[str] = frozenset()
    """Machines that it may not use."""

    @property
    def gpus(self) -> int:
        """GPU slots that the workload holds."""
        return sum(h.gpus for h in self.holdings)

    @property
    def lost_gpu_s(self) -> float:
        """GPU seconds that a move loses at most."""
        return self.gpus * (self.unsaved_s + RESTART_S)


@dataclass(frozen=True)
class Consolidation:
    """Workloads that leave a machine together, and their new places."""

    movers: tuple[Mover, ...]
    machine: str
    """The machine that all of them leave."""
    freed: int
    """The number of machines that become whole, at least one."""
    plans: tuple[Plan, ...] = ()
    """The new place of each mover, in the order of `movers`; empty while the places are not known."""

    @property
    def key(self) -> tuple[object, ...]:
        """Sort key: the most whole machines, then the least lost work, then the fewest moves, then the machine's id."""
        return -self.freed, sum(mover.lost_gpu_s for mover in self.movers), len(self.movers), self.machine


def may_move(ran_s: float, unsaved_s: float, min_runtime_s: float) -> bool:
    """Returns whether an over-quota workload may be moved that has run for `ran_s` since its last start."""
    return ran_s >= max(min_runtime_s, SETTLED_S) and unsaved_s <= MOST_UNSAVED_S


def moves_left(now_s: float, moved_at_s: Iterable[float], moves_per_h: int) -> int:
    """Returns how many workloads may be moved now, so that no hour has more than `moves_per_h` moves."""
    return moves_per_h - sum(at_s > now_s - _HOUR_S for at_s in moved_at_s)


def wanted_types(waiting: Iterable[Sequence[JobRequest]]) -> frozenset[str]:
    """Returns the GPU types on which waiting workloads would run that need several GPUs of one machine."""
    return frozenset(t for jobs in waiting for job in jobs if job.gpus_per_task > 1 for t in job.gpu_types)


def consolidation(
    region: str, machines: Iterable[MachineState], movers: Iterable[Mover], types: Collection[str], most_moves: int
) -> Consolidation | None:
    """Returns the best consolidation of a region, or None if there is none.

    Args:
        region: the region's name.
        machines: its machines that take work.
        movers: the workloads that may be moved.
        types: the GPU types of which whole machines are wanted.
        most_moves: the maximum number of workloads to move.
    """
    groups: dict[tuple[str, str], dict[str, MachineState]] = defaultdict(dict)
    for one in machines:
        if one.gpu_type in types and 0 < one.free_gpus < one.gpus:
            groups[one.dynamic_cluster, one.gpu_type or ""][one.id] = one
    group_of = {machine: group for group, found in groups.items() for machine in found}
    of_group: dict[tuple[str, str], list[Mover]] = defaultdict(list)
    for mover in movers:
        if mover.holdings and (group := group_of.get(mover.holdings[0].machine)) is not None:
            of_group[group].append(mover)
    found = (_Group(region, groups[key], of_group[key]).best(most_moves) for key in sorted(of_group))
    return min((one for one in found if one is not None), key=lambda one: one.key, default=None)


class _Group:
    """The pieces of one cluster, pool and GPU type, and the workloads there that may be moved."""

    def __init__(self, region: str, pieces: dict[str, MachineState], movers: Sequence[Mover]) -> None:
        self._pieces = pieces
        self._movers = [m for m in movers if all(h.machine in pieces for h in m.holdings)]
        self._columns = RegionColumns(region)
        for one in pieces.values():
            self._columns.put_machine(one)
        self._columns.refresh(0.0)
        self._planner = Planner(self._columns)

    def best(self, most_moves: int) -> Consolidation | None:
        """Returns the best consolidation of at most `most_moves` moves; None: there is none."""
        on: dict[str, list[Mover]] = defaultdict(list)
        for mover in sorted(self._movers, key=lambda m: (-m.gpus, m.workload)):
            for machine in {h.machine for h in mover.holdings}:
                on[machine].append(mover)
        options = []
        for machine, movers in on.items():
            freed = self._freed(movers)
            if len(movers) <= most_moves and machine in freed:
                options.append(Consolidation(tuple(movers), machine, len(freed)))
        for option in sorted(options, key=lambda option: option.key):  # The first that finds places is the best.
            plans = self._places(option.movers)
            if plans is not None:
                return replace(option, plans=tuple(plans))
        return None

    def _freed(self, movers: Iterable[Mover]) -> set[str]:
        """Returns the machines of which all GPUs are free without the movers."""
        held: dict[str, int] = defaultdict(int)
        for mover in movers:
            for h in mover.holdings:
                held[h.machine] += h.gpus
        return {m for m, gpus in held.items() if self._pieces[m].free_gpus + gpus == self._pieces[m].gpus}

    def _places(self, movers: Sequence[Mover]) -> list[Plan] | None:
        """Returns a place for each mover, in order; None if there is not room for all of them."""
        left = frozenset(h.machine for mover in movers for h in mover.holdings)
        changed: dict[str, MachineState] = {}
        plans: list[Plan] = []
        try:
            for mover in movers:
                request = request_of(mover, next(iter(self._pieces.values())), left)
                plan = bid_in(self._planner, request).plan
                if plan is None:
                    return None
                plans.append(plan)
                for job, placed in zip(request.jobs, plan.jobs, strict=True):
                    for machine, tasks in placed.machines:
                        changed[machine] = one = less_free(changed.get(machine, self._pieces[machine]), job, tasks)
                        self._columns.put_machine(one)
            return plans
        finally:
            for machine in changed:
                self._columns.put_machine(self._pieces[machine])


def request_of(mover: Mover, piece: MachineState, left: frozenset[str]) -> PlacementRequest:
    """Returns the request for a place on the pieces of a group, of which `piece` is one, but not on machines `left`.

    The mover runs in the group, so it may use the group's capacity kind.
    """
    types = (piece.gpu_type,) if piece.gpu_type is not None else ()
    jobs = tuple(
        replace(job, gpu_types=types if job.gpus_per_task else (), capacity=(piece.capacity,)) for job in mover.jobs
    )
    return PlacementRequest(mover.workload, mover.rank, jobs, avoids=mover.avoids | left, tenant=mover.tenant)


def less_free(machine: MachineState, job: JobRequest, tasks: int) -> MachineState:
    """Returns a machine on which tasks of a job take some of the free resources."""
    need = need_of(job)
    return replace(
        machine,
        free_gpus=machine.free_gpus - tasks * need.gpus,
        free_cpus_milli=machine.free_cpus_milli - tasks * need.cpus_milli,
        free_memory_bytes=machine.free_memory_bytes - tasks * need.memory_bytes,
    )
