"""A pool grows for what waits, and shrinks when nothing does.

What waits takes room on machines that stand idle, are on their way or are just being launched for others, in the order
of the queue; only what is then missing is launched. Small workloads share machines, as they will when they are placed.
A workload keeps the machines that it waits for from one look to the next, so a shortage is launched for only once.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from capacity.offers import Offer, OfferKey, Shape
from capacity.pools import Pool, PoolKey
from domain.scheduling import JobRequest

Room = tuple[int, int, int]
"""GPUs, thousandths of a core, bytes of memory."""
MOST_SHORTAGES = 1000
"""So many of the queue's head are looked at."""


@dataclass(frozen=True)
class Shortage:
    """A workload that no region has room for."""

    workload: str
    jobs: tuple[JobRequest, ...]
    regions: frozenset[str]
    """Those in which nothing but machines is missing."""


Claims = Mapping[str, tuple[int, ...]]
"""Workload to how many tasks of each of its jobs a machine is meant for."""


@dataclass(frozen=True)
class Idle:
    """A machine that stands idle, or is on its way."""

    instance: str
    pool: PoolKey
    offer: Offer
    claims: Claims = field(default_factory=dict)
    """Who waited for it at the last look."""


@dataclass
class Growth:
    """What is to be launched, and which machines are whose."""

    launch: dict[PoolKey, list[tuple[Offer, Claims]]] = field(default_factory=dict)
    """By pool, each with the workloads that wait for it."""
    claims: dict[str, Claims] = field(default_factory=dict)
    """Instance that is idle or on its way to the workloads that wait for it."""


def tasks_on(job: JobRequest, gpu_type: str | None, room: Room) -> int:
    """How many of a job's tasks have room: of GPUs of a type, of thousandths of a core and of bytes of memory."""
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
    """What to launch for workloads that wait, the most important first.

    A workload gets all that it needs from one pool, or nothing: within the pool's maximum, of offers that the pool and
    the workload's document allow. Each job gets the offer for which least is to be launched in US dollars an hour; then
    the one whose machines cost least. Pools are chosen in the same way. First of all, a
    workload whose machines of the last look are all still there keeps them, also while their provider is silent.

    Args:
        pools: those that may grow, and others.
        had: machines that each pool has or is about to have.
        shortages: in the order of the queue.
        idle: machines without work, of all pools.
        offers: of all providers that answer.
        refused: keys of offers that were refused lately, which are not asked now.
    """
    stock = _Stock(idle)
    left = {key: max(0, pool.most - had.get(key, 0)) for key, pool in pools.items()}
    taken = [(key, [offer for offer in offers if pool.takes(offer)]) for key, pool in sorted(pools.items())]
    launched = 0
    in_vain: dict[tuple[tuple[JobRequest, ...], frozenset[str]], int] = {}
    """What was asked for without success, with how many machines had been launched: only those make more room."""
    for shortage in [one for one in shortages if not stock.keep(one)]:
        asked = shortage.jobs, shortage.regions
        if in_vain.get(asked) == launched:
            continue
        found = [
            served
            for key, takes in taken
            if key[0] in shortage.regions
            and (served := _serve(key, shortage.jobs, stock, takes, refused, left[key])) is not None
        ]
        if not found:
            in_vain[asked] = launched
            continue
        best = min(found, key=lambda served: (served.launch_usd_per_h, served.usd_per_h, served.pool))
        left[best.pool] -= len(best.launched)
        launched += len(best.launched)
        stock.take(shortage, best)
    return stock.growth()


class _Machine:
    """A machine that takes what waits."""

    def __init__(self, pool: PoolKey, offer: Offer, instance: str | None = None) -> None:
        """`instance`: None for one that is to be launched."""
        self.pool, self.offer, self.instance = pool, offer, instance
        self.room = room_of(offer.shape)
        self.claims: dict[str, tuple[int, ...]] = {}


class _Stock:
    """Machines on which waiting workloads could run: idle ones, launched ones that have yet to join, planned ones."""

    def __init__(self, idle: Sequence[Idle]) -> None:
        self._machines: list[_Machine] = []
        self._open: dict[tuple[PoolKey, OfferKey], list[_Machine]] = {}
        """Those with room, the ones that others share first."""
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
        """Machines of a pool and an offer on which there is room."""
        return self._open.get((pool, offer.key), ())

    def keep(self, shortage: Shortage) -> bool:
        """Gives a workload the machines that it waited for; False: there were none, or not all are there."""
        before = self._before.get(shortage.workload, [])
        jobs = shortage.jobs
        if [sum(tasks) for tasks in zip(*(tasks for _, tasks in before), strict=True)] != [job.tasks for job in jobs]:
            return False
        for machine, tasks in before:
            self._claim(machine, shortage, tasks)
        return True

    def take(self, shortage: Shortage, served: "_Served") -> None:
        """Gives a workload what was found for it."""
        for machine in served.launched:
            self._add(machine)
        for machine, tasks in served.taken:
            self._claim(machine, shortage, tuple(tasks))

    def _claim(self, machine: _Machine, shortage: Shortage, tasks: tuple[int, ...]) -> None:
        machine.claims[shortage.workload] = tasks
        machine.room = _left(machine.room, zip(shortage.jobs, tasks, strict=True))
        key = machine.pool, machine.offer.key
        there = [one for one in self._open[key] if any(one.room[:2])]
        self._open[key] = sorted(there, key=lambda one: not one.claims)

    def growth(self) -> Growth:
        """What was given to whom."""
        out = Growth()
        for machine in self._machines:
            if machine.instance is None:
                out.launch.setdefault(machine.pool, []).append((machine.offer, machine.claims))
            elif machine.claims:
                out.claims[machine.instance] = machine.claims
        return out


class _Served:
    """How one pool would serve a workload."""

    def __init__(self, pool: PoolKey, jobs: Sequence[JobRequest]) -> None:
        self.pool, self._jobs = pool, jobs
        self.launched: list[_Machine] = []
        self.taken: list[tuple[_Machine, list[int]]] = []
        """Machines, with how many tasks of each job are on them."""
        self.launch_usd_per_h = self.usd_per_h = 0.0
        """Of the machines that are launched, and of all on which something is."""

    def room(self, machine: _Machine) -> Room:
        """What is left of a machine."""
        for one, tasks in self.taken:
            if one is machine:
                return _left(machine.room, zip(self._jobs, tasks, strict=True))
        return machine.room

    def put(self, number: int, filled: Sequence[tuple[_Machine, int]], launched: Sequence[_Machine]) -> None:
        """Puts tasks of a job, by its number, on machines, some of which are to be launched."""
        self.launched += launched
        self.launch_usd_per_h += sum(machine.offer.usd_per_h for machine in launched)
        self.usd_per_h += sum(machine.offer.usd_per_h for machine, _ in filled)
        for machine, tasks in filled:
            row = next((row for one, row in self.taken if one is machine), None)
            if row is None:
                row = [0] * len(self._jobs)
                self.taken.append((machine, row))
            row[number] = tasks


def _serve(
    pool: PoolKey,
    jobs: Sequence[JobRequest],
    stock: _Stock,
    offers: Sequence[Offer],
    refused: Collection[OfferKey],
    most: int,
) -> _Served | None:
    """On offers that the pool takes, with `most` launches at most; None: some job fits on nothing that it may take."""
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
    job: JobRequest, pool: PoolKey, offer: Offer, machines: Sequence[tuple[_Machine, Room]]
) -> tuple[list[tuple[_Machine, int]], list[_Machine]] | None:
    """Puts a job's tasks on machines of an offer, and on as many new ones as it takes.

    Returns:
        The machines, new ones among them, with how many tasks each gets; and the new ones. None: not even an empty one
        has room for a task.
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


def room_of(shape: Shape) -> Room:
    """What an empty machine has."""
    return shape.gpus, shape.cpus_milli, shape.memory_bytes


def _left(room: Room, tasks: Iterable[tuple[JobRequest, int]]) -> Room:
    """What so many tasks of jobs leave."""
    gpus, cpus_milli, memory_bytes = room
    for job, count in tasks:
        gpus -= count * job.gpus_per_task
        cpus_milli -= count * job.cpus_milli_per_task
        memory_bytes -= count * job.memory_bytes_per_task
    return gpus, cpus_milli, memory_bytes


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
