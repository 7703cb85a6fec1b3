"""Jobs that leave lent machines before their owners ask, where that is expected to gain more than it costs.

Forecasts compare the machines of a job with the other lent clusters of its region (`reclaim.forecasts`). A job that
moves is told so by mail. It saves and returns to the queue, as after an owner's notice, and the scheduler prefers the
cluster for which it left (`activities.scheduling.moves`).
"""

import logging
import time
from dataclasses import dataclass
from math import inf

from sqlalchemy import Engine

from activities.reclaim.candidates import TOLD, Candidate, Site, read_sites
from activities.scheduling.room import Room
from domain.capacity import CapacityKind
from domain.phases import Phase
from domain.protocol import MailKind
from domain.reasons import Reason, ReasonCode
from infra.config.scheduling import ReclaimSettings
from infra.db import events, outbox
from infra.db.models import Workload
from infra.db.session import transaction
from reclaim.forecasts import expected, gains_s, horizon_s
from reclaim.hazard import HazardModel
from reclaim.joint import DEFAULT_POLICY, HOUR_S

_log = logging.getLogger(__name__)
_MOST_JOBS = 500
"""The most jobs of a region that one search compares: those whose owners come most often. A search takes milliseconds
for each of them."""


class EarlyMover:
    """Looks for early moves, every `reclaim.early_period_s`."""

    def __init__(self, engine: Engine, settings: ReclaimSettings, model: HazardModel) -> None:
        self._engine, self._settings, self._model = engine, settings, model
        self._due_s = -inf

    def round(self) -> list[Candidate]:
        """Tells jobs to move, if forecasts are used and a search is due; returns these jobs.

        Call it after a control period, which has counted the departures until now.
        """
        now_s = time.monotonic()
        if not self._settings.forecasts or now_s < self._due_s:
            return []
        with transaction(self._engine) as session:
            sites, room = read_sites(session, self._model, self._settings)
        # The comparison takes long, so no transaction is open.
        found = [(one, reason) for site in sites for one, reason in early_moves(site, room)]
        told = [one for one, reason in found if self._tell(one, reason)]
        self._due_s = now_s + self._settings.early_period_s
        return told

    def _tell(self, one: Candidate, reason: Reason) -> bool:
        """Sends mail to a workload, unless it has changed since the search; returns whether it was sent."""
        with transaction(self._engine) as session:
            row = session.get(Workload, one.workload, with_for_update=True)
            if row is None or row.attempt != one.attempt or row.phase != Phase.RUNNING:
                return False
            is_new = events.record(
                session, "workload.moves_early", tenant=row.tenant, workload=one.workload, attempt=one.attempt,
                region=row.region, reason=reason, dedup=f"{one.attempt}{TOLD}",
            )  # fmt: skip
            if is_new:
                detail = {**reason.detail, "code": reason.code.value}
                outbox.mail(session, one.workload, MailKind.PREEMPT, one.attempt, **detail)
                _log.info("workload %s %s", one.workload, reason.sentence)
            return is_new


@dataclass(frozen=True)
class _Gain:
    """A move that pays."""

    gain_s: float
    one: Candidate
    cluster: str
    """The destination, `region/cluster`."""
    reason: Reason


def early_moves(site: Site, room: Room) -> list[tuple[Candidate, Reason]]:
    """Returns the jobs of a region that should move, those that gain most first, each with its reason.

    The room at their destinations is taken from `room`, so that no two jobs move into the same.
    """
    found = [gain for one in _busiest(site) for gain in _gains(site, one)]
    chosen: dict[str, tuple[Candidate, Reason]] = {}
    for gain in sorted(found, key=lambda gain: (-gain.gain_s, gain.one.workload, gain.cluster)):
        if len(chosen) == DEFAULT_POLICY.most_at_once:
            break
        if gain.one.workload not in chosen and room.take(gain.one.jobs, gain.cluster):
            chosen[gain.one.workload] = gain.one, gain.reason
    return list(chosen.values())


def _busiest(site: Site) -> list[Candidate]:
    """Returns the jobs that may gain, with the most departures first: more than in the calmest lent cluster."""
    rates = site.rates
    lent = [rates.of_cluster(name) for name, kind in site.kinds.items() if kind == CapacityKind.VOLUNTARY]
    may_gain = []
    for one in site.candidates:
        ahead_s = horizon_s(one.departure.remaining_s)
        own = expected(*rates.of_machines(one.machines), ahead_s)
        if own > len(one.machines) * min((expected(*each, ahead_s) for each in lent), default=inf):
            may_gain.append((-own, one.workload, one))
    return [one for *_, one in sorted(may_gain)[:_MOST_JOBS]]


def _gains(site: Site, one: Candidate) -> list[_Gain]:
    """Returns the moves of a job that pay."""
    here = [b for b in site.buildings if site.kinds[b.name] in one.kinds]
    ahead_s = horizon_s(one.departure.remaining_s)
    own = expected(*site.rates.of_machines(one.machines), ahead_s)
    there = [len(one.machines) * expected(*site.rates.of_cluster(b.name), ahead_s) for b in here]
    found = gains_s(here, one.departure, one.saving, own, there)
    out = []
    for gain_s, departures, building in zip(found.tolist(), there, here, strict=True):
        if gain_s > 0 and site.kinds[building.name] == CapacityKind.VOLUNTARY:
            place = f"{site.region}/{building.name}"
            detail = {
                "cluster": place, "departures": _short(own), "departures_there": _short(departures),
                "hours": _short(ahead_s / HOUR_S), "gain_s": round(gain_s),
            }  # fmt: skip
            out.append(_Gain(gain_s, one, place, Reason(ReasonCode.MOVED_EARLY, detail)))
    return out


def _short(value: float) -> float:
    """Returns a number for a sentence: whole from 10 on, with two digits below."""
    return round(value) if value >= 10 else float(f"{value:.2g}")
