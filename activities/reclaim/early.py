"""Jobs that leave lent machines before their owners ask, where that is expected to gain more than it costs.

Forecasts compare the machines of a job with the other lent clusters of its region (`reclaim.forecasts`). A job that
moves is told so by mail. It saves and returns to the queue, as after an owner's notice, and the scheduler prefers the
cluster for which it left.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite
from typing import Any, NamedTuple

import numpy as np
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from activities.reclaim.reading import LentMachine, RunningJob, read_jobs, read_machines, read_now_s
from activities.scheduling.moves import remaining_runtime_s, saving_of
from activities.scheduling.room import Room
from domain.capacity import CapacityKind
from domain.demand import demand_of
from domain.phases import QUEUED_PHASES, Phase
from domain.protocol import MailKind
from domain.reasons import Reason, ReasonCode
from domain.scheduling import JobRequest
from infra.config.scheduling import ReclaimSettings
from infra.db import events, outbox
from infra.db.models import Workload
from infra.db.reclaim import SiteHazard
from infra.db.session import transaction
from reclaim.arrays import Floats
from reclaim.buildings import Building, Departure
from reclaim.forecasts import gains_s, horizon_s
from reclaim.hazard import HazardModel
from reclaim.hazard_state import HazardState
from reclaim.joint import DAY_S, DEFAULT_POLICY, HOUR_S

_SCARCE = [
    ReasonCode.INSUFFICIENT_CAPACITY.value, ReasonCode.RESERVED.value, ReasonCode.WAITING_FOR_CAPACITY.value
]  # fmt: skip
# A workload without reasons has not been through a pass yet.
_IS_SCARCE = text(
    "select exists (select 1 from workload as w left join waiting as q on q.workload = w.id"
    " where w.finished_at is null and w.held_by is null and w.phase = any(:phases)"
    " and (q.workload is null or exists (select 1 from jsonb_array_elements(q.reasons -> 'reasons') as r"
    "   where r ->> 'code' = any(:codes))))"
)
_MAY_MOVE = text(
    "select w.id, w.ask, ran.s, a.checkpoint_s, held.gpu_types"
    " from workload as w join attempt as a on (a.workload, a.attempt) = (w.id, w.attempt)"
    " cross join lateral (select count(*) filter (where outcome ->> 'code' = :early"
    "     and released_at > now() - make_interval(secs => :day_s)) as moves,"
    "   coalesce(sum(extract(epoch from coalesce(released_at, now()) - started_at)), 0)::float8 as s"
    "   from attempt where workload = w.id) as ran"
    " cross join lateral (select array_agg(distinct m.gpu_type) as gpu_types"
    "   from allocation as l join machine as m on m.id = l.machine"
    "   where (l.workload, l.attempt) = (w.id, w.attempt) and l.released_at is null) as held"
    " where w.id = any(:ids) and w.phase = :running and a.started_at <= now() - make_interval(secs => :stay_s)"
    " and a.notice is null and ran.moves < :most and not w.spec ? 'serving' and not w.spec ? 'one_attempt'"
)
_CLUSTERS = text(
    "select name, capacity, store_url, link_mbit, departures_per_h from cluster"
    " where region = :region and service is null order by name"
)


class _Candidate(NamedTuple):
    """A job that may move early."""

    workload: str
    ask: str
    ran_s: float
    stall_s: float | None
    gpu_types: list[str | None]


@dataclass(frozen=True)
class EarlyMove:
    """A job that moves before an owner asks."""

    workload: str
    attempt: int
    region: str
    reason: Reason


@dataclass(frozen=True)
class _Gain:
    gain_s: float
    job: RunningJob
    requests: tuple[JobRequest, ...]
    cluster: str
    reason: Reason


class EarlyMover:
    """Looks for early moves, every `reclaim.early_period_s`."""

    def __init__(self, engine: Engine, settings: ReclaimSettings, model: HazardModel) -> None:
        self._engine, self._settings, self._model = engine, settings, model
        self._due_s = -inf

    def round(self) -> list[EarlyMove]:
        """Tells jobs to move, if forecasts are used and a search is due; returns the moves.

        Call it after a control period, which has counted the departures until now.
        """
        now_s = time.monotonic()
        if not self._settings.forecasts or now_s < self._due_s:
            return []
        self._due_s = now_s + self._settings.early_period_s
        with transaction(self._engine) as session:
            found = self._search(session)
        return [move for move in found if self._tell(move)]

    def _search(self, session: Session) -> list[EarlyMove]:
        """Returns the moves that pay.

        There are none while any workload waits for capacity: what is free now is meant for it, and what a move leaves
        would be its as well.
        """
        machines = read_machines(session)
        scarce = {"phases": sorted(QUEUED_PHASES), "codes": _SCARCE}
        if not machines or session.execute(_IS_SCARCE, scarce).scalar_one():
            return []
        now_s = read_now_s(session)
        return [move for region in machines for move in self._of_region(session, region, machines[region], now_s)]

    def _of_region(
        self, session: Session, region: str, machines: Sequence[LentMachine], now_s: float
    ) -> list[EarlyMove]:
        row = session.get(SiteHazard, region)
        home_of = {one.id: one.cluster for one in machines}
        jobs = {job.workload: job for job in read_jobs(session, list(home_of)) if _is_in_one(job, home_of)}
        if row is None or not jobs:
            return []
        state = self._model.from_json(row.counts).with_nodes([one.id for one in machines], list(home_of.values()))
        kinds, buildings = _clusters(session, region)
        values = {
            "ids": list(jobs), "early": ReasonCode.MOVED_EARLY.value, "running": Phase.RUNNING.value, "day_s": DAY_S,
            "stay_s": self._settings.early_stay_s, "most": DEFAULT_POLICY.most_per_day,
        }  # fmt: skip
        hazards = _Hazards(self._model, state, now_s)
        gains = []
        for found in session.execute(_MAY_MOVE, values):
            one = _Candidate(*found)
            if len(one.gpu_types) == 1:  # Elsewhere the job gets machines of the same type.
                gains += self._gains(one, jobs[one.workload], home_of, region, kinds, buildings, hazards)
        return _chosen(gains, Room(session, {gain.cluster for gain in gains}), region)

    def _gains(
        self,
        one: _Candidate,
        job: RunningJob,
        home_of: Mapping[str, str],
        region: str,
        kinds: Mapping[str, str],
        buildings: Sequence[Building],
        hazards: "_Hazards",
    ) -> list[_Gain]:
        """Returns the moves of one job that pay."""
        demand = demand_of(one.ask)
        here = [b for b in buildings if kinds[b.name] in demand.jobs[0].capacity]
        home = home_of[job.machines[0]]
        if all(b.name != home for b in here):
            return []  # Its cluster is not lent any more.
        remaining_s = remaining_runtime_s(demand.max_runtime_s, one.ran_s)
        departure = Departure(region, home, job.save_bytes, job.write_s, remaining_s, 0)
        machines, ahead_s = len(job.machines), horizon_s(remaining_s)
        own = hazards.of_machines(job.machines, ahead_s)
        there = [machines * hazards.of_cluster(b.name, ahead_s) for b in here]
        saving = saving_of(machines, departure, _possible_s(one.stall_s), self._settings)
        (gpu_type,) = one.gpu_types
        requests = tuple(replace(each, gpu_types=(gpu_type,) if gpu_type else ()) for each in demand.jobs)
        out = []
        for gain_s, departures, building in zip(gains_s(here, departure, saving, own, there), there, here, strict=True):
            if isfinite(gain_s) and kinds[building.name] == CapacityKind.VOLUNTARY:
                place = f"{region}/{building.name}"
                detail = {
                    "cluster": place, "departures": _short(own), "departures_there": _short(departures),
                    "hours": _short(ahead_s / HOUR_S), "gain_s": round(float(gain_s)),
                }  # fmt: skip
                out.append(_Gain(float(gain_s), job, requests, place, Reason(ReasonCode.MOVED_EARLY, detail)))
        return out

    def _tell(self, move: EarlyMove) -> bool:
        """Sends mail to a workload, unless it has changed since the search; returns whether it was sent."""
        with transaction(self._engine) as session:
            row = session.get(Workload, move.workload, with_for_update=True)
            if row is None or row.attempt != move.attempt or row.phase != Phase.RUNNING:
                return False
            is_new = events.record(
                session, "workload.moves_early", tenant=row.tenant, workload=move.workload, attempt=move.attempt,
                region=move.region, reason=move.reason, dedup=f"{move.attempt}:early",
            )  # fmt: skip
            if is_new:
                detail = {**move.reason.detail, "code": move.reason.code.value}
                outbox.mail(session, move.workload, MailKind.PREEMPT, move.attempt, **detail)
            return is_new


class _Hazards:
    """The expected departures without notice of a region's machines. Horizons are rounded up to hours."""

    def __init__(self, model: HazardModel, state: HazardState, now_s: float) -> None:
        self._model, self._state, self._now_s = model, state, now_s
        self._number = {node: at for at, node in enumerate(state.nodes)}
        self._found: dict[int, Floats] = {}

    def _expected(self, horizon_s: float) -> Floats:
        hours = int(-(-horizon_s // HOUR_S))
        if hours not in self._found:
            self._found[hours] = self._model.expected(self._state, self._now_s, hours * HOUR_S) / hours
        return self._found[hours] * (horizon_s / HOUR_S)

    def of_machines(self, machines: Sequence[str], horizon_s: float) -> float:
        """Returns the expected departures of these machines, together."""
        return float(self._expected(horizon_s)[[self._number[machine] for machine in machines]].sum())

    def of_cluster(self, cluster: str, horizon_s: float) -> float:
        """Returns the expected departures of one machine of a cluster; 0 if it has none."""
        if cluster not in self._state.building_names:
            return 0.0
        number = self._state.building_names.index(cluster)
        own = self._expected(horizon_s)[self._state.building == number]
        return float(np.mean(own)) if len(own) else 0.0


def _is_in_one(job: RunningJob, home_of: Mapping[str, str]) -> bool:
    """Returns whether all machines of a job are lent, and in one cluster."""
    return len({home_of.get(machine, f"not lent: {machine}") for machine in job.machines}) == 1 and bool(job.lent)


def _clusters(session: Session, region: str) -> tuple[dict[str, str], list[Building]]:
    """Returns the capacity kind of each shared cluster of a region, and the clusters as buildings."""
    rows: Sequence[Any] = session.execute(_CLUSTERS, {"region": region}).all()
    buildings = [Building(region, name, *rest) for name, _, *rest in rows]
    return {name: kind for name, kind, *_ in rows}, buildings


def _chosen(gains: Sequence[_Gain], room: Room, region: str) -> list[EarlyMove]:
    """Returns the moves with the largest gains for which there is room, at most one of each job."""
    found: dict[str, EarlyMove] = {}
    for gain in sorted(gains, key=lambda gain: (-gain.gain_s, gain.job.workload, gain.cluster)):
        if len(found) == DEFAULT_POLICY.most_at_once:
            break
        if gain.job.workload not in found and room.take(gain.requests, gain.cluster):
            found[gain.job.workload] = EarlyMove(gain.job.workload, gain.job.attempt, region, gain.reason)
    return list(found.values())


def _possible_s(stall_s: float | None) -> float | None:
    """Returns what a task reported as the stall of a save, or None if it is impossible."""
    return stall_s if stall_s is not None and 0 <= stall_s < inf else None


def _short(value: float) -> float:
    """Returns a number with two significant digits."""
    return float(f"{value:.2g}")
