"""The newest heartbeats of a workload's agents. Temporal stores them, but sends no notification of them."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
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


async def read_beats(client: Client, workload: str) -> list[NodeHeartbeat]:
    """Returns the newest heartbeat of each machine of a workload; empty if its workflow does not exist."""
    try:
        described = await client.get_workflow_handle(ids.workload_workflow_id(workload)).describe()
    except RPCError as error:
        if error.status is RPCStatusCode.NOT_FOUND:
            return []
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


def _heartbeats(pending: Any) -> list[NodeHeartbeat]:
    out = []
    info: PendingActivityInfo
    for info in pending:
        given_up = info.state == PendingActivityState.PENDING_ACTIVITY_STATE_CANCEL_REQUESTED  # of an earlier attempt
        if info.activity_type.name != Activity.RUN_NODE.value or given_up:
            continue
        for payload in info.heartbeat_details.payloads[:1]:
            try:
                out.append(_HEARTBEAT.validate_json(payload.data))
            except ValidationError:
                continue  # The agent has another version. Its heartbeat still shows that it is alive.
    return out
