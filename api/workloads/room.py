"""How many workloads a tenant may have in the queue."""

import time
from dataclasses import dataclass

from sqlalchemy import func, select, text
from sqlalchemy.orm import Session

from api.problems import over_limit
from domain.phases import QUEUED_PHASES
from infra.db.models import Workload

_AT_ONCE = 1000
"""Submissions of a tenant that are in flight at the same time, at most, in all API processes."""
_FRESH_S = 5.0
_FAR = 5000
"""More submissions of a tenant than all API processes together take within `_FRESH_S`."""


@dataclass
class _Count:
    queued: int
    at_s: float


class Room:
    """Refuses submissions of tenants that have `most` workloads in the queue, or more.

    Counting thousands of rows costs as much as a submission, so far from the limit a count is used for some seconds.
    """

    def __init__(self, most: int, retry_s: int) -> None:
        """`retry_s`: when a refused submission is to be tried again."""
        self._most = most
        self._retry_s = retry_s
        self._counts: dict[str, _Count] = {}

    def require(self, session: Session, tenant: str) -> None:
        """Refuses another workload of `tenant` where there is no room; exact, in the session's transaction.

        Submissions of a tenant wait for each other only when it is close to its limit.

        Raises:
            Problem: 429.
        """
        known, now_s = self._counts.get(tenant), time.monotonic()
        if known is not None and now_s - known.at_s < _FRESH_S and known.queued < self._most - _FAR:
            return
        queued = self._count(session, tenant)
        self._counts[tenant] = _Count(queued, now_s)
        if queued >= self._most - _AT_ONCE:
            lock = text("select pg_advisory_xact_lock(hashtext('submit'), hashtext(:tenant))")
            session.execute(lock, {"tenant": tenant})
            queued = self._count(session, tenant)
        if queued >= self._most:
            workloads = "1 workload" if queued == 1 else f"{queued} workloads"
            raise over_limit(
                "queued_per_tenant", self._most,
                f"tenant {tenant} has {workloads} in the queue; submit again when some have started",
                self._retry_s,
            )  # fmt: skip

    def _count(self, session: Session, tenant: str) -> int:
        """The tenant's workloads in the queue; `most` if there are more."""
        queued = (Workload.finished_at.is_(None), Workload.phase.in_(sorted(QUEUED_PHASES)))
        found = select(Workload.id).where(Workload.tenant == tenant, *queued).limit(self._most)
        return session.scalar(select(func.count()).select_from(found.subquery())) or 0
