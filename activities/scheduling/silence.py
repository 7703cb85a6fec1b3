"""Tracks which regions miss the deadline for bids, and publishes and logs silent and slow regions."""

import logging
from collections.abc import Iterable

from sqlalchemy import Engine, delete, func
from sqlalchemy.orm import Session

from domain.reasons import Reason
from gms.auction.silence import Asking, ProbeBackoff, Silence
from infra.config.scheduling import SchedulerSettings
from infra.db.logs import RegionBid
from infra.db.session import transaction
from infra.db.silent_regions import SilentRegion, publish_silent, silence_reason

_log = logging.getLogger(__name__)
_REMEMBERED_SCANS = 100


class SilenceTracker:
    """Updates `gms.auction.silence` from the regions' bids, and publishes its state for other processes."""

    def __init__(self, engine: Engine, settings: SchedulerSettings) -> None:
        self._engine = engine
        self._deadline_s = settings.bid_deadline_s
        self._silence = Silence(ProbeBackoff(settings.silent_backoff_s, settings.silent_backoff_max_s))
        self._asked_s: dict[int, float] = {}
        """The time of each scan's bid requests, by Postgres's clock."""
        self._published: dict[str, SilentRegion] | None = None

    @property
    def silent(self) -> list[str]:
        """The regions that passes leave out, sorted."""
        return self._silence.silent

    def due_s(self, now_s: float) -> float | None:
        """Returns the seconds until a silent region gets its next request; None: all regions answer in time."""
        return self._silence.due_s(now_s)

    def read(self, session: Session, scan: int, now_s: float) -> None:
        """Reads and deletes the bids of earlier scans, which show the regions that have answered.

        A transaction that is rolled back and repeated reads the same answers again, which changes nothing.
        """
        self._asked_s[scan] = now_s
        for old in sorted(self._asked_s)[:-_REMEMBERED_SCANS]:
            del self._asked_s[old]
        gone = delete(RegionBid).where(RegionBid.scan < scan)
        at_s = func.extract("epoch", RegionBid.at)
        for region, asked_in, answered_s in session.execute(gone.returning(RegionBid.region, RegionBid.scan, at_s)):
            asked_s = self._asked_s.get(asked_in)
            in_time = asked_s is not None and float(answered_s) - asked_s <= self._deadline_s
            self._silence.answer(region, in_time=in_time)

    def asking(self, regions: Iterable[str], now_s: float) -> Asking:
        """Returns the regions that get bid requests in a pass. Call it once for each pass, after `read` has committed:
        the backoff of a region that is probed becomes longer.
        """
        return self._silence.asking(regions, now_s)

    def miss(self, scan: int, regions: Iterable[str], now_s: float) -> None:
        """Records that regions missed the deadline for a batch of a scan."""
        asked_s = self._asked_s.get(scan, now_s)
        for region in regions:
            self._silence.miss(region, asked_s, now_s)

    def reasons(self, regions: Iterable[str], now_s: float) -> dict[str, Reason]:
        """Returns, for each of these regions, why nothing is placed in it."""
        missed = self._silence.missed
        return {r: silence_reason(r, missed[r].since_s if r in missed else now_s) for r in regions}

    def publish(self) -> None:
        """Publishes and logs the silent and slow regions, if they have changed."""
        now = {region: SilentRegion(m.since_s, m.slow) for region, m in self._silence.missed.items()}
        if now == self._published:
            return
        with transaction(self._engine) as session:
            publish_silent(session, now)
        before, self._published = self._published or {}, now
        for region in sorted(before.keys() | now.keys()):
            if before.get(region) != now.get(region):
                _log.warning("%s", _told(region, now.get(region), self._deadline_s))


def _told(region: str, now: SilentRegion | None, deadline_s: float) -> str:
    if now is None:
        return f"region {region} answers in time again"
    if now.slow:
        return f"region {region} answers later than {deadline_s:g} s: its bids are made by the awarding process"
    return f"region {region} has not answered within {deadline_s:g} s: passes leave it out until it does"
