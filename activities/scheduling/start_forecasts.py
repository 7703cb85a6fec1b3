"""The expected start of each waiting workload, for the publication of the queue (`gms.starts`).

The sampled run times and the errors of past forecasts are stored in one row of `publication`, to survive restarts.
"""

import time
from collections.abc import Collection, Sequence
from math import inf

from sqlalchemy import Engine, func, select
from sqlalchemy.dialects.postgresql import insert

from activities.scheduling.decision_rows import AttemptRow
from activities.scheduling.fleet_pools import CPUS, FleetPools, Pool
from activities.scheduling.queue_state import held_by, seconds
from activities.scheduling.scan_result import ArrayBacklog, QueuedDemand
from activities.scheduling.scheduler_state import SchedulerState
from domain.ids import array_of
from domain.scheduling import Holding, JobRequest
from domain.spread import SpreadLevel
from gms.starts.forecast import ArrayElements, HeldAmount, StartForecaster, WaitingDemand
from gms.starts.kernels import F8
from infra.db.logs import Publication
from infra.db.session import transaction

MOST_FORECAST = 10_000
"""Starts are forecast for so many workloads at the head of the queue, which takes about half a second of CPU time."""
NAME = "starts"
"""Name of the row of `publication`."""
_STORED_EVERY_S = 300.0
"""What was learned since the last write is lost if the process ends."""


class PublishedStarts:
    """Forecasts starts in the process of the scheduler."""

    def __init__(self, engine: Engine, reserve_after_s: float) -> None:
        self._engine = engine
        self._forecaster = StartForecaster(reserve_after_s < inf)
        self._held: dict[str, HeldAmount] = {}
        """The workloads that held slots at the last forecast."""
        self._restored = False
        self._stored_at_s = -inf
        """The time of the last write, on the monotonic clock."""

    def of(self, state: SchedulerState, demands: Sequence[QueuedDemand]) -> F8:
        """Returns the first and last seconds from now of each start, shape (demands, 2); NaN: nothing can be said."""
        self._restore()
        with state.current():
            live, now_s = state.live, state.now_s
            fleet = FleetPools({name: state.planner(name).region for name in state.regions})
            arrays = state.queue.backlogs()
            throttled = {b.array for b in arrays if b.free is not None}
            held = [h for a in live if (h := _held(a, state.holdings(a.workload), fleet, throttled)) is not None]
        pools = fleet.pools
        waiting = [_waiting(d, pools, throttled) for d in demands]
        behind = [one for b in arrays if (one := _backlog(b, demands, live, pools)) is not None]
        self._learn_runs(now_s, held, waiting)
        found = self._forecaster.forecast(now_s, waiting, held, fleet.free, behind, fleet.machines)
        self._store()
        return found

    def _learn_runs(self, now_s: float, held: Sequence[HeldAmount], waiting: Sequence[WaitingDemand]) -> None:
        again, now = {w.id for w in waiting}, {h.id: h for h in held}
        for id_, before in self._held.items():
            if id_ not in now and id_ not in again:  # A workload that waits again was evicted.
                self._forecaster.ended(before.groups, now_s - before.since_s)
        self._held = now

    def _restore(self) -> None:
        if not self._restored:
            with transaction(self._engine) as session:
                body = session.scalar(select(Publication.body).where(Publication.name == NAME))
            if body is not None:
                self._forecaster.restore(body)
            self._restored = True

    def _store(self) -> None:
        if time.monotonic() - self._stored_at_s < _STORED_EVERY_S:
            return
        new = insert(Publication).values(name=NAME, body=self._forecaster.to_json())
        with transaction(self._engine) as session:
            session.execute(
                new.on_conflict_do_update(
                    index_elements=["name"], set_={"body": new.excluded.body, "at": func.clock_timestamp()}
                )
            )
        self._stored_at_s = time.monotonic()


def _held(
    a: AttemptRow, holdings: Sequence[Holding], fleet: FleetPools, throttled: Collection[str]
) -> HeldAmount | None:
    gpus, cpus_milli = held_by(a)
    pool = fleet.pools.get((a.region, min(a.gpu_types, default=CPUS)))
    if pool is None:
        return None
    amount = gpus or cpus_milli
    on = fleet.gpus_on(a.region, pool, holdings) if a.gpu_types else None
    since_s = seconds(a.awarded_us)
    ends_by_s = inf if a.max_runtime_s is None else since_s + a.max_runtime_s
    array = array_of(a.workload)
    own = array if array in throttled else None
    return HeldAmount(a.workload, _groups(a.tenant, amount), pool, amount, since_s, ends_by_s, own, on)


def _waiting(d: QueuedDemand, pools: dict[Pool, int], throttled: Collection[str]) -> WaitingDemand:
    needs, mask = _needs(d.jobs, pools)
    array = array_of(d.id)
    own = array if array in throttled else None
    return WaitingDemand(d.id, _groups(d.tenant, needs), d.rank, d.level, needs, mask, own, _size(d.jobs))


def _backlog(
    b: ArrayBacklog, demands: Sequence[QueuedDemand], live: Sequence[AttemptRow], pools: dict[Pool, int]
) -> ArrayElements | None:
    """Returns the elements of an array that wait behind those in `demands`; None: their rank is unknown.

    Their place in the queue is directly behind the array's last element in `demands`. If the throttle keeps all of them
    out, `demands` has none; then they have the rank of an element that holds slots.
    """
    own = [k for k, d in enumerate(demands) if d.array == b.array]
    if own:
        place, rank = own[-1] + 1, demands[own[-1]].rank
    else:
        ranks = [a.rank for a in live if array_of(a.workload) == b.array]
        if not ranks:
            return None
        rank = ranks[0]
        later = (k for k, d in enumerate(demands) if (d.rank, d.at_s) > (rank, b.at_s))
        place = next(later, len(demands))
    needs, mask = _needs(b.jobs, pools)
    groups = _groups(b.tenant, needs)
    throttled = None if b.free is None else b.array
    demand = WaitingDemand(b.array, groups, rank, rank, needs, mask, throttled, _size(b.jobs))
    return ArrayElements(demand, place, b.elements, b.free)


def _needs(jobs: Sequence[JobRequest], pools: dict[Pool, int]) -> tuple[int, int]:
    """Returns the amount that a gang needs, and the mask of its pools."""
    # The slots of other types that a gang also needs are not considered.
    types = next((set(job.gpu_types) for job in jobs if job.gpus), {CPUS})
    mask = sum(1 << number for (_, gpu_type), number in pools.items() if gpu_type in types)
    return _gpus(jobs) or sum(job.cpus_milli for job in jobs), mask


def _groups(tenant: str, amount: int) -> tuple[str, ...]:
    return f"{tenant}/{amount}", str(amount)


def _size(jobs: Sequence[JobRequest]) -> int:
    many = (job.topology.tasks_by(SpreadLevel.MACHINE, job.tasks) for job in jobs)
    return max((tasks * job.gpus_per_task for tasks, job in zip(many, jobs, strict=True)), default=0)


def _gpus(jobs: Sequence[JobRequest]) -> int:
    return sum(job.gpus for job in jobs)
