"""Chooses clusters for workloads of Kueue by the auction: by where their data is, by what waits, and by price.

It is pure: the same inputs give the same nominations, so several dispatchers at once agree. Kueue decides about
evictions, so none is planned.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from domain.priority import LOWEST_RANK
from domain.scheduling import JobRequest, MachineState, PlacementRequest, RegionSnapshot
from gms.auction.auction import Auction, Options
from gms.auction.candidate import Candidate
from rms.region import RegionColumns

MOST_CLUSTERS = 10
"""Kueue's limit for the nominated clusters of a workload (20 from 0.15 on)."""


@dataclass(frozen=True)
class WorkerCluster:
    """A worker cluster of MultiKueue: its machines, all free, and the region in which it reads tables."""

    name: str
    region: str
    machines: tuple[MachineState, ...]


@dataclass(frozen=True)
class KueueWorkload:
    """A workload of Kueue that has quota on the manager cluster."""

    id: str
    priority: int
    """A larger number is more important."""
    created_at_s: float
    jobs: tuple[JobRequest, ...]
    clusters: frozenset[str]
    """The active worker clusters of its queue."""
    tables: tuple[str, ...] = ()
    nominated: tuple[str, ...] = ()
    admitted: str | None = None
    """The cluster that has admitted it; None: it waits."""
    is_overdue: bool = False
    """Whether the nominated clusters had enough time to admit it."""
    is_patient: bool = False
    """Whether it has waited so long without a nomination that it may wait in the queue of a full cluster."""

    @property
    def turn(self) -> tuple[int, float, str]:
        """The sort key of the queue."""
        return -self.priority, self.created_at_s, self.id


@dataclass(frozen=True)
class Nomination:
    """The clusters to nominate, the first one first; and why there is no further one, if one is wanted."""

    clusters: tuple[str, ...]
    why: str | None = None


def nominate(
    clusters: Sequence[WorkerCluster], workloads: Iterable[KueueWorkload], tables: Mapping[str, frozenset[str]]
) -> dict[str, Nomination]:
    """Returns the nomination of each workload that is not admitted, by its id.

    `tables`: the regions in which each known table can be read. A workload is nominated for one cluster that has room
    and its tables; if that is overdue, for one more. Admitted and nominated workloads hold room in their clusters. A
    nominated cluster stays, even if another one is better now, unless it is gone.
    """
    names = {cluster.name for cluster in clusters}
    queue = sorted(workloads, key=lambda one: one.turn)
    auction, empty = _auction(clusters), _auction(clusters)
    kept = {one.id: tuple(name for name in one.nominated if name in one.clusters & names) for one in queue}
    for one in sorted(queue, key=lambda one: (one.admitted is None, one.turn)):
        for name in kept[one.id] if one.admitted is None else (one.admitted,):
            auction.place([_candidate(one, frozenset({name}))])
    found: dict[str, Nomination] = {}
    asking: list[Candidate] = []
    for one in queue:
        if one.admitted is not None:
            continue
        found[one.id] = Nomination(kept[one.id])
        if kept[one.id] and not (one.is_overdue and len(kept[one.id]) < MOST_CLUSTERS):
            continue
        allowed, why = _allowed(one, clusters, kept[one.id], tables)
        if why is None:
            asking.append(_candidate(one, allowed))
        else:
            found[one.id] = Nomination(kept[one.id], why)
    by_id = {one.id: one for one in queue}
    for candidate, outcome in zip(asking, auction.place(asking), strict=True):
        id_, plan = outcome.workload, outcome.plan
        if plan is None and by_id[id_].is_patient:
            plan = candidate.best(empty.bidder(name).bid(candidate) for name in sorted(candidate.regions or ()))
        if plan is not None:
            found[id_] = Nomination((*kept[id_], plan.region))
        else:
            found[id_] = Nomination(kept[id_], "; ".join(str(reason) for reason in outcome.reasons))
    return found


def _auction(clusters: Sequence[WorkerCluster]) -> Auction:
    snapshots = [RegionSnapshot(cluster.name, 0.0, cluster.machines, ()) for cluster in clusters]
    made = Auction([RegionColumns.of(snapshot) for snapshot in snapshots], Options(may_evict=False))
    made.open(0.0)
    return made


def _candidate(one: KueueWorkload, clusters: frozenset[str]) -> Candidate:
    return Candidate(PlacementRequest(one.id, LOWEST_RANK, one.jobs), clusters)


def _allowed(
    one: KueueWorkload, clusters: Sequence[WorkerCluster], but: Iterable[str], tables: Mapping[str, frozenset[str]]
) -> tuple[frozenset[str], str | None]:
    """Returns the clusters for which a workload may be nominated, and why there are none."""
    unknown = sorted(table for table in one.tables if table not in tables)
    if unknown:
        return frozenset(), f"unknown tables: {', '.join(unknown)}"
    there = [cluster for cluster in clusters if cluster.name in one.clusters and cluster.name not in but]
    if not there:
        return frozenset(), "its queue has no other active cluster that the settings name"
    near = frozenset(cluster.name for cluster in there if all(cluster.region in tables[name] for name in one.tables))
    return near, None if near else f"no cluster has all its tables: {', '.join(one.tables)}"
