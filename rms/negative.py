"""The negative cache (MAST 4.3): what could not be placed in this pass spares the look for what asks for no less."""

from dataclasses import dataclass, field

from domain.scheduling import JobRequest, PlacementRequest


@dataclass(frozen=True)
class Refused:
    """A job for which a region had no room, all by itself and with everybody gone whom its workload may evict."""

    job: JobRequest
    rank: int
    may_not_evict: frozenset[str]
    bound: bool
    """Whether what is reserved was out of its reach."""

    def is_no_more_than(self, other: "Refused") -> bool:
        """Whether `other` asks for at least as much of everything, has no more choice, and may evict nobody else."""
        return self.refuses(other.job, other.rank, other.may_not_evict, other.bound)

    def refuses(self, its: JobRequest, rank: int, may_not_evict: frozenset[str], bound: bool) -> bool:
        """Whether a job has no room either: see `is_no_more_than`."""
        mine = self.job
        return (
            mine.tasks <= its.tasks
            and mine.gpus_per_task <= its.gpus_per_task
            and self.rank <= rank
            and mine.cpus_milli_per_task <= its.cpus_milli_per_task
            and mine.memory_bytes_per_task <= its.memory_bytes_per_task
            and self.may_not_evict <= may_not_evict
            and self.bound <= bound
            and mine.span_clusters >= its.span_clusters
        )


def _hardware(job: JobRequest) -> tuple[frozenset[str], frozenset[str]]:
    return frozenset(job.gpu_types), frozenset(job.capacity)


@dataclass
class NegativeCache:
    """One region's refusals in one pass. Only the frontier is kept: of two, one of which asks for no less, the other.

    Within a pass awards only take, so what had no room has none until the pass is over: then `clear`. Only a job that
    has no room by itself is kept. That of a gang whose jobs compete tells nothing of another gang.
    """

    _frontier: dict[tuple[frozenset[str], frozenset[str]], list[Refused]] = field(default_factory=dict)
    """By the sets of GPU types and of kinds of capacity that a job accepts: the hardware."""

    def find(self, request: PlacementRequest, *, bound: bool = False) -> tuple[JobRequest, Refused] | None:
        """One of the request's jobs that has no room, and the refused one that tells so.

        `bound`: what is reserved is out of its reach.
        """
        for job in request.jobs:
            types, kinds = _hardware(job)
            for (tried, tried_kinds), refused in self._frontier.items():
                if kinds <= tried_kinds and (types == tried or (types and types < tried)):
                    for known in refused:
                        if known.refuses(job, request.rank, request.may_not_evict, bound):
                            return job, known
        return None

    def add(self, request: PlacementRequest, job: JobRequest, *, bound: bool = False) -> None:
        """A job that has no room by itself."""
        new = Refused(job, request.rank, request.may_not_evict, bound)
        known = self._frontier.setdefault(_hardware(job), [])
        if not any(old.is_no_more_than(new) for old in known):
            known[:] = [old for old in known if not new.is_no_more_than(old)]
            known.append(new)

    def clear(self) -> None:
        """The pass is over."""
        self._frontier.clear()

    def copy(self) -> "NegativeCache":
        """What is known now."""
        return NegativeCache(_frontier={wanted: list(known) for wanted, known in self._frontier.items()})

    def become(self, other: "NegativeCache") -> None:
        """Knows what another knows, and no more."""
        self._frontier = {wanted: list(known) for wanted, known in other._frontier.items()}

    def __len__(self) -> int:
        return sum(len(known) for known in self._frontier.values())
