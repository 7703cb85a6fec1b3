"""How workflows ask for effects: the timeouts and retries of each kind of activity, in one place."""

from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

from temporalio import workflow
from temporalio.common import RetryPolicy, SearchAttributeKey

with workflow.unsafe.imports_passed_through():
    from domain import ids
    from domain.protocol import Activity
    from domain.search_attributes import PHASE, REASON, REGION, TENANT

T = TypeVar("T")

_FOR_EVER = RetryPolicy(
    initial_interval=timedelta(milliseconds=200), backoff_coefficient=2.0, maximum_interval=timedelta(seconds=10)
)


async def record(activity: Activity, argument: Any, result_type: type[T] | None = None, *, tries: int = 0) -> T:
    """A short effect on Postgres, run by the workflow's own worker.

    Retried until Postgres answers, or `tries` times: then an ActivityError.
    """
    result: T = await workflow.execute_local_activity(
        activity.value,
        argument,
        result_type=result_type,
        start_to_close_timeout=timedelta(seconds=30),
        retry_policy=replace(_FOR_EVER, maximum_attempts=tries),
    )
    return result


async def on_region(activity: Activity, argument: Any, region: str, *, start_to_close_s: float) -> int:
    """A long effect near a region's bucket, with heartbeats; retried until it is done."""
    done: int = await workflow.execute_activity(
        activity.value,
        argument,
        task_queue=ids.region_queue(region),
        result_type=int,
        start_to_close_timeout=timedelta(seconds=start_to_close_s),
        heartbeat_timeout=timedelta(seconds=30),
        retry_policy=_FOR_EVER,
    )
    return done


_KEYWORDS = {
    "tenant": SearchAttributeKey.for_keyword(TENANT),
    "region": SearchAttributeKey.for_keyword(REGION),
    "phase": SearchAttributeKey.for_keyword(PHASE),
    "reason": SearchAttributeKey.for_keyword(REASON),
}


def show_in_temporal(**values: str) -> None:
    """Sets search attributes by which operators filter in Temporal's UI: `tenant`, `region`, `phase`, `reason`."""
    workflow.upsert_search_attributes([_KEYWORDS[name].value_set(value) for name, value in values.items()])
