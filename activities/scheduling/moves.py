"""Where work goes that an owner's machine has lost: ReclaimNet's P2, as criteria of plans (`reclaim.buildings`)."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any, NamedTuple

from sqlalchemy import text
from sqlalchemy.orm import Session

from domain.capacity import CapacityKind
from domain.reasons import ReasonCode
from domain.reported import LEAST_WRITE_S
from domain.scheduling import MOST_US, JobRequest, Move
from reclaim.buildings import Building, Departure, score
from reclaim.destinations import DEFAULT_RULES
from rms.reserve import SHORTEST_S

# A task can report anything. An impossible size or time is ignored: it must not end the pass for all workloads.
_LEFT = text(
    "select w.id, a.region, a.plan -> 'jobs', saved.checkpoint_bytes,"
    " case when saved.checkpoint_write_s >= :least_write_s then saved.checkpoint_write_s end, ran.s"
    " from workload as w join attempt as a on (a.workload, a.attempt) = (w.id, w.attempt)"
    " cross join lateral (select checkpoint_bytes, checkpoint_write_s from attempt"
    "   where workload = w.id and checkpoint_bytes > 0 order by attempt desc limit 1) as saved"
    " cross join lateral (select coalesce(sum(extract(epoch from released_at - started_at)), 0)::float8 as s"
    "   from attempt where workload = w.id) as ran"
    " where w.id = any(:ids) and a.released_at is not null and a.outcome ->> 'code' = any(:codes)"
)
_LEAVES = [ReasonCode.PLATFORM_NOTICE.value, ReasonCode.MACHINE_LOST.value]
_CLUSTERS = text(
    "select region, name, capacity, store_url, link_mbit, departures_per_h from cluster where service is null"
    " order by region, name"
)
_ROOM = text(
    "select region || '/' || cluster, gpu_type, gpus - bit_count((held | promised | withheld)::bit(64)) as free_gpus,"
    " free_cpus_milli, free_memory_bytes, count(*) from machine"
    " where (region, cluster) in (select * from unnest(cast(:regions as text[]), cast(:clusters as text[])))"
    " and state = 'ready' and cordon is null and not draining"
    " group by region, cluster, gpu_type, free_gpus, free_cpus_milli, free_memory_bytes"
)


class _Left(NamedTuple):
    """A workload whose last attempt lost a machine, and its newest checkpoint."""

    region: str
    placements: list[dict[str, Any]]
    checkpoint_bytes: int
    write_s: float | None
    ran_s: float


class _Room:
    """What is free on the machines of some clusters."""

    def __init__(self, session: Session, clusters: Collection[str]) -> None:
        """`clusters`: `region/cluster` of each."""
        self._free: dict[str, list[tuple[Any, ...]]] = defaultdict(list)
        self._found: dict[tuple[object, ...], int] = {}
        parts = [cluster.partition("/") for cluster in sorted(clusters)]
        values = {"regions": [region for region, _, _ in parts], "clusters": [name for _, _, name in parts]}
        for place, *free in session.execute(_ROOM, values) if parts else ():
            self._free[place].append(tuple(free))

    def candidates(self, job: JobRequest, cluster: str) -> int:
        """Returns how many machines of the cluster have room for a task of the job, at most k_min.

        More make no difference, and the same number again finds the cached scores. Most jobs of a batch have few
        shapes, and the machines of a cluster are alike, so that few comparisons are needed.
        """
        shape = job.gpu_types, job.gpus_per_task, job.cpus_milli_per_task, job.memory_bytes_per_task
        found = self._found.get((cluster, *shape))
        if found is None:
            found = 0
            for *free, machines in self._free[cluster]:
                if _fits(job, *free):
                    found += machines
                if found >= DEFAULT_RULES.min_local:
                    break
            found = self._found[cluster, *shape] = min(found, DEFAULT_RULES.min_local)
        return found


def moves_of(
    session: Session, demands: Mapping[str, Sequence[JobRequest]], max_runtimes_s: Mapping[str, float]
) -> dict[str, tuple[JobRequest, ...]]:
    """Returns the jobs of workloads that owners' machines have lost, with the score of each cluster.

    Workloads without a checkpoint, and jobs that were not on lent machines or spanned clusters, have no scores.
    """
    rows = session.execute(_LEFT, {"ids": list(demands), "codes": _LEAVES, "least_write_s": LEAST_WRITE_S})
    left = {workload: _Left(*row) for workload, *row in rows}
    if not left:
        return {}
    clusters = session.execute(_CLUSTERS).all()
    kinds = {f"{region}/{name}": capacity for region, name, capacity, *_ in clusters}
    lent = {place for place, kind in kinds.items() if kind == CapacityKind.VOLUNTARY}
    homes = {f"{one.region}/{p['cluster']}" for one in left.values() for p in one.placements} & lent
    room = _Room(session, homes)
    buildings = [Building(*row[:2], *row[3:]) for row in clusters]
    found = {}
    for workload, one in left.items():
        home_of = {p["job"]: f"{one.region}/{p['cluster']}" for p in one.placements}
        left_s = max_runtimes_s[workload] - one.ran_s
        remaining_s = max(SHORTEST_S, one.ran_s) if left_s == inf else max(0.0, left_s)
        jobs = []
        for job in demands[workload]:
            home = home_of.get(job.name)
            if home in homes:
                here = tuple(b for b in buildings if kinds[f"{b.site}/{b.name}"] in job.capacity)
                job = _scored(job, home, here, one, remaining_s, room.candidates(job, home))
            jobs.append(job)
        found[workload] = tuple(jobs)
    return found


def _scored(
    job: JobRequest, home: str, buildings: tuple[Building, ...], left: _Left, remaining_s: float, fit: int
) -> JobRequest:
    site, _, name = home.partition("/")
    if all((b.site, b.name) != (site, name) for b in buildings):
        return job  # The document does not accept the kind of its former cluster any more.
    departure = Departure(site, name, left.checkpoint_bytes, left.write_s, remaining_s, fit)
    scores = score(buildings, departure)
    return replace(
        job,
        moves=tuple(
            Move(f"{b.site}/{b.name}", s.away, round(min(s.score_s * 1e6, MOST_US)))
            for b, s in zip(buildings, scores, strict=True)
        ),
    )


def _fits(job: JobRequest, gpu_type: str | None, gpus: int, cpus_milli: int, memory_bytes: int) -> bool:
    """Returns whether a task of the job fits into what is free on a machine."""
    return (
        (not job.gpus_per_task or gpu_type in job.gpu_types)
        and gpus >= job.gpus_per_task
        and cpus_milli >= job.cpus_milli_per_task
        and memory_bytes >= job.memory_bytes_per_task
    )
