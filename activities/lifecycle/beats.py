"""The newest heartbeats of a workload's agents. Temporal stores them, but sends no notification of them."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import Any

from pydantic import TypeAdapter, ValidationError
from temporalio.api.enums.v1 import PendingActivityState
from temporalio.api.workflow.v1 import PendingActivityInfo
from temporalio.client import Client
from temporalio.converter import PayloadCodec
from temporalio.service import RPCError, RPCStatusCode

from domain import ids
from domain.protocol.activities import Activity
from domain.protocol.machines import NodeHeartbeat
from domain.slots import machines_of_tasks
from domain.task_reports import TaskProgress
from infra.errors import MizzenError

_HEARTBEAT = TypeAdapter(NodeHeartbeat)
_AT_ONCE = 16


@dataclass(frozen=True)
class Beat:
    """A machine that prepares or runs tasks of a workload, and its newest heartbeat."""

    machine: str
    since_s: float
    """Since when its agent has had the request, in seconds since the epoch; infinite: it has not received this try."""
    said: NodeHeartbeat | None
    """None: there is no heartbeat, or an agent of another version or with another key has sent it."""


async def read_beats(client: Client, workload: str) -> list[Beat]:
    """Returns the newest heartbeat of each machine of a workload; none if its workflow does not exist."""
    try:
        described = await client.get_workflow_handle(ids.workload_workflow_id(workload)).describe()
    except RPCError as error:
        if error.status is RPCStatusCode.NOT_FOUND:
            return []
        raise
    codec = client.data_converter.payload_codec
    runs = [info for info in described.raw_description.pending_activities if _is_live_run(info)]
    return [await _beat(info, codec) for info in runs]


def own_progress(beats: Iterable[Beat], jobs: Sequence[Mapping[str, Any]]) -> dict[str, list[TaskProgress]]:
    """Returns what each machine reports about tasks that are placed on it; `jobs` is `Attempt.plan["jobs"]`.

    The agent of a volunteer's machine may report anything, also about the tasks of other machines.
    """
    machine_of = machines_of_tasks(jobs)
    out: dict[str, list[TaskProgress]] = {}
    for beat in beats:
        told = [] if beat.said is None else beat.said.progress
        out.setdefault(beat.machine, []).extend(p for p in told if machine_of.get((p.job, p.task)) == beat.machine)
    return out


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


def _is_live_run(info: PendingActivityInfo) -> bool:
    given_up = info.state == PendingActivityState.PENDING_ACTIVITY_STATE_CANCEL_REQUESTED  # of an earlier attempt
    return info.activity_type.name in (Activity.RUN_NODE, Activity.PREPARE_NODE) and not given_up


async def _beat(info: PendingActivityInfo, codec: PayloadCodec | None) -> Beat:
    has_it = info.state == PendingActivityState.PENDING_ACTIVITY_STATE_STARTED
    since_s = info.last_started_time.ToMicroseconds() / 1e6 if has_it else inf
    said = None
    for payload in info.heartbeat_details.payloads[:1]:
        with suppress(ValidationError, MizzenError):
            (plain,) = [payload] if codec is None else await codec.decode([payload])
            said = _HEARTBEAT.validate_json(plain.data)
    # Only the agent of its own queue can send a heartbeat: the queue says who sent it, and the heartbeat need not.
    return Beat(ids.machine_of_queue(info.activity_options.task_queue.name), since_s, said)
