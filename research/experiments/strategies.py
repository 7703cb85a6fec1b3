"""Ways in which a person can try to get ahead of others with the same work, by what the API allows.

A *piece* is a workload of honest use. A strategy replaces it with *lanes*: workloads that wait and run beside each
other, each lane one workload after another, the next one submitted when the one before has ended.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf

from simulation.workloads import SimulatedWorkload

Lanes = tuple[tuple[SimulatedWorkload, ...], ...]
HOUR_S = 3600.0
SHORTEST_S = 600.0
"""The shortest part of a workload: the start of each part costs minutes of provisioning."""


@dataclass(frozen=True)
class GamingStrategy:
    """A strategy: what replaces a piece, and what its person does while it waits."""

    means: str
    """What the person does through the API."""
    rewrite: Callable[[SimulatedWorkload, int], Lanes]
    """Returns the lanes of a piece; the number is the best level that its tenant may ask for."""
    resubmit_after_s: float = inf
    """A workload that has waited this long is cancelled and submitted again."""
    copies: bool = False
    """Each lane does all of the work; when one has got its slots, the others are cancelled."""
    early_s: float = 0.0
    """The person submits this long before the work can begin, and lets the slots wait for it."""


@dataclass(frozen=True)
class RewrittenPiece:
    """A piece of honest use, and the lanes that replace it."""

    origin: SimulatedWorkload
    lanes: Lanes
    copies: bool = False
    workloads: list[SimulatedWorkload] = field(init=False)

    def __post_init__(self) -> None:
        """Collects the workloads of the lanes."""
        object.__setattr__(self, "workloads", [w for lane in self.lanes for w in lane])


def rewritten(piece: SimulatedWorkload, strategy: GamingStrategy, best_level: int) -> RewrittenPiece:
    """Returns the piece as its person submits it; only the first workload of each lane is submitted at once."""
    lanes = strategy.rewrite(piece, best_level)
    if strategy.early_s:
        at_s = max(0.0, piece.submit_s - strategy.early_s)
        lanes = tuple((replace(lane[0], submit_s=at_s, arrives_s=at_s), *lane[1:]) for lane in lanes)
    later = tuple((lane[0], *(replace(w, arrives_s=inf) for w in lane[1:])) for lane in lanes)
    return RewrittenPiece(piece, later, strategy.copies)


def _unchanged(piece: SimulatedWorkload, _: int) -> Lanes:
    return ((piece,),)


def _renamed(piece: SimulatedWorkload, _: int) -> Lanes:
    return ((replace(piece, id=f"{piece.id}!", recurring=f"name-of-{piece.id}"),),)


def _by_other_key(piece: SimulatedWorkload, _: int) -> Lanes:
    key = sum(piece.id.encode()) % 4
    return ((replace(piece, user=f"{piece.user}-key-{key}"),),)


def _singles(piece: SimulatedWorkload, best_level: int, share: int = 1) -> Lanes:
    """Splits each task into tasks of `share` GPUs, each a workload of its own."""
    (job,) = piece.jobs
    parts = job.gpus // share if job.gpus_per_task % share == 0 else 1
    if parts <= 1:
        return _unchanged(piece, best_level)
    per_part = job.tasks * job.gpus // parts // job.tasks
    small = replace(
        job, tasks=1, gpus_per_task=per_part, cpus_milli_per_task=job.cpus_milli // parts,
        memory_bytes_per_task=job.tasks * job.memory_bytes_per_task // parts,
    )  # fmt: skip
    return tuple((replace(piece, id=f"{piece.id}!{k}", jobs=(small,)),) for k in range(parts))


def _chain(piece: SimulatedWorkload, parts: int, limit_s: float = inf) -> tuple[SimulatedWorkload, ...]:
    """Splits a workload into parts that run one after the other, with the limit, or with their length as limit."""
    length_s = piece.duration_s / parts
    return tuple(
        replace(piece, id=f"{piece.id}!{k}", duration_s=length_s, max_runtime_s=min(limit_s, length_s))
        for k in range(parts)
    )


def _hours(piece: SimulatedWorkload, _: int) -> Lanes:
    return (_chain(piece, max(1, ceil(piece.duration_s / HOUR_S))),)


def _false_limit(piece: SimulatedWorkload, _: int) -> Lanes:
    limit_s = max(SHORTEST_S, piece.max_runtime_s / 4)
    parts, left_s = [], piece.duration_s
    while left_s > 0:
        ran_s = min(left_s, limit_s)
        parts.append(
            replace(piece, id=f"{piece.id}!{len(parts)}", duration_s=ran_s, max_runtime_s=limit_s)
        )
        left_s -= ran_s
    return (tuple(parts),)


def _dust(piece: SimulatedWorkload, best_level: int) -> Lanes:
    return tuple(lane for (single,) in _singles(piece, best_level) for lane in _hours(single, best_level))


def _best_level(piece: SimulatedWorkload, best_level: int) -> Lanes:
    return ((replace(piece, level=best_level),),)


def _without_limit(piece: SimulatedWorkload, _: int) -> Lanes:
    return ((replace(piece, max_runtime_s=inf),),)


def _copies(piece: SimulatedWorkload, _: int) -> Lanes:
    return tuple((replace(piece, id=f"{piece.id}!{k}"),) for k in range(3))


HONEST = GamingStrategy("one workload for a piece of work, its own level, its limit twice the runtime on the median", _unchanged)
STRATEGIES = {
    "names": GamingStrategy("another `name`, `recurring` and id for every workload", _renamed),
    "keys": GamingStrategy("four keys, which an operator must create, in turn", _by_other_key),
    "singles": GamingStrategy("a gang of k GPUs becomes k workloads of one GPU", _singles),
    "hours": GamingStrategy("a long workload becomes a chain of one hour at most, each with its exact limit", _hours),
    "dust": GamingStrategy("both: workloads of one GPU and one hour at most", _dust),
    "false limit": GamingStrategy(
        "a quarter of the honest `max_runtime`, at least ten minutes; the rest is submitted again after the kill",
        _false_limit,
    ),
    "no limit": GamingStrategy("no `max_runtime`", _without_limit),
    "level": GamingStrategy("the tenant's level for everything", _best_level),
    "resubmit": GamingStrategy("`mizzen cancel` after 15 minutes in the queue, and a new submission", _unchanged, 900.0),
    "copies": GamingStrategy("three copies; when one gets its slots, the others are cancelled", _copies, copies=True),
    "early": GamingStrategy(
        "submits an hour before the work can begin; the slots wait for it", _unchanged, early_s=HOUR_S
    ),
}


def persons(
    workloads: Sequence[SimulatedWorkload], from_s: float, to_s: float, tenants: int
) -> set[tuple[str, str]]:
    """Returns (tenant, person): in each of the `tenants` with the most submissions, the person with the most."""
    count: dict[tuple[str, str], int] = {}
    of_tenant: dict[str, int] = {}
    for w in workloads:
        if from_s <= w.submit_s < to_s:
            count[w.tenant, w.user] = count.get((w.tenant, w.user), 0) + 1
            of_tenant[w.tenant] = of_tenant.get(w.tenant, 0) + 1
    largest = sorted(of_tenant, key=lambda name: (-of_tenant[name], name))[:tenants]
    return {min((key for key in count if key[0] == name), key=lambda key: (-count[key], key)) for name in largest}
