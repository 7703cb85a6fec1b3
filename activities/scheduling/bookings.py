"""Bookings: a running workload gets another place or size, and is stopped to continue there from its checkpoint.

1. `book` claims the place for the workload's next attempt, and sends the running attempt the message to stop, in one
   transaction. From then on, each slot of the place has the workload as its holder or successor.
2. The workload saves within its grace period, as in an eviction. The release of its attempt awards the place to it in
   the same transaction (`activities.lifecycle.workloads`), so it is not in the queue in between.
3. If the attempt ends for another reason (it completes, it is cancelled, a machine is lost), or if a machine of the
   place takes no work any more, the release frees the place. The workload then ends, or waits in the queue.

So the rows in Postgres are consistent after a crash at any point.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from psycopg import Connection

from activities.scheduling.awards import PlannedAward, body_of
from domain.reasons import Reason

_BOOK = b"select book_places(%s::jsonb)"


@dataclass(frozen=True)
class PlannedBooking:
    """A place that is to be booked for the next attempt of a running workload."""

    place: PlannedAward
    """The plan for the next attempt, without victims."""
    attempt: int
    """Number of the running attempt."""
    reason: Reason
    """Why the running attempt is stopped. Its outcome has the same code."""
    keeps: bool = False
    """Whether the plan may use resources that the running attempt holds. A gang that grows keeps some."""


def book(connection: Connection[Any], bookings: Sequence[PlannedBooking]) -> bool:
    """Books all of the places or, if one of them cannot be booked any more, none; returns whether they are booked.

    A place cannot be booked if its machines lack the room, or if the attempt is not running, or is being stopped.

    The caller calls `infra.db.outbox.wake_readers` afterwards.
    """
    body = json.dumps([_body(one) for one in bookings])
    found = connection.execute(_BOOK, (body,)).fetchone()
    return found is not None and bool(found[0])


def _body(booking: PlannedBooking) -> dict[str, Any]:
    """Returns the JSON body of a booking for `book_places`."""
    candidate = body_of(booking.place)
    candidate["plan"]["booked"] = True  # It has no new minimum runtime.
    return {
        "attempt": booking.attempt,
        "code": booking.reason.code.value,
        "stop": dict(booking.reason.detail),
        "candidate": candidate,
        "frees": [{"victim": booking.place.plan.workload, "attempt": booking.attempt}] if booking.keeps else [],
    }
