"""The negative cache (MAST 4.3): once a job is refused in a pass, a job that needs at least as much is refused too.

The second refusal needs no search.
"""

from dataclasses import dataclass, field

from domain.scheduling import JobRequest, PlacementRequest
from domain.topology import ANYWHERE


@dataclass(frozen=True)
class RefusedJob:
    """A job that did not fit into a region on its own, even with all workloads evicted that its workload may evict."""

    job: JobRequest
    rank: int
    may_not_evict: frozenset[str]
    bound: frozenset[str]
    """The workloads whose reserved resources were not available to the job."""

    def is_no_more_than(self, other: "RefusedJob") -> bool:
        """Returns whether refusing this job implies refusing `other`.

        That is so if `other` needs at least as much of each resource and has no additional options or possible victims.
        """
        return self.refuses(other.job, other.rank, other.may_not_evict, other.bound)

    def refuses(self, its: JobRequest, rank: int, may_not_evict: frozenset[str], bound: frozenset[str]) -> bool:
        """Returns whether this refusal implies a refusal of the given job; see `is_no_more_than`."""
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
            and mine.topology in (ANYWHERE, its.topology)
        )


def _hardware(job: JobRequest) -> tuple[frozenset[str], frozenset[str]]:
    return frozenset(job.gpu_types), frozenset(job.capacity)


@dataclass
class NegativeCache:
    """The refusals of one region in one pass. It keeps the Pareto frontier: refusals implied by another are dropped.

    Within a pass, awards only consume resources, so a refusal stays valid until the pass ends and `clear` is called.
    Only jobs that do not fit on their own are stored. If a job fails because another job of its gang took the
    resources, nothing follows for other gangs.
    """

    _frontier: dict[tuple[frozenset[str], frozenset[str]], list[RefusedJob]] = field(default_factory=dict)
    """Refusals by the sets of GPU types and of capacity kinds that a job accepts."""

    def find(
        self, request: PlacementRequest, *, bound: frozenset[str] = frozenset()
    ) -> tuple[JobRequest, RefusedJob] | None:
        """Returns a job of the request that cannot fit, and the stored refusal that implies it; None if there is none.

        `bound`: the workloads whose reserved resources are not available to the request.
        """
        for job in request.jobs:
            types, kinds = _hardware(job)
            for (tried, tried_kinds), refused in self._frontier.items():
                if kinds <= tried_kinds and (types == tried or (types and types < tried)):
                    for known in refused:
                        if known.refuses(job, request.rank, request.may_not_evict, bound):
                            return job, known
        return None

    def add(self, request: PlacementRequest, job: JobRequest, *, bound: frozenset[str] = frozenset()) -> None:
        """Stores the refusal of a job that does not fit on its own."""
        new = RefusedJob(job, request.rank, request.may_not_evict, bound)
        known = self._frontier.setdefault(_hardware(job), [])
        if not any(old.is_no_more_than(new) for old in known):
            known[:] = [old for old in known if not new.is_no_more_than(old)]
            known.append(new)

    def clear(self) -> None:
        """Removes all refusals, at the end of a pass."""
        self._frontier.clear()

    def __len__(self) -> int:
        return sum(len(known) for known in self._frontier.values())
