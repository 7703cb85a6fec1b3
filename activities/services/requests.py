"""The requests that a service's balancers have counted, for the autoscaler."""

import time

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from infra.db.services import ServiceRequests, ServiceRow

_LATE_S = 3
"""A second takes part in a decision this long after its end, so that the counts of all balancers have arrived."""


def take_requests(session: Session, row: ServiceRow, silent_s: float) -> int | None:
    """Returns the number of requests since the decision before, and marks them as taken.

    Returns None if no balancer has reported for `silent_s` seconds: a balancer also reports seconds without requests,
    so its silence does not mean that there are none.
    """
    until = int(time.time()) - _LATE_S
    own = ServiceRequests.service == row.id
    newest = session.scalar(select(func.max(ServiceRequests.second)).where(own, ServiceRequests.second <= until))
    if newest is None or newest < until - silent_s:
        row.counted_until = max(row.counted_until, until)
        return None
    counted = select(func.coalesce(func.sum(ServiceRequests.requests), 0)).where(
        own, ServiceRequests.second > row.counted_until, ServiceRequests.second <= until
    )
    requests = int(session.scalar(counted) or 0)
    row.counted_until = max(row.counted_until, until)
    return requests
