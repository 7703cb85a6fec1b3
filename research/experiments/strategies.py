"""Ways in which a person can try to get ahead with the same work, by what the API allows (docs/gaming.md).

A *piece* is a workload of honest use. A strategy replaces it with *lanes*: workloads that run beside each other. A lane
is one workload or several, each of which is submitted when the one before has ended.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf

from simulation.workloads import SimulatedWorkload

Lanes = tuple[tuple[SimulatedWorkload, ...], ...]
HOUR_S = 3600.0
SHORTEST_S = 600.0
"""The shortest false limit: the start of each part costs minutes of provisioning."""


@dataclass(frozen=True)
class GamingStrategy:
    """What replaces a piece, and what its person does while it waits."""

    rewrite: Callable[[SimulatedWorkload, int], Lanes]
    """Returns the lanes of a piece; the number is the best level that its tenant may ask for."""
    resubmit_after_s: float = inf
    """A workload that has waited this long is cancelled and submitted again."""
    copies: bool = False
    """Each lane does all of the work; when one has got its slots, the others are cancelled."""
    early_s: float = 0.0
    """The piece is submitted this long before its work can begin; if it starts earlier, its slots wait for the work."""


@dataclass(frozen=True)
class RewrittenPiece:
    """A piece of honest use, and the lanes that replace it."""

    origin: SimulatedWorkload
    lanes: Lanes
    copies: bool = False

    @property
    def workloads(self) -> list[SimulatedWorkload]:
        """All workloads of the lanes."""
        return [w for lane in self.lanes for w in lane]


def rewritten(piece: SimulatedWorkload, strategy: GamingStrategy, best_level: int) -> RewrittenPiece:
    """Returns the piece as its person submits it; only the first workload of each lane is submitted at once."""
    at_s = max(0.0, piece.submit_s - strategy.early_s) if strategy.early_s else piece.submit_s
    lanes = tuple(
        (replace(lane[0], submit_s=at_s, arrives_s=at_s), *(replace(w, arrives_s=inf) for w in lane[1:]))
        for lane in strategy.rewrite(piece, best_level)
    )
    return RewrittenPiece(piece, lanes, strategy.copies)


def _same(piece: SimulatedWorkload, _: int) -> Lanes:
    return ((piece,),)


def _renamed(piece: SimulatedWorkload, _: int) -> Lanes:
    return ((replace(piece, id=f"{piece.id}!", recurring=f"name-of-{piece.id}"),),)


def _other_key(piece: SimulatedWorkload, _: int) -> Lanes:
    return ((replace(piece, user=f"{piece.user}-key-{sum(piece.id.encode()) % 4}"),),)


def _singles(piece: SimulatedWorkload, best_level: int, limit_times_gpus: bool = False) -> Lanes:
    (job,) = piece.jobs
    if job.gpus <= 1:
        return _same(piece, best_level)
    one = replace(
        job, tasks=1, gpus_per_task=1, cpus_milli_per_task=job.cpus_milli // job.gpus,
        memory_bytes_per_task=job.tasks * job.memory_bytes_per_task // job.gpus,
    )  # fmt: skip
    limit_s = piece.max_runtime_s * (job.gpus if limit_times_gpus else 1)
    return tuple((replace(piece, id=f"{piece.id}!{k}", jobs=(one,), max_runtime_s=limit_s),) for k in range(job.gpus))


def _singles_in_order(piece: SimulatedWorkload, best_level: int) -> Lanes:
    return _singles(piece, best_level, limit_times_gpus=True)


def _hours(piece: SimulatedWorkload, _: int) -> Lanes:
    parts = max(1, ceil(piece.duration_s / HOUR_S))
    length_s = piece.duration_s / parts
    part = replace(piece, duration_s=length_s, max_runtime_s=length_s)
    return (tuple(replace(part, id=f"{piece.id}!{k}") for k in range(parts)),)


def _dust(piece: SimulatedWorkload, best_level: int) -> Lanes:
    return tuple(lane for (single,) in _singles(piece, best_level) for lane in _hours(single, best_level))


def _false_limit(piece: SimulatedWorkload, _: int) -> Lanes:
    limit_s = max(SHORTEST_S, piece.max_runtime_s / 4)
    parts = max(1, ceil(piece.duration_s / limit_s))
    ran_s = [min(limit_s, piece.duration_s - k * limit_s) for k in range(parts)]
    part = replace(piece, max_runtime_s=limit_s)
    return (tuple(replace(part, id=f"{piece.id}!{k}", duration_s=ran) for k, ran in enumerate(ran_s)),)


def _no_limit(piece: SimulatedWorkload, _: int) -> Lanes:
    return ((replace(piece, max_runtime_s=inf),),)


def _best_level(piece: SimulatedWorkload, best_level: int) -> Lanes:
    return ((replace(piece, level=best_level),),)


def _copies(piece: SimulatedWorkload, _: int) -> Lanes:
    return tuple((replace(piece, id=f"{piece.id}!{k}"),) for k in range(3))


HONEST = GamingStrategy(_same)
STRATEGIES = {
    "names": GamingStrategy(_renamed),
    "keys": GamingStrategy(_other_key),
    "level": GamingStrategy(_best_level),
    "no-limit": GamingStrategy(_no_limit),
    "false-limit": GamingStrategy(_false_limit),
    "hours": GamingStrategy(_hours),
    "resubmit": GamingStrategy(_same, resubmit_after_s=900.0),
    "copies": GamingStrategy(_copies, copies=True),
    "early": GamingStrategy(_same, early_s=HOUR_S),
    "singles": GamingStrategy(_singles),
    "singles-in-order": GamingStrategy(_singles_in_order),
    "dust": GamingStrategy(_dust),
}


def persons(workloads: Sequence[SimulatedWorkload], from_s: float, to_s: float, tenants: int) -> set[tuple[str, str]]:
    """Returns (tenant, person): of each of the `tenants` with the most submissions, the person with the most."""
    submitted = [w for w in workloads if from_s <= w.submit_s < to_s]
    of_tenant = Counter(w.tenant for w in submitted)
    of_person = Counter((w.tenant, w.user) for w in submitted)
    largest = sorted(of_tenant, key=lambda name: (-of_tenant[name], name))[:tenants]
    return {min((who for who in of_person if who[0] == t), key=lambda who: (-of_person[who], who)) for t in largest}
