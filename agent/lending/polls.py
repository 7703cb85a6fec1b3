"""Closes the agent's polls of Temporal while the owner takes the machine.

A poll that is open when the owner takes the machine stays open, and may still bring one request. So at most one poll is
open, and no other one is prepared: the SDK would otherwise reserve the slot for the next poll in advance.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from temporalio.worker import (
    CustomSlotSupplier,
    FixedSizeSlotSupplier,
    SlotMarkUsedContext,
    SlotPermit,
    SlotReleaseContext,
    SlotReserveContext,
    WorkerTuner,
)

KNOWN_S = 1.0
"""How long the polls stay closed after Temporal has accepted the owner's notice, so that the control plane can withdraw
the launches that it has sent."""
CLOSED_S = 5.0
"""The longest time for which the polls are closed: the control plane counts a machine as lost if its agent does not
answer for `lifecycle.node_lost_after_s`, 30 s by default."""
_MOST_ACTIVITIES = 1000
_log = logging.getLogger(__name__)


class Polls:
    """Whether the agent may poll for requests."""

    def __init__(self) -> None:
        self._open, self._closed, self._known = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._open.set()
        self._closings = 0

    def close(self) -> None:
        """Prevents new polls, until the owner lends the machine or `reopening` opens the polls."""
        self._closings += 1
        self._open.clear()
        self._closed.set()

    def open(self) -> None:
        """Permits polls, because the owner lends the machine."""
        self._known.clear()
        self._closed.clear()
        self._open.set()

    def known(self) -> None:
        """Temporal has accepted the owner's notice."""
        self._known.set()

    async def until_known(self) -> None:
        """Waits until Temporal has accepted the owner's notice, at most `KNOWN_S`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KNOWN_S):
                await self._known.wait()

    async def opened(self) -> None:
        """Waits until polls are permitted."""
        await self._open.wait()

    async def reopening(self, free: Callable[[], Awaitable[None]]) -> None:
        """Opens the polls after each `close`, until cancelled: the stops of gangs are confirmed through them.

        Opens them when `free` has returned and the control plane has had `KNOWN_S` to process the notice, but at the
        latest after `CLOSED_S`.
        """
        while True:
            await self._closed.wait()
            closings = self._closings
            try:
                async with asyncio.timeout(CLOSED_S):
                    await free()
                    await self._known.wait()
                    await asyncio.sleep(KNOWN_S)
            except TimeoutError:
                _log.warning("the control plane was not told, or tasks run, %.0f s after the owner's word", CLOSED_S)
            except Exception:
                _log.exception("the polls are opened too early")
            if closings == self._closings:
                self._closed.clear()
                self._open.set()


class _Permit(SlotPermit):
    """A slot, which is used once a request has arrived."""

    used = False


class _Slots(CustomSlotSupplier):
    """The slots for the activities of one worker. The SDK reserves one before each poll."""

    def __init__(self, polls: Polls) -> None:
        self._polls = polls
        self._loop = asyncio.get_running_loop()
        self._free = asyncio.Semaphore(_MOST_ACTIVITIES)
        self._unused = asyncio.Semaphore(1)

    async def reserve_slot(self, ctx: SlotReserveContext) -> SlotPermit:
        """Waits until no other poll is open and polls are permitted."""
        async with contextlib.AsyncExitStack() as reserved:
            for semaphore in (self._free, self._unused):
                await semaphore.acquire()
                reserved.callback(semaphore.release)
            await self._polls.opened()
            reserved.pop_all()
        return _Permit()

    def try_reserve_slot(self, ctx: SlotReserveContext) -> SlotPermit | None:
        """Returns None: this is for workers that also run workflows."""
        return None

    def mark_slot_used(self, ctx: SlotMarkUsedContext) -> None:
        """See the base class. Called in a thread of the SDK, as `release_slot`."""
        assert isinstance(ctx.permit, _Permit)
        ctx.permit.used = True
        self._release(self._unused)

    def release_slot(self, ctx: SlotReleaseContext) -> None:
        """See the base class."""
        assert isinstance(ctx.permit, _Permit)
        if not ctx.permit.used:
            self._release(self._unused)
        self._release(self._free)

    def _release(self, semaphore: asyncio.Semaphore) -> None:
        with contextlib.suppress(RuntimeError):  # The loop has ended: the SDK drops its last slots late.
            self._loop.call_soon_threadsafe(semaphore.release)


def tuner(polls: Polls) -> WorkerTuner:
    """Returns the tuner of a worker that polls only while `polls` permits it. Needs a running event loop."""
    rest = FixedSizeSlotSupplier(2)  # The least that the SDK accepts: the worker has activities only.
    return WorkerTuner.create_composite(
        workflow_supplier=rest,
        activity_supplier=_Slots(polls),
        local_activity_supplier=rest,
        nexus_supplier=rest,
    )
