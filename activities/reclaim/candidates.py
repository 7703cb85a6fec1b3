"""Reads which jobs may move early, and what their moves depend on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import text
from sqlalchemy.orm import Session

from activities.reclaim.rates import Rates
from activities.reclaim.reading import LentMachine, RunningJob, read_jobs, read_machines, read_now_s
from activities.scheduling.moves import remaining_runtime_s, saving_of
from activities.scheduling.room import Room
from domain.capacity import CapacityKind
from domain.demand import demand_of
from domain.phases import PLACED_PHASES, QUEUED_PHASES, Phase
from domain.priority import OVER_QUOTA_RANK
from domain.reasons import ReasonCode
from domain.reported import LEAST_WRITE_S, stall_of
from domain.scheduling import JobRequest
from infra.config.scheduling import ReclaimSettings
from infra.db.buckets import failing_buckets
from infra.db.reclaim import SiteHazard
from infra.db.silent import silent_regions
from reclaim.buildings import Building, Departure
from reclaim.destinations import COMMIT_S
from reclaim.forecasts import Saving
from reclaim.hazard import HazardModel
from reclaim.joint import DAY_S, DEFAULT_POLICY

TOLD = ":early"
"""After the number of an attempt, the key of the event that it was told to move."""
_SCARCE = [
    ReasonCode.INSUFFICIENT_CAPACITY.value, ReasonCode.REFUSED_LIKE.value, ReasonCode.RESERVED.value,
    ReasonCode.RESERVED_OPEN.value,
    ReasonCode.WAITING_FOR_CAPACITY.value,
]  # fmt: skip
# A workload without reasons has not been through a pass yet.
_IS_SCARCE = text(
    "select exists (select 1 from workload as w left join waiting as q on q.workload = w.id"
    " where w.finished_at is null and w.held_by is null and w.phase = any(:phases)"
    " and (q.workload is null or exists (select 1 from jsonb_array_elements(q.reasons -> 'reasons') as r"
    "   where r ->> 'code' = any(:codes))))"
)
# Until its next attempt is awarded, what a job has told to do is still to come.
_MOVING = text(
    "select distinct a.region from workload as w join attempt as a on (a.workload, a.attempt) = (w.id, w.attempt)"
    " where w.finished_at is null and (w.phase = any(:queued) and w.reason ->> 'code' = :early"
    "   or w.phase = any(:placed) and exists (select 1 from event as e where e.workload = w.id"
    "     and e.dedup = w.attempt || :told))"
)
_MAY_MOVE = text(
    "select w.id, w.ask, ran.s, a.checkpoint_bytes, a.checkpoint_write_s, a.cadence, a.checkpoint_s, a.saves,"
    " held.gpu_types, held.clusters, coalesce((w.spec -> 'checkpoint' ->> 'grace_s')::float8, 0)"
    " from workload as w join attempt as a on (a.workload, a.attempt) = (w.id, w.attempt)"
    " cross join lateral (select count(*) filter (where outcome ->> 'code' = :early"
    "     and released_at > now() - make_interval(secs => :day_s)) as moves,"
    "   coalesce(sum(extract(epoch from coalesce(released_at, now()) - started_at)), 0)::float8 as s"
    "   from attempt where workload = w.id) as ran"
    " cross join lateral (select array_agg(distinct m.gpu_type) as gpu_types, array_agg(distinct m.cluster) as clusters"
    "   from allocation as l join machine as m on m.id = l.machine"
    "   where (l.workload, l.attempt) = (w.id, w.attempt) and l.released_at is null) as held"
    " where w.id = any(:ids) and w.phase = :running and a.started_at <= now() - make_interval(secs => :stay_s)"
    " and a.notice is null and ran.moves < :most and w.spec ->> 'serving' is null"
    " and not coalesce((w.spec ->> 'one_attempt')::boolean, false)"
    # While a tenant has work over its quota, that would count as within the quota once this workload has left.
    " and not exists (select 1 from attempt as o join workload as t on t.id = o.workload"
    "   where o.released_at is null and t.tenant = w.tenant and o.rank >= :over_quota)"
    " order by w.id"
)
_CLUSTERS = text(
    "select name, capacity, store_url, link_mbit from cluster where region = :region and service is null order by name"
)


@dataclass(frozen=True)
class Candidate:
    """A job that may move early."""

    workload: str
    attempt: int
    machines: tuple[str, ...]
    """All of them are lent, and in one cluster."""
    kinds: frozenset[str]
    """The capacity kinds that it accepts."""
    jobs: tuple[JobRequest, ...]
    """What it needs elsewhere: GPUs of the type that it has."""
    departure: Departure
    saving: Saving


@dataclass(frozen=True)
class Site:
    """A region with lent machines, and the jobs there that may move early."""

    region: str
    kinds: Mapping[str, str]
    """The capacity kind of each cluster that is shared."""
    buildings: Sequence[Building]
    """These clusters."""
    rates: Rates
    candidates: Sequence[Candidate]


def read_sites(session: Session, model: HazardModel, settings: ReclaimSettings) -> tuple[list[Site], Room]:
    """Returns the regions in which jobs may move early, and the room in their lent clusters.

    There are none while a workload waits for capacity: what is free is meant for it. A region is left out while nothing
    can be placed there, and while a job that was told to move has not been placed again.
    """
    machines = read_machines(session)
    scarce = {"phases": sorted(QUEUED_PHASES), "codes": _SCARCE}
    if not machines or session.execute(_IS_SCARCE, scarce).scalar_one():
        return [], Room(session, ())
    moving = {
        "queued": sorted(QUEUED_PHASES), "placed": sorted(PLACED_PHASES), "early": ReasonCode.MOVED_EARLY.value,
        "told": TOLD,
    }  # fmt: skip
    silent = [region for region, one in silent_regions(session).items() if not one.slow]
    shut = {*failing_buckets(session, machines), *silent, *session.scalars(_MOVING, moving)}
    now_s = read_now_s(session)
    sites = []
    for region in machines.keys() - shut:
        site = _site(session, region, machines[region], model, settings, now_s)
        if site is not None and site.candidates:
            sites.append(site)
    lent = [
        f"{site.region}/{name}" for site in sites for name, kind in site.kinds.items() if kind == CapacityKind.VOLUNTARY
    ]
    order = {machine: departures for site in sites for machine, departures in site.rates.by_calm().items()}
    return sorted(sites, key=lambda site: site.region), Room(session, lent, order)


def _site(
    session: Session,
    region: str,
    machines: Sequence[LentMachine],
    model: HazardModel,
    settings: ReclaimSettings,
    now_s: float,
) -> Site | None:
    row = session.get(SiteHazard, region)
    running = {job.workload: job for job in read_jobs(session, [one.id for one in machines])}
    if row is None or row.noticed is None or not running:
        return None
    states = [
        model.from_json(counts).with_nodes([one.id for one in machines], [one.cluster for one in machines])
        for counts in (row.counts, row.noticed)
    ]
    clusters: Sequence[Any] = session.execute(_CLUSTERS, {"region": region}).all()
    kinds = {name: kind for name, kind, *_ in clusters}
    values = {
        "ids": list(running), "early": ReasonCode.MOVED_EARLY.value, "running": Phase.RUNNING.value, "day_s": DAY_S,
        "stay_s": settings.early_stay_s, "most": DEFAULT_POLICY.most_per_day, "over_quota": OVER_QUOTA_RANK,
    }  # fmt: skip
    found = [_candidate(running[one.id], one, region, kinds, settings) for one in session.execute(_MAY_MOVE, values)]
    return Site(
        region,
        kinds,
        [Building(region, name, *rest) for name, _, *rest in clusters],
        Rates.of(model, states[0], states[1], now_s),
        [one for one in found if one is not None],
    )


def _candidate(
    job: RunningJob, row: Any, region: str, kinds: Mapping[str, str], settings: ReclaimSettings
) -> Candidate | None:
    """Returns a job, or None if it may not move: see `docs/reclaim.md`."""
    _, ask, ran_s, size_bytes, write_s, cadence, checkpoint_s, saves, gpu_types, clusters, grace_s = row
    demand = demand_of(ask)
    accepted = frozenset(kind for each in demand.jobs for kind in each.capacity)
    if len(gpu_types) > 1 or len(clusters) > 1 or job.lent != job.machines:
        return None
    if kinds.get(clusters[0]) not in accepted:
        return None  # The kind of its cluster was changed.
    longest_s = max([write_s, *(s for _, s in saves or ())])
    if not LEAST_WRITE_S <= longest_s <= grace_s - COMMIT_S:
        return None  # Its last save would be cut off.
    stall_s = stall_of(cadence, checkpoint_s)
    saving = saving_of(saves, size_bytes, write_s, job.most_bytes, stall_s, settings)
    (gpu_type,) = gpu_types
    return Candidate(
        job.workload,
        job.attempt,
        job.machines,
        accepted,
        tuple(replace(each, gpu_types=(gpu_type,) if gpu_type else ()) for each in demand.jobs),
        Departure(
            region,
            clusters[0],
            min(size_bytes, job.most_bytes),
            write_s,
            remaining_runtime_s(demand.max_runtime_s, ran_s),
            local_candidates=0,
        ),
        saving,
    )
