"""The requests that a service's balancers have counted, for the autoscaler."""

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from infra.db.services import REQUESTS_LATE_S, REQUESTS_WINDOW_S, ServiceRequests, ServiceRow


def take_requests(session: Session, row: ServiceRow, silent_s: float, now_s: float) -> int | None:
    """Returns the number of requests since the decision before, of the last minute at most, and marks them as taken.

    Returns None if it is unknown: no balancer has reported for `silent_s` seconds, or the clock was set back. A
    balancer also reports seconds without requests, so its silence does not mean that there are none. `now_s` is the
    time of the database, in seconds since the epoch.
    """
    until = int(now_s) - REQUESTS_LATE_S
    before, row.counted_until = row.counted_until, until
    own = ServiceRequests.service == row.id
    newest = session.scalar(select(func.max(ServiceRequests.second)).where(own, ServiceRequests.second <= until))
    if newest is None or newest < until - silent_s or before > until:
        return None
    counted = select(func.coalesce(func.sum(ServiceRequests.requests), 0)).where(
        own, ServiceRequests.second > max(before, until - REQUESTS_WINDOW_S), ServiceRequests.second <= until
    )
    return int(session.scalar(counted) or 0)
