"""Jobs that leave lent machines before their owners ask, where that is expected to gain more than it costs.

Forecasts compare the machines of a job with other lent machines of its region (`reclaim.forecasts`). Mail tells a job
to move. It saves and returns to the queue, as after an owner's notice, and the scheduler prefers the cluster for which
it left (`activities.scheduling.moves`).
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
from reclaim.forecasts import gains_s, horizon_s
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
        """Sends jobs the request to move, if forecasts are used and a search is due; returns these jobs.

        Call it after a control period, which has counted the departures until now.
        """
        now_s = time.monotonic()
        if not self._settings.forecasts or now_s < self._due_s:
            return []
        with transaction(self._engine, isolation="REPEATABLE READ") as session:
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
    """Returns the jobs of a region that should move, in the order of their gains, each with its reason.

    The room at their destinations is taken from `room`. A job whose gain changes because another one has taken its
    destination is compared again.
    """
    chosen: list[tuple[Candidate, Reason]] = []
    left = {one.workload: gain for one in _busiest(site) if (gain := _best(site, room, one)) is not None}
    while left and len(chosen) < DEFAULT_POLICY.most_at_once:
        gain = min(left.values(), key=lambda gain: (-gain.gain_s, gain.one.workload))
        again = _best(site, room, gain.one)
        if again is None:
            del left[gain.one.workload]
        elif again != gain:
            left[gain.one.workload] = again
        else:
            del left[gain.one.workload]
            room.take(gain.cluster, room.find(gain.one.jobs, gain.cluster, gain.one.machines) or {})
            chosen.append((gain.one, gain.reason))
    return chosen


def _busiest(site: Site) -> list[Candidate]:
    """Returns the jobs that may gain, with the most departures first: more than on the calmest lent machine."""
    rates = site.rates
    may_gain = []
    for one in site.candidates:
        ahead_s = horizon_s(one.departure.remaining_s)
        own = sum(rates.of_machines(one.machines).expected(ahead_s))
        if own > sum(rates.least.expected(ahead_s)):
            may_gain.append((-own, one.workload, one))
    return [one for *_, one in sorted(may_gain)[:_MOST_JOBS]]


def _best(site: Site, room: Room, one: Candidate) -> _Gain | None:
    """Returns the move of a job that gains most, or None if none pays.

    In each cluster the job would get the machines with room that depart most rarely, but none of its own.
    """
    here = [b for b in site.buildings if site.kinds[b.name] in one.kinds]
    ahead_s = horizon_s(one.departure.remaining_s)
    own = site.rates.of_machines(one.machines).expected(ahead_s)
    there = []
    for building in here:
        is_lent = site.kinds[building.name] == CapacityKind.VOLUNTARY
        found = room.find(one.jobs, f"{site.region}/{building.name}", one.machines) if is_lent else None
        # What is not a destination counts like the job's own machines: no move there pays.
        there.append(own if found is None else site.rates.of_machines(found).expected(ahead_s))
    if min(map(sum, there), default=inf) >= sum(own):
        return None
    gains = gains_s(here, one.departure, one.saving, own, there)
    at = int(gains.argmax())
    if not gains[at] > 0:
        return None
    place = f"{site.region}/{here[at].name}"
    detail = {
        "cluster": place, "departures": _short(sum(own)), "departures_there": _short(sum(there[at])),
        "hours": _short(ahead_s / HOUR_S), "gain_s": round(float(gains[at])),
    }  # fmt: skip
    return _Gain(float(gains[at]), one, place, Reason(ReasonCode.MOVED_EARLY, detail))


def _short(value: float) -> float:
    """Returns a number for a sentence: whole from 10 on, with two digits below."""
    return round(value) if value >= 10 else float(f"{value:.2g}")
