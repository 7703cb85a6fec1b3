"""The newest heartbeats of a workload's agents. Temporal stores them, but sends no notification of them."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from math import inf
from typing import Any

from pydantic import TypeAdapter, ValidationError
from temporalio.api.enums.v1 import PendingActivityState
from temporalio.api.workflow.v1 import PendingActivityInfo
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from domain import ids
from domain.protocol import Activity, NodeHeartbeat

_HEARTBEAT = TypeAdapter(NodeHeartbeat)
_AT_ONCE = 16


@dataclass(frozen=True)
class Beats:
    """The newest heartbeats of a workload's machines."""

    heard: tuple[NodeHeartbeat, ...] = ()
    mute_since_s: float | None = None
    """Since when all machines without a report have had the request to run their tasks, in seconds since the epoch.
    None: each has reported, or one of them has not received the request yet."""


async def read_beats(client: Client, workload: str) -> Beats:
    """Returns the newest heartbeat of each machine of a workload; none if its workflow does not exist."""
    try:
        described = await client.get_workflow_handle(ids.workload_workflow_id(workload)).describe()
    except RPCError as error:
        if error.status is RPCStatusCode.NOT_FOUND:
            return Beats()
        raise
    return _heartbeats(described.raw_description.pending_activities)


async def for_each(workloads: Iterable[str], one: Callable[[str], Awaitable[None]]) -> None:
    """Runs `one` for each workload, at most `_AT_ONCE` concurrently. Raises an error after all have run."""
    gate = asyncio.Semaphore(_AT_ONCE)

    async def in_turn(workload: str) -> None:
        async with gate:
            await one(workload)

    results = await asyncio.gather(*(in_turn(w) for w in workloads), return_exceptions=True)
    for failure in results:
        if isinstance(failure, BaseException):
            raise failure


def _heartbeats(pending: Any) -> Beats:
    out, mute_since_s = [], list[float]()
    info: PendingActivityInfo
    for info in pending:
        given_up = info.state == PendingActivityState.PENDING_ACTIVITY_STATE_CANCEL_REQUESTED  # of an earlier attempt
        if info.activity_type.name != Activity.RUN_NODE.value or given_up:
            continue
        if not info.heartbeat_details.payloads:
            has_it = info.state == PendingActivityState.PENDING_ACTIVITY_STATE_STARTED
            mute_since_s.append(info.last_started_time.ToMicroseconds() / 1e6 if has_it else inf)
        for payload in info.heartbeat_details.payloads[:1]:
            try:
                out.append(_HEARTBEAT.validate_json(payload.data))
            except ValidationError:
                continue  # The agent has another version. Its heartbeat still shows that it is alive.
    since_s = max(mute_since_s, default=inf)
    return Beats(tuple(out), since_s if since_s < inf else None)
