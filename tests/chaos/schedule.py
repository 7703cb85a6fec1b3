"""The schedule of faults and user requests, drawn from a seed alone."""

import random
from dataclasses import dataclass, replace

LEVELS = {"urgent": 1, "steady": 3, "batch": 6}
"""Tenants and their levels. Each has a quota of the whole fleet, so higher levels evict lower ones."""
FLEET_GPUS = 16
REGIONS = {"east": 8, "west": 8}
"""The GPUs of each region."""

KILLED = ("agents", "agent", "worker", "api", "gateway", "temporal", "postgres", "backend", "shim", "task")
"""Parts that get a SIGKILL."""
STOPPED = ("agent", "worker", "api", "gateway", "temporal", "postgres", "backend", "shim")
"""Parts that get a SIGSTOP, and later a SIGCONT if they were not replaced meanwhile."""
STOPPED_S = (2.0, 25.0)
FULL_S = (3.0, 9.0)
FILLED = {"stack": "", "database": "data/postgres", "bucket": "data/buckets", "work": "data/machines"}
"""The file systems that become full, and their folders in the folder of the stack.

`stack` has all other files, Temporal's database among them; `work` has the working folders of the tasks.
"""
OTHERS = ("zombie-worker", "temporal-lost", "temporal-rolled-back", "award-error", "supervisor-killed", "tree-killed")
FAULTS = (
    *(f"kill-{part}" for part in KILLED), *(f"stop-{part}" for part in STOPPED), *(f"full-{part}" for part in FILLED),
    *OTHERS,
)  # fmt: skip
_LASTS_S = {
    "zombie-worker": (5.0, 20.0),
    "temporal-rolled-back": (2.0, 8.0),
    "award-error": (3.0, 9.0),
}
_DEPENDS = 3
"""One of so many workloads depends on the one before it of its tenant."""
_ARRAYS = 4
"""One of so many workloads is an array. Every second one waits for the elements of the one before it of its tenant."""
_RUNNERS = {1: "after_element", 13: "now"}
"""Of sixteen workloads, the arrays that use runners, and when their elements are interrupted."""
_SHORT = 9
"""Of sixteen workloads, the array whose elements are so short, and start together in such numbers, that those on one
machine share a workflow (`activities.lifecycle.bundles`)."""
REQUESTS = ("cancel-storm", "quota", "preempt", "drain", "cordon", "reclaim", "reclaim-stopped", "idle-machine")


@dataclass(frozen=True)
class Fault:
    """One fault. `draw` in [0, 1) chooses among the processes that run at that time."""

    at_s: float
    kind: str
    draw: float
    lasts_s: float = 0.0


@dataclass(frozen=True)
class Elements:
    """The elements of an array, with the indexes from 0."""

    number: int
    throttle: int
    interrupt: str | None = None
    """When runners interrupt them; None: without runners."""
    at_most_once: bool = False


@dataclass(frozen=True)
class Submission:
    """One workload. `timeouts_s`: the request timeout of each try; the last one is repeated."""

    at_s: float
    name: str
    tenant: str
    tasks: int
    steps: int
    exit_code: int
    copies: int
    """Number of concurrent POSTs with one Idempotency-Key."""
    timeouts_s: tuple[float, ...]
    regions: tuple[str, ...] = tuple(REGIONS)
    """The regions in which the workload may run."""
    after: tuple[str, str] | None = None
    """The workload that it depends on, and the condition."""
    array: Elements | None = None
    same_index: bool = False
    """Whether its elements depend on those of the other one with the same index."""


@dataclass(frozen=True)
class Request:
    """A user request other than a submission."""

    at_s: float
    kind: str
    draw: float
    lasts_s: float


@dataclass(frozen=True)
class Schedule:
    """A seed's faults, submissions and requests, each ordered by time in seconds from the start."""

    faults: tuple[Fault, ...]
    submissions: tuple[Submission, ...]
    requests: tuple[Request, ...]


def draw_schedule(seed: int, duration_s: float, fault_every_s: float, submit_every_s: float) -> Schedule:
    """Draws a seed's schedule of `duration_s` seconds.

    Every kind of fault, and every kind of request, occurs once before any kind occurs twice.
    """
    chance = random.Random(seed)
    return Schedule(
        tuple(_faults(chance, duration_s, fault_every_s)),
        tuple(_submissions(chance, duration_s, submit_every_s)),
        tuple(_requests(chance, duration_s)),
    )


def _times(chance: random.Random, duration_s: float, every_s: float) -> list[float]:
    out, at_s = [], chance.uniform(0.0, every_s)
    while at_s < duration_s:
        out.append(at_s)
        at_s += chance.uniform(0.3, 1.7) * every_s
    return out


def _faults(chance: random.Random, duration_s: float, every_s: float) -> list[Fault]:
    out: list[Fault] = []
    ahead: list[str] = []
    for at_s in _times(chance, duration_s, every_s):
        if not ahead:
            ahead = list(FAULTS)
            chance.shuffle(ahead)
        kind = ahead.pop()
        lasts = {"stop": STOPPED_S, "full": FULL_S}.get(kind.partition("-")[0]) or _LASTS_S.get(kind, (0.0, 0.0))
        out.append(Fault(at_s, kind, chance.random(), chance.uniform(*lasts)))
    return out


def _submissions(chance: random.Random, duration_s: float, every_s: float) -> list[Submission]:
    out: list[Submission] = []
    for number, at_s in enumerate(_times(chance, duration_s, every_s)):
        tenant = chance.choices(list(LEVELS), weights=(1, 3, 4))[0]
        tasks = chance.choice((1, 1, 1, 2, 3, 4, 8))
        steps = chance.randrange(5, 120 if tenant == "batch" else 50)
        code = 3 if chance.random() < 0.08 else 0
        copies = 3 if chance.random() < 0.15 else 1
        early = tuple(chance.uniform(0.005, 0.3) for _ in range(chance.choice((0, 0, 1, 2))))
        before = [one.name for one in out if one.tenant == tenant]
        condition = ("succeeded", "ended")[number // _DEPENDS % 2]
        after = (before[-1], condition) if before and number % _DEPENDS == 0 else None
        timeouts_s = (*early, 10.0)
        array, same_index = None, False
        if number % _ARRAYS == 1:
            array = Elements(3 + number % 5, 1 + number % 3)
            tasks, steps = min(tasks, 2), min(steps, 20)
            arrays = [one for one in out if one.tenant == tenant and one.array is not None]
            if number % (2 * _ARRAYS) == 5 and arrays and arrays[-1].array is not None:
                after, same_index = (arrays[-1].name, condition), True
                array = Elements(min(array.number, arrays[-1].array.number), array.throttle)
            if number % 16 == _SHORT:
                tasks, steps = 1, min(steps, 8)
                array = Elements(4 * array.number, 4 * array.throttle)
            if (interrupt := _RUNNERS.get(number % 16)) is not None:
                tasks = 1
                array = replace(array, interrupt=interrupt, at_most_once=number // 16 % 2 == 1)
                if not same_index:
                    array = replace(array, number=3 * array.number)
        out.append(
            Submission(
                at_s, f"w-{number}", tenant, tasks, steps, code, copies, timeouts_s, after=after, array=array,
                same_index=same_index,
            )
        )  # fmt: skip
    return out


def _requests(chance: random.Random, duration_s: float) -> list[Request]:
    out: list[Request] = []
    ahead: list[str] = []
    for at_s in _times(chance, duration_s, 12.0):
        if not ahead:
            ahead = list(REQUESTS)
            chance.shuffle(ahead)
        out.append(Request(at_s, ahead.pop(), chance.random(), chance.uniform(3.0, 15.0)))
    return out
