"""A pool grows for what waits, and shrinks when nothing does.

What waits takes machines that stand idle, or are on their way, in the order of the queue; only what is then missing is
launched. So one shortage is one launch, however often it is looked at, and nothing needs to be remembered.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from capacity.offers import Offer, OfferKey, Shape
from capacity.pools import Pool, PoolKey
from domain.scheduling import JobRequest

MOST_SHORTAGES = 1000
"""So many of the queue's head are looked at."""


@dataclass(frozen=True)
class Shortage:
    """A workload that no region has room for."""

    workload: str
    jobs: tuple[JobRequest, ...]
    regions: frozenset[str]
    """Those in which nothing but machines is missing."""


@dataclass(frozen=True)
class Idle:
    """A machine that stands idle, or is on its way."""

    instance: str
    pool: PoolKey
    offer: OfferKey


@dataclass
class Growth:
    """What is to be launched, and which machines are whose."""

    launch: dict[PoolKey, list[tuple[Offer, str]]] = field(default_factory=dict)
    """By pool, each with the workload that waits for it."""
    wanted_by: dict[str, str] = field(default_factory=dict)
    """Instance that is idle or on its way to the workload that waits for it."""


def machines_for(job: JobRequest, shape: Shape) -> int | None:
    """How many empty machines of a shape a job needs; None: its tasks do not fit on one."""
    if job.gpus_per_task and shape.gpu_type not in job.gpu_types:
        return None
    bounds = (
        (shape.gpus, job.gpus_per_task),
        (shape.cpus_milli, job.cpus_milli_per_task),
        (shape.memory_bytes, job.memory_bytes_per_task),
    )
    tasks = min((have // need for have, need in bounds if need), default=job.tasks)
    return -(-job.tasks // tasks) if tasks else None


def grow(
    pools: Mapping[PoolKey, Pool],
    had: Mapping[PoolKey, int],
    shortages: Sequence[Shortage],
    idle: Sequence[Idle],
    offers: Sequence[Offer],
    refused: Collection[OfferKey] = (),
) -> Growth:
    """What to launch for workloads that wait, the most important first.

    A workload gets all that it needs from one pool, or nothing: within the pool's maximum, of offers that the pool and
    the workload's document allow. Each job gets the offer that costs least an hour, idle machines counting nothing;
    among pools the one that costs least is taken.

    Args:
        pools: those that may grow, and others.
        had: machines that each pool has or is about to have.
        shortages: in the order of the queue.
        idle: machines without work, of all pools.
        offers: of all providers.
        refused: keys of offers that were refused lately, which are not asked now.
    """
    out = Growth()
    free: dict[tuple[PoolKey, OfferKey], list[str]] = {}
    for machine in sorted(idle, key=lambda one: one.instance):
        free.setdefault((machine.pool, machine.offer), []).append(machine.instance)
    room = {key: pool.most - had.get(key, 0) for key, pool in pools.items()}
    for shortage in shortages:
        found = [
            served
            for key, pool in sorted(pools.items())
            if pool.region in shortage.regions
            and (served := _serve(key, pool, shortage.jobs, free, offers, refused)) is not None
            and len(served.launch) <= room[key]
        ]
        if not found:
            continue
        best = min(found, key=lambda served: (served.usd_per_h, served.pool))
        for offer_key, count in best.taken.items():
            there = free.get((best.pool, offer_key), [])
            out.wanted_by |= dict.fromkeys(there[:count], shortage.workload)
            free[best.pool, offer_key] = there[count:]
        if best.launch:
            launches = ((offer, shortage.workload) for offer in best.launch)
            out.launch.setdefault(best.pool, []).extend(launches)
            room[best.pool] -= len(best.launch)
    return out


@dataclass
class _Served:
    """How one pool would serve a workload."""

    pool: PoolKey
    launch: list[Offer] = field(default_factory=list)
    taken: Counter[OfferKey] = field(default_factory=Counter)
    usd_per_h: float = 0.0


def _serve(
    key: PoolKey,
    pool: Pool,
    jobs: Sequence[JobRequest],
    free: Mapping[tuple[PoolKey, OfferKey], Sequence[str]],
    offers: Sequence[Offer],
    refused: Collection[OfferKey],
) -> _Served | None:
    """None: some job fits on nothing that this pool may take now."""
    out = _Served(key)
    for job in jobs:
        best: tuple[float, float, OfferKey, Offer, int, int] | None = None
        for offer in offers:
            machines = machines_for(job, offer.shape) if pool.takes(offer) else None
            if machines is None or (job.capacity and offer.kind.value not in job.capacity):
                continue
            there = min(machines, len(free.get((key, offer.key), ())) - out.taken[offer.key])
            if machines > there and offer.key in refused:
                continue
            found = ((machines - there) * offer.usd_per_h, offer.start_s, offer.key, offer, machines, there)
            if best is None or found[:3] < best[:3]:
                best = found
        if best is None:
            return None
        usd_per_h, _, offer_key, offer, machines, there = best
        out.launch += [offer] * (machines - there)
        out.taken[offer_key] += there
        out.usd_per_h += usd_per_h
    return out


def shrink(pool: Pool, had: int, idle_s: Mapping[str, float], wanted: Collection[str] = ()) -> list[str]:
    """Instances that have been idle for longer than the pool keeps them: those that were idle longest first, down to
    the pool's size and its buffer.

    Args:
        pool: its rules.
        had: machines that it has or is about to have.
        idle_s: for how long each idle instance has been so.
        wanted: instances that something waits for.
    """
    spare = sorted((-seconds, name) for name, seconds in idle_s.items() if name not in wanted)
    over = [name for seconds, name in spare if -seconds >= pool.idle_s]
    return over[: max(0, min(had - pool.size, len(spare) - pool.buffer))]
