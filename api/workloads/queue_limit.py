"""Limits the number of queued workloads per tenant."""

import time
from dataclasses import dataclass

from sqlalchemy import func, select, text
from sqlalchemy.orm import Session

from api.problems import over_limit
from domain.phases import QUEUED_PHASES
from infra.db.models import Workload

_AT_ONCE = 1000
"""Upper bound of concurrent submissions of one tenant in all API processes."""
_FRESH_S = 5.0
_FAR = 5000
"""Upper bound of submissions of one tenant that all API processes together accept within `_FRESH_S`."""
_ELEMENTS = text(
    "select coalesce(sum(multirange_size(a.waiting)), 0) from workload_array as a join workload as w on w.id = a.id"
    " where w.tenant = :tenant and w.finished_at is null"
)


@dataclass
class _Count:
    queued: int
    at_s: float


class QueueLimit:
    """Refuses submissions of tenants that have `most` or more workloads in the queue.

    Counting thousands of rows costs as much as a submission, so a count far below the limit is cached for `_FRESH_S`.
    """

    def __init__(self, most: int, retry_s: int) -> None:
        """`retry_s`: value of `Retry-After` in the response to a refused submission."""
        self._most = most
        self._retry_s = retry_s
        self._counts: dict[str, _Count] = {}

    def require(self, session: Session, tenant: str) -> None:
        """Checks that the queue has room for another workload of `tenant`; must run in the submission's transaction.

        The limit is exact. Only close to the limit are the submissions of a tenant serialised by a lock.

        Raises:
            Problem: 429, the tenant has reached its limit.
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

    def require_elements(self, session: Session, tenant: str, more: int, most: int) -> None:
        """Checks that `more` elements of an array may wait, in addition to the tenant's waiting ones.

        The limit is exact: submissions of arrays of one tenant are serialised by a lock until they commit.

        Raises:
            Problem: 429, the tenant would have more than `most`.
        """
        session.execute(text("select pg_advisory_xact_lock(hashtext('array'), hashtext(:t))"), {"t": tenant})
        waiting = int(session.execute(_ELEMENTS, {"tenant": tenant}).scalar_one())
        if waiting + more > most:
            raise over_limit(
                "elements_per_tenant", most,
                f"tenant {tenant} has {waiting} waiting elements of arrays, and this array has {more};"
                " submit again when some have started", self._retry_s,
            )  # fmt: skip

    def _count(self, session: Session, tenant: str) -> int:
        """Returns the number of the tenant's workloads in the queue, at most `most`."""
        queued = (Workload.finished_at.is_(None), Workload.phase.in_(sorted(QUEUED_PHASES)))
        found = select(Workload.id).where(Workload.tenant == tenant, *queued).limit(self._most)
        return session.scalar(select(func.count()).select_from(found.subquery())) or 0
