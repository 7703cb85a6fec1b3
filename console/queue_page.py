"""The queue: what waits, in which order, and why."""

from typing import Annotated

from fastapi import Query, Request, Response

from api.auth import Viewer
from api.routing import Router
from api.state import StateOf
from api.workloads.queue import read_queue
from console.pages import TOP, page

router = Router(prefix=TOP, include_in_schema=False)
_ROWS = 50
MOST_COUNTED = 10_000
"""Waiting workloads are counted up to this number."""


@router.get("/queue")
def show_queue(
    request: Request, state: StateOf, caller: Viewer, after: Annotated[int, Query(ge=0, le=10**9)] = 0
) -> Response:
    """Shows the workloads that wait behind position `after`."""
    found = read_queue(state, caller, _ROWS, after, MOST_COUNTED + 1)
    last = found.items[-1].position if len(found.items) == _ROWS else None
    return page(request, "queue.html", queue=found, after=after, last=last, most=MOST_COUNTED, rows=_ROWS)
