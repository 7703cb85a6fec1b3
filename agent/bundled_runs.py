"""The agent's side of a bundle: runs several attempts in one activity."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from domain.protocol.bundles import BundleRun, RunBundle
from domain.protocol.machines import NodeOutcome, RunNode

_Begun = TypeVar("_Begun", bound=tuple[object, ...])
_TOGETHER_S = 0.2
"""How long to wait for further ends after the first attempt has ended, so that fewer responses are sent."""


async def run_bundle(
    request: RunBundle,
    begin: Callable[[RunNode], Awaitable[_Begun]],
    until_ended: Callable[..., Awaitable[NodeOutcome]],
) -> BundleRun:
    """Starts the tasks of all attempts with `begin`, and passes its results to `until_ended`.

    Returns soon after the first ones have ended, or after `request.limit_s`. Tasks of the others continue.
    """
    begun = await asyncio.gather(*map(begin, request.runs), return_exceptions=True)
    ran, waiting = BundleRun(), {}
    for run, found in zip(request.runs, begun, strict=True):
        if isinstance(found, Exception):
            ran.refused.append(run.workload_id)
        elif isinstance(found, BaseException):
            raise found
        else:
            waiting[asyncio.ensure_future(until_ended(*found))] = run.workload_id
    try:
        if waiting and not ran.refused:
            done, others = await asyncio.wait(waiting, timeout=request.limit_s, return_when=asyncio.FIRST_COMPLETED)
            if done and others:
                await asyncio.wait(others, timeout=_TOGETHER_S)
        for task, workload in waiting.items():
            if task.done() and task.exception() is None:
                ran.outcomes[workload] = task.result()
            elif task.done():
                ran.refused.append(workload)
    finally:
        for task in waiting:
            task.cancel()
    return ran
