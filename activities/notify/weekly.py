"""Reports for receivers in the settings, once a week: a notification for each receiver and week.

The id of the notification is derived from both, so restarts and other workers cause no second report. Nothing of it is
in Temporal, whose state may be lost. A round looks only at the last week that is over.
"""

import hashlib
import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from sqlalchemy import Engine
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from activities.leader import Leader, lead
from infra.config.notify import ReportReceiver
from infra.db.deliveries import Delivery, lane_of
from infra.db.session import in_thread, transaction
from infra.db.weekly_report import last_week, weekly_report

_INTERVAL_S = 600.0


class WeeklyReports:
    """The loop that writes the reports."""

    def __init__(self, engine: Engine, receivers: Sequence[ReportReceiver]) -> None:
        self._engine, self._receivers = engine, receivers

    async def run(self) -> None:
        """Runs rounds until cancelled, while this process is the leader."""
        await lead(self._engine, Leader.REPORTING, "weekly reports", lambda: in_thread(self.round), _INTERVAL_S)

    def round(self, now: datetime | None = None) -> None:
        """Writes the reports of the last week that do not exist yet. `now`: None stands for the current time."""
        monday = last_week(now or datetime.now(UTC))
        for receiver in self._receivers:
            with transaction(self._engine, isolation="REPEATABLE READ") as session:
                _put(session, receiver, monday.isoformat())


def _put(session: Session, receiver: ReportReceiver, monday: str) -> None:
    to, tenant = receiver.to_json(), receiver.tenant
    whose = json.dumps([to.get("webhook"), to.get("email"), tenant])
    id_ = f"msg_report_{monday}_{hashlib.sha256(whose.encode()).hexdigest()[:16]}"
    if session.get(Delivery, id_) is not None:
        return
    first = datetime.fromisoformat(monday).date()
    weeks = weekly_report(session, first, tenant)
    last = first + timedelta(days=6)
    facts = {"from": monday, "to": last.isoformat(), "tenants": [week.to_json() for week in weeks]}
    new = insert(Delivery).values(id=id_, kind="report", receiver=to, lane=lane_of("reports", to), facts=facts)
    session.execute(new.on_conflict_do_nothing())
