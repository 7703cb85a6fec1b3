"""Helpers that run activities, with the timeouts and retry policies of each kind of activity."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

from temporalio import workflow
from temporalio.common import RetryPolicy, SearchAttributeKey, SearchAttributeUpdate
from temporalio.exceptions import ActivityError, ApplicationError, FailureError

with workflow.unsafe.imports_passed_through():
    from domain import ids
    from domain.protocol.activities import Activity
    from domain.protocol.machines import NodeOutcome, StopNode
    from domain.search_attributes import ATTEMPT, PHASE, PRIORITY, REASON, REGION

T = TypeVar("T")
_STOP_S = 120.0
"""How long one attempt to stop tasks may take beyond their grace period."""
_STOP_TRIES = 2
"""Time limit of stopping tasks on a machine, in multiples of the longest duration of one attempt."""
_FREED_S = 60.0
"""How long an agent that should end a memory server may be silent."""
_FREED_AT_ONCE = 500
"""Number of machines that are asked at the same time: Temporal limits pending activities of a workflow to 2,000, and
the attempts of a large gang may have used more machines."""

_FOR_EVER = RetryPolicy(
    initial_interval=timedelta(milliseconds=200), backoff_coefficient=2.0, maximum_interval=timedelta(seconds=10)
)


async def record(activity: Activity, argument: Any, result_type: type[T] | None = None, *, tries: int = 0) -> T:
    """Runs a short activity on Postgres as a local activity of the workflow's worker; returns its result.

    Retries until Postgres answers, or at most `tries` times if `tries` is not 0.

    Raises:
        FailureError: all tries failed, or the error is not retryable. It is not always an ActivityError: the SDK raises
            the error of a local activity unchanged.
    """
    result: T = await workflow.execute_local_activity(
        activity.value,
        argument,
        result_type=result_type,
        start_to_close_timeout=timedelta(seconds=30),
        retry_policy=replace(_FOR_EVER, maximum_attempts=tries),
    )
    return result


def type_of(error: FailureError) -> str | None:
    """Returns the type of the ApplicationError with which an activity failed; None: it failed for another reason."""
    cause = error.cause if isinstance(error, ActivityError) else error
    return cause.type if isinstance(cause, ApplicationError) else None


async def on_region(
    activity: Activity,
    argument: Any,
    region: str,
    *,
    start_to_close_s: float,
    tries: int = 0,
    cancellation: workflow.ActivityCancellationType = workflow.ActivityCancellationType.TRY_CANCEL,
) -> int:
    """Runs a long activity with heartbeats on a region's task queue; returns its result.

    Retries until the activity succeeds, or at most `tries` times if `tries` is not 0.
    """
    done: int = await workflow.execute_activity(
        activity.value,
        argument,
        task_queue=ids.region_queue(region),
        result_type=int,
        start_to_close_timeout=timedelta(seconds=start_to_close_s),
        heartbeat_timeout=timedelta(seconds=30),
        retry_policy=replace(_FOR_EVER, maximum_attempts=tries),
        cancellation_type=cancellation,
    )
    return done


async def stop_node(machine: str, stop: StopNode, *, lost_after_s: float, heartbeat_timeout_s: float) -> NodeOutcome:
    """Stops an attempt's tasks on a machine, and returns when none of them runs.

    If an agent's stop fails, the request is repeated, but not for ever: a volunteer's agent may always refuse.

    Raises:
        ActivityError: the agent did not answer in time (the cause is a TimeoutError), or answered only with failures.
    """
    try_s = stop.grace_s + _STOP_S
    outcome: NodeOutcome = await workflow.execute_activity(
        Activity.STOP_NODE.value,
        stop,
        task_queue=ids.agent_queue(machine),
        result_type=NodeOutcome,
        schedule_to_start_timeout=timedelta(seconds=lost_after_s),
        start_to_close_timeout=timedelta(seconds=try_s),
        schedule_to_close_timeout=timedelta(seconds=_STOP_TRIES * (lost_after_s + try_s)),
        heartbeat_timeout=timedelta(seconds=heartbeat_timeout_s),
    )
    return outcome


async def free_memory(machines: Sequence[str], workload_id: str, attempt: int) -> None:
    """Ends the memory servers of a workload that has ended. Where an agent is silent, it ends them later by itself."""
    stop = StopNode(workload_id, attempt, 0.0, ends=True)
    for first in range(0, len(machines), _FREED_AT_ONCE):
        some = machines[first : first + _FREED_AT_ONCE]
        stops = (stop_node(one, stop, lost_after_s=_FREED_S, heartbeat_timeout_s=_FREED_S) for one in some)
        await asyncio.gather(*stops, return_exceptions=True)


def give_up(work: asyncio.Future[Any]) -> None:
    """Cancels work whose result is no longer needed, and ignores its outcome."""
    work.add_done_callback(lambda done: done.cancelled() or done.exception())
    work.cancel()


_KEYWORDS = {
    "region": SearchAttributeKey.for_keyword(REGION),
    "phase": SearchAttributeKey.for_keyword(PHASE),
    "reason": SearchAttributeKey.for_keyword(REASON),
}
_PRIORITY = SearchAttributeKey.for_int(PRIORITY)
_ATTEMPT = SearchAttributeKey.for_int(ATTEMPT)


def show_in_temporal(*, rank: int | None = None, attempt: int | None = None, **values: str) -> None:
    """Sets the search attributes of the workflow: `region`, `phase`, `reason`, the rank and the attempt's number.

    Operators filter by them in Temporal's UI, and the reconciler compares phase and attempt with Postgres. Their first
    values, and the tenant and name, are set when the workflow starts (`activities.lifecycle.workload_start`).
    """
    updates: list[SearchAttributeUpdate[Any]] = [_KEYWORDS[name].value_set(value) for name, value in values.items()]
    if rank is not None:
        updates.append(_PRIORITY.value_set(rank))
    if attempt is not None:
        updates.append(_ATTEMPT.value_set(attempt))
    workflow.upsert_search_attributes(updates)
