"""Where work goes that leaves an owner's machine: ReclaimNet's P2, as criteria of plans (`reclaim.buildings`).

A building is scored with the machines that the work would get there: those with room that their owners take back most
rarely. Plans avoid the other machines.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any, NamedTuple

from sqlalchemy import text
from sqlalchemy.orm import Session

from activities.scheduling.room import Room
from domain.capacity import CapacityKind
from domain.reasons import ReasonCode
from domain.scheduling import MOST_US, JobRequest, MoveCost
from domain.task_reports import LEAST_WRITE_S
from reclaim.buildings import AHEAD_S, Building, DepartedJob, Rate, score

_SHORTEST_S = 1200.0
"""The median duration of ML workloads (MAST 5.1): the expected duration of a workload that has just started."""
# A task can report anything. An impossible size or time is ignored: it must not end the pass for all workloads.
_LEFT = text(
    "select w.id, a.region, a.plan -> 'jobs', saved.checkpoint_bytes,"
    " case when saved.checkpoint_write_s >= :least_write_s and saved.checkpoint_write_s < 'Infinity'"
    "   then saved.checkpoint_write_s end,"
    " ran.s"
    " from workload as w join attempt as a on (a.workload, a.attempt) = (w.id, w.attempt)"
    " cross join lateral (select checkpoint_bytes, checkpoint_write_s from attempt"
    "   where workload = w.id and checkpoint_bytes > 0 order by attempt desc limit 1) as saved"
    " cross join lateral (select coalesce(sum(extract(epoch from released_at - started_at)), 0)::float8 as s"
    "   from attempt where workload = w.id) as ran"
    " where w.id = any(:ids) and a.released_at is not null and a.outcome ->> 'code' = any(:codes)"
)
_LEAVES = [ReasonCode.PLATFORM_NOTICE.value, ReasonCode.MACHINE_LOST.value]
_MOST_GUIDED = 64
"""For so many workloads at the head of the queue, machines are compared one by one; for the others, clusters."""
_RATES = text(
    "select each.key, each.value from site_hazard as s cross join lateral jsonb_each(s.machines) as each"
    " where s.region = any(:regions)"
)
_CLUSTERS = text(
    "select region, name, capacity, store_url, link_mbit, departures_per_h from cluster"
    " where service is null and tenant is null"
    " order by region, name"
)


class _Left(NamedTuple):
    """A workload whose last attempt left a machine, and its newest checkpoint."""

    region: str
    placements: list[dict[str, Any]]
    checkpoint_bytes: int
    write_s: float | None
    ran_s: float


class LeftWorkload(NamedTuple):
    """A workload that has left owners' machines."""

    jobs: tuple[JobRequest, ...]
    """With the score of each cluster."""
    shuns: frozenset[str]
    """Machines in lent clusters that it does not need, and whose owners come more often than those of others."""


def moves_of(
    session: Session,
    demands: Mapping[str, Sequence[JobRequest]],
    max_runtimes_s: Mapping[str, float],
    avoided: Mapping[str, frozenset[str]],
) -> dict[str, LeftWorkload]:
    """Returns the workloads that have left owners' machines, with the score of each cluster for their jobs.

    `avoided` are the machines that each workload may not use.

    Workloads without a checkpoint, and jobs that were not on lent machines or spanned clusters, have no scores.
    """
    rows = session.execute(_LEFT, {"ids": list(demands), "codes": _LEAVES, "least_write_s": LEAST_WRITE_S})
    left = {workload: _Left(*row) for workload, *row in rows}
    if not left:
        return {}
    scores = _Scores(session, left)
    found = {}
    for number, (workload, jobs) in enumerate(each for each in demands.items() if each[0] in left):
        one = left[workload]
        remaining_s = _remaining_runtime_s(max_runtimes_s[workload], one.ran_s)
        but = avoided.get(workload, frozenset())
        found[workload] = scores.leaving(one, jobs, remaining_s, but, by_machine=number < _MOST_GUIDED)
    return found


def _remaining_runtime_s(max_runtime_s: float, ran_s: float) -> float:
    """Returns the expected remaining runtime of a workload; infinity is no maximum.

    Without a maximum it is the elapsed runtime, but at least `_SHORTEST_S`. That is the median remaining runtime for a
    heavy-tailed distribution of durations (Pareto with exponent 1).
    """
    return max(_SHORTEST_S, ran_s) if max_runtime_s == inf else max(0.0, max_runtime_s - ran_s)


class _Scores:
    """The clusters, the room in the lent ones, and how often the owners of their machines come."""

    def __init__(self, session: Session, left: Mapping[str, _Left]) -> None:
        clusters = session.execute(_CLUSTERS).all()
        self._kinds = {f"{region}/{name}": capacity for region, name, capacity, *_ in clusters}
        self._buildings = {
            f"{region}/{name}": Building(region, name, store_url, link_mbit, Rate(per_h, per_h))
            for region, name, _, store_url, link_mbit, per_h in clusters
        }
        self._lent = [place for place, kind in self._kinds.items() if kind == CapacityKind.VOLUNTARY]
        homes = {f"{one.region}/{p['cluster']}" for one in left.values() for p in one.placements}
        is_needed = not homes.isdisjoint(self._lent)
        regions = sorted({place.partition("/")[0] for place in self._lent}) if is_needed else []
        self._rates = {machine: Rate(*each) for machine, each in session.execute(_RATES, {"regions": regions})}
        of_cluster: dict[str, list[Rate]] = defaultdict(list)
        for machine, rate in self._rates.items():
            of_cluster[machine.rpartition("/")[0]].append(rate)
        self._usual = {
            place: Rate(*(sum(column) / len(rates) for column in zip(*rates, strict=True)))
            for place, rates in of_cluster.items()
        }
        order, usual = (
            {name: sum(rate.expected(AHEAD_S)) for name, rate in rates.items()} for rates in (self._rates, self._usual)
        )
        self._room = Room(session, self._lent if is_needed else (), order, usual)

    def leaving(
        self,
        left: _Left,
        jobs: Sequence[JobRequest],
        remaining_s: float,
        avoided: frozenset[str],
        *,
        by_machine: bool,
    ) -> LeftWorkload:
        """Returns a workload with the scores of its jobs. Later workloads do not get the machines that it prefers."""
        cluster_of = {p["job"]: f"{left.region}/{p['cluster']}" for p in left.placements}
        machines_of = {p["job"]: len(p["machines"]) for p in left.placements}
        scored, kept, accepted = [], set[str](), set[str]()
        for job in jobs:
            home = cluster_of.get(job.name, "")
            here = [place for place, kind in self._kinds.items() if kind in job.capacity]
            if home not in self._lent or home not in here:
                scored.append(job)  # Or the document does not accept the kind of its former cluster any more.
                continue
            found = {place: self._room.find([job], place, avoided) if by_machine else None for place in here}
            buildings = tuple(self._seen(place, found[place], machines_of[job.name]) for place in here)
            moves = self._moves(job, home, buildings, left, remaining_s)
            scored.append(replace(job, moves=moves))
            room = [one for one in moves if found[one.place] is not None]
            if room:
                best = min(room, key=lambda one: (one.away, one.score_us, one.place))
                self._room.take(best.place, found[best.place] or {})
            kept.update(machine for machines in found.values() for machine in machines or ())
            accepted.update(here)
        lent = accepted.intersection(self._lent) if by_machine else ()
        shuns = frozenset(machine for place in lent for machine in self._room.machines(place)) - kept
        return LeftWorkload(tuple(scored), shuns)

    def _seen(self, place: str, found: Collection[str] | None, machines: int) -> Building:
        """Returns a cluster with the rate of the machines that were found, or else of as many of its machines."""
        usual = self._usual.get(place, self._buildings[place].rate)
        if found is None:
            rates = [usual] * machines
        else:
            rates = [self._rates.get(machine, usual) for machine in found]
        return replace(self._buildings[place], rate=Rate(*map(sum, zip(*rates, strict=True))))

    def _moves(
        self,
        job: JobRequest,
        home: str,
        buildings: tuple[Building, ...],
        left: _Left,
        remaining_s: float,
    ) -> tuple[MoveCost, ...]:
        site, _, name = home.partition("/")
        local = self._room.candidates(job, home)
        departure = DepartedJob(site, name, left.checkpoint_bytes, left.write_s, remaining_s, local)
        return tuple(
            MoveCost(f"{building.site}/{building.name}", one.away, round(min(one.score_s * 1e6, MOST_US)))
            for building, one in zip(buildings, score(buildings, departure), strict=True)
        )
