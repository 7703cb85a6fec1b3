"""Verifies a region's copies of tables in the background: first copies never read, then those with the oldest check."""

import logging
import time

from sqlalchemy import Engine, select
from temporalio import activity
from temporalio.exceptions import CancelledError

from activities.data.verification import OutOfTime, Reading, Verifier
from activities.heartbeat import heartbeating
from activities.rounds import RoundLog
from domain.protocol.activities import Activity
from domain.protocol.data import Scrub
from infra.config.settings import Settings
from infra.copies.bandwidth import Bandwidth, BandwidthShare
from infra.db import integrity, outbox
from infra.db.rounds import verification_of
from infra.db.session import transaction
from infra.db.tables import Partition, Replica

_log = logging.getLogger(__name__)
_ROUND_S = 600.0
"""The approximate duration of a round. The next round reads the due checks again."""
_AT_ONCE = 100
_REST_S = 60
_WRONG_AGAIN_S = 3600.0
"""The time after which a copy that was found wrong is read again, because it may have been repaired."""


class ScrubActivities:
    """The activity of the workflows that verify the copies in a region."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine = engine
        self._settings = settings
        self._verifier = Verifier(engine)
        self._rounds: dict[str, RoundLog] = {}
        budget = settings.copies.scrub_bytes_per_s
        self._share = None if budget is None else _only_share(Bandwidth(budget))

    @activity.defn(name=Activity.SCRUB.value, no_thread_cancel_exception=True)
    def scrub(self, request: Scrub) -> int:
        """Verifies the due copies in a region, and makes the manifests of tables whose home is the region.

        Returns the seconds to sleep. Checks that an operator requested are read at full speed, the others within
        `copies.scrub_bytes_per_s`.
        """
        until_s = time.monotonic() + _ROUND_S
        with transaction(self._engine) as session:
            without = integrity.tables_without_checksums(session, request.region)
        rounds = self._rounds.setdefault(request.region, RoundLog(self._engine, verification_of(request.region), None))
        try:
            with rounds.one() as failures:
                return self._round(request.region, until_s, failures)
        finally:
            if without:
                self._notify_others(request.region, without)

    def _round(self, region: str, until_s: float, failures: list[str]) -> int:
        with heartbeating():
            failed: set[tuple[str, str]] = set()
            while todo := [d for d in self._due(region) if d[:2] not in failed]:
                for table, partition, asked in todo:
                    reading = Reading(None if asked else self._share, until_s, _stop_if_cancelled)
                    try:
                        self._check(table, partition, region, reading)
                    except OutOfTime:
                        return 0
                    except CancelledError:
                        raise
                    except Exception as error:  # Any error of the bucket's store. The other copies are still checked.
                        _log.warning(
                            "table %s, partition %s in %s cannot be read now: %s", table, partition, region, error
                        )
                        failed.add((table, partition))
                        failures.append(f"table {table}, partition {partition}: {error}")
        return _REST_S

    def _notify_others(self, region: str, tables: list[str]) -> None:
        """Signals the other regions to check these tables, whose manifests may have been completed."""
        with transaction(self._engine) as session:
            others = Replica.data_table.in_(tables), Replica.region != region
            for other in session.scalars(select(Replica.region).where(*others).distinct().order_by(Replica.region)):
                outbox.scrub(session, other)

    def _due(self, region: str) -> list[tuple[str, str, bool]]:
        every_s = self._settings.copies.scrub_every_s
        with transaction(self._engine) as session:
            due = integrity.due_checks(session, region, every_s=every_s, again_s=_WRONG_AGAIN_S, limit=_AT_ONCE)
            return list(due)

    def _check(self, table: str, partition: str, region: str, reading: Reading) -> None:
        with transaction(self._engine) as session:
            row = session.get(Partition, (table, partition))
        if row is None:
            return
        if (wrong := self._verifier.check(row, region, reading)) is not None:
            _log.warning("table %s, partition %s in %s is wrong: %s", table, partition, region, wrong)


def _only_share(bandwidth: Bandwidth) -> BandwidthShare:
    return bandwidth.share("scrub", 1.0)


def _stop_if_cancelled() -> None:
    if activity.is_cancelled():
        raise CancelledError("the verification was cancelled")
