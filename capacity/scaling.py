"""Growing and shrinking of pools: a pool grows for waiting workloads, and shrinks when machines are idle.

In queue order, each waiting workload first claims room on machines that are idle, starting, or being launched for
other workloads. Only the rest is launched. Small workloads share a machine, as they will when they are placed. A
workload keeps its claims from one round to the next, so machines for a shortage are launched only once.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from capacity.offers import Offer, OfferKey, Shape
from capacity.pools import Pool, PoolKey
from domain.scheduling import JobRequest

Headroom = tuple[int, int, int]
"""GPUs, thousandths of a core, bytes of memory."""
MOST_SHORTAGES = 1000
"""The maximum number of waiting workloads, from the head of the queue, that one round considers."""


@dataclass(frozen=True)
class Shortage:
    """A workload for which no region has room."""

    workload: str
    jobs: tuple[JobRequest, ...]
    regions: frozenset[str]
    """The regions in which only machines are missing."""
    tenant: str = ""
    """Empty: unknown."""


Claims = Mapping[str, tuple[int, ...]]
"""The workloads that claim a machine, each with the number of tasks of each of its jobs that the machine is to run."""


@dataclass(frozen=True)
class Idle:
    """A machine that is idle or starting."""

    instance: str
    pool: PoolKey
    offer: Offer
    claims: Claims = field(default_factory=dict)
    """The claims of the previous round."""


@dataclass
class Growth:
    """The machines to launch, and the claims on existing machines."""

    launch: dict[PoolKey, list[tuple[Offer, Claims]]] = field(default_factory=dict)
    """For each pool, the offers to launch from, each with the workloads that claim the machine."""
    claims: dict[str, Claims] = field(default_factory=dict)
    """For each idle or starting instance that is claimed, the workloads that claim it."""


def tasks_on(job: JobRequest, gpu_type: str | None, room: Headroom) -> int:
    """Returns how many of a job's tasks fit into free GPUs of a type, thousandths of a core and bytes of memory."""
    if job.gpus_per_task and gpu_type not in job.gpu_types:
        return 0
    needs = (job.gpus_per_task, job.cpus_milli_per_task, job.memory_bytes_per_task)
    return min((have // need for have, need in zip(room, needs, strict=True) if need), default=job.tasks)


def grow(
    pools: Mapping[PoolKey, Pool],
    had: Mapping[PoolKey, int],
    shortages: Sequence[Shortage],
    idle: Sequence[Idle],
    offers: Sequence[Offer],
    refused: Collection[OfferKey] = (),
) -> Growth:
    """Returns the machines to launch for waiting workloads, served in queue order.

    First, a workload whose claimed machines of the previous round still exist keeps them, even while their provider
    does not answer. Every other workload gets all that it needs from one pool that serves its tenant, or nothing:
    within the pool's maximum size, and from offers that both the pool and the workload's document allow. For each job,
    the offer with the lowest additional cost of launches in US dollars an hour is chosen, then the one with the lowest
    cost of all machines used. Pools are chosen by the same criteria.

    Args:
        pools: all pools, whether they may grow or not.
        had: for each pool, the number of machines that exist or are being launched.
        shortages: the waiting workloads in queue order.
        idle: the idle and starting machines of all pools.
        offers: the offers of all providers that answer.
        refused: keys of offers that were refused recently; they are not used now.
    """
    stock = _Stock(idle)
    left = {key: max(0, pool.most - had.get(key, 0)) for key, pool in pools.items()}
    taken = [(pool, [offer for offer in offers if pool.takes(offer)]) for _, pool in sorted(pools.items())]
    waiting = [one for one in shortages if not stock.keep(one)]
    while waiting:  # Claims that are served later can make room for an earlier workload, such as by a launch.
        unserved = []
        in_vain = set[tuple[tuple[JobRequest, ...], frozenset[str], str]]()
        """Demands that could not be served. They are tried again only after a new launch, which adds room."""
        for shortage in waiting:
            asked = shortage.jobs, shortage.regions, shortage.tenant
            best = None if asked in in_vain else _cheapest(shortage, stock, taken, refused, left)
            if best is None:
                in_vain.add(asked)
                unserved.append(shortage)
                continue
            if best.launched:
                in_vain.clear()
            left[best.pool] -= len(best.launched)
            stock.take(shortage, best)
        if len(unserved) == len(waiting):
            break
        waiting = unserved
    return stock.growth()


class _Machine:
    """A machine that waiting workloads may claim."""

    def __init__(self, pool: PoolKey, offer: Offer, instance: str | None = None) -> None:
        """`instance` is None for a machine that is still to be launched."""
        self.pool, self.offer, self.instance = pool, offer, instance
        self.room = room_of(offer.shape)
        self.claims: dict[str, tuple[int, ...]] = {}


class _Stock:
    """The machines that waiting workloads may claim: idle machines, starting machines, and planned launches."""

    def __init__(self, idle: Sequence[Idle]) -> None:
        self._machines: list[_Machine] = []
        self._open: dict[tuple[PoolKey, OfferKey], list[_Machine]] = {}
        """The machines with free room, by pool and offer; those with claims come first, the fullest before others."""
        self._before: dict[str, list[tuple[_Machine, tuple[int, ...]]]] = {}
        for one in sorted(idle, key=lambda one: one.instance):
            machine = _Machine(one.pool, one.offer, one.instance)
            self._add(machine)
            for workload, tasks in one.claims.items():
                self._before.setdefault(workload, []).append((machine, tasks))

    def _add(self, machine: _Machine) -> None:
        self._machines.append(machine)
        self._open.setdefault((machine.pool, machine.offer.key), []).append(machine)

    def open(self, pool: PoolKey, offer: Offer) -> Sequence[_Machine]:
        """Returns the machines of a pool and an offer that have free room."""
        return self._open.get((pool, offer.key), ())

    def keep(self, shortage: Shortage) -> bool:
        """Renews a workload's claims of the previous round; False: it had none, or not all machines still exist."""
        before = self._before.get(shortage.workload, [])
        jobs = shortage.jobs
        if [sum(tasks) for tasks in zip(*(tasks for _, tasks in before), strict=True)] != [job.tasks for job in jobs]:
            return False
        for machine, tasks in before:
            self._claim(machine, shortage, tasks)
        return True

    def take(self, shortage: Shortage, served: "_Served") -> None:
        """Adds the machines that `served` launches, and the workload's claims."""
        for machine in served.launched:
            self._add(machine)
        for machine, tasks in served.taken:
            self._claim(machine, shortage, tuple(tasks))

    def _claim(self, machine: _Machine, shortage: Shortage, tasks: tuple[int, ...]) -> None:
        machine.claims[shortage.workload] = tasks
        machine.room = _left(machine.room, zip(shortage.jobs, tasks, strict=True))
        key = machine.pool, machine.offer.key
        there = [one for one in self._open[key] if any(one.room[:2])]
        self._open[key] = sorted(there, key=lambda one: (not one.claims, one.room))

    def growth(self) -> Growth:
        """Returns the launches and claims so far."""
        out = Growth()
        for machine in self._machines:
            if machine.instance is None:
                out.launch.setdefault(machine.pool, []).append((machine.offer, machine.claims))
            elif machine.claims:
                out.claims[machine.instance] = machine.claims
        return out


class _Served:
    """The machines with which one pool would serve a workload."""

    def __init__(self, pool: PoolKey, jobs: Sequence[JobRequest]) -> None:
        self.pool, self._jobs = pool, jobs
        self.launched: list[_Machine] = []
        self.taken: list[tuple[_Machine, list[int]]] = []
        """The machines used, each with the number of tasks of each job on it."""
        self.launch_usd_per_h = self.usd_per_h = 0.0
        """The price of the launched machines, and the price of all machines used."""

    def room(self, machine: _Machine) -> Headroom:
        """Returns the free room of a machine."""
        for one, tasks in self.taken:
            if one is machine:
                return _left(machine.room, zip(self._jobs, tasks, strict=True))
        return machine.room

    def put(self, number: int, filled: Sequence[tuple[_Machine, int]], launched: Sequence[_Machine]) -> None:
        """Assigns tasks of the job at index `number` to machines. `launched` are the new machines among them."""
        self.launched += launched
        self.launch_usd_per_h += sum(machine.offer.usd_per_h for machine in launched)
        self.usd_per_h += sum(machine.offer.usd_per_h for machine, _ in filled)
        for machine, tasks in filled:
            row = next((row for one, row in self.taken if one is machine), None)
            if row is None:
                row = [0] * len(self._jobs)
                self.taken.append((machine, row))
            row[number] = tasks


def _cheapest(
    shortage: Shortage,
    stock: _Stock,
    pools: Iterable[tuple[Pool, Sequence[Offer]]],
    refused: Collection[OfferKey],
    left: Mapping[PoolKey, int],
) -> _Served | None:
    """Serves a workload from the cheapest pool; None: no pool can. `left` limits the launches of each pool."""
    found = (
        _serve(pool.key, shortage.jobs, stock, offers, refused, left[pool.key])
        for pool, offers in pools
        if pool.region in shortage.regions and pool.serves(shortage.tenant)
    )
    able = [served for served in found if served is not None]
    return min(able, key=lambda served: (served.launch_usd_per_h, served.usd_per_h, served.pool), default=None)


def _serve(
    pool: PoolKey,
    jobs: Sequence[JobRequest],
    stock: _Stock,
    offers: Sequence[Offer],
    refused: Collection[OfferKey],
    most: int,
) -> _Served | None:
    """Serves a workload from a pool with at most `most` launches; None: at least one job fits no allowed offer."""
    out = _Served(pool, jobs)
    for number, job in enumerate(jobs):
        found = []
        for offer in offers:
            if job.capacity and offer.kind.value not in job.capacity:
                continue
            if job.gpus_per_task and offer.shape.gpu_type not in job.gpu_types:
                continue
            machines = [*stock.open(pool, offer), *(one for one in out.launched if one.offer.key == offer.key)]
            filled = _fill(job, pool, offer, [(machine, out.room(machine)) for machine in machines])
            if filled is None:
                continue
            on, launched = filled
            if len(out.launched) + len(launched) > most or (launched and offer.key in refused):
                continue
            cost = len(launched) * offer.usd_per_h, len(on) * offer.usd_per_h, offer.start_s, offer.key
            found.append((cost, on, launched))
        if not found:
            return None
        _, on, launched = min(found, key=lambda one: one[0])
        out.put(number, on, launched)
    return out


def _fill(
    job: JobRequest, pool: PoolKey, offer: Offer, machines: Sequence[tuple[_Machine, Headroom]]
) -> tuple[list[tuple[_Machine, int]], list[_Machine]] | None:
    """Assigns a job's tasks to machines of an offer, and to new machines as needed.

    Returns:
        All machines used, each with its number of tasks, and the new machines. None: a task does not fit on an empty
        machine.
    """
    left, on_empty = job.tasks, tasks_on(job, offer.shape.gpu_type, room_of(offer.shape))
    if not on_empty:
        return None
    filled, launched = [], []
    for machine, room in machines:
        if tasks := min(left, tasks_on(job, offer.shape.gpu_type, room)):
            filled.append((machine, tasks))
            left -= tasks
    while left:
        launched.append(_Machine(pool, offer))
        filled.append((launched[-1], min(left, on_empty)))
        left -= filled[-1][1]
    return filled, launched


def room_of(shape: Shape) -> Headroom:
    """Returns the room of an empty machine."""
    return shape.gpus, shape.cpus_milli, shape.memory_bytes


def _left(room: Headroom, tasks: Iterable[tuple[JobRequest, int]]) -> Headroom:
    """Returns the room that is left after the given numbers of tasks are placed."""
    gpus, cpus_milli, memory_bytes = room
    for job, count in tasks:
        gpus -= count * job.gpus_per_task
        cpus_milli -= count * job.cpus_milli_per_task
        memory_bytes -= count * job.memory_bytes_per_task
    return gpus, cpus_milli, memory_bytes


def shrink(pool: Pool, had: int, idle_s: Mapping[str, float], wanted: Collection[str] = ()) -> list[str]:
    """Returns the instances to end because they have been idle for at least `pool.idle_s`, the longest idle first.

    The pool keeps its size and its buffer of idle machines.

    Args:
        pool: the pool's rules.
        had: the number of machines that exist or are being launched.
        idle_s: for each idle instance, how long it has been idle, in seconds.
        wanted: instances that workloads wait for; they are kept for `pool.hold_s`.
    """
    kept = {name for name in wanted if idle_s.get(name, 0.0) < pool.hold_s}
    spare = sorted((-seconds, name) for name, seconds in idle_s.items() if name not in kept)
    over = [name for seconds, name in spare if -seconds >= pool.idle_s]
    return over[: max(0, min(had - pool.size, len(spare) - pool.buffer))]
