"""The inbox of a workload's workflow: stores messages, and waits for messages about the current attempt."""

import asyncio
from collections import deque
from collections.abc import Coroutine, Set
from dataclasses import replace
from typing import Any, TypeVar

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from domain.lifecycle.endings import STOPS_EARLY
    from domain.protocol.workload_messages import MessageKind, WorkloadMessage
    from domain.protocol.workloads import WorkloadInput
    from domain.reasons import ReasonCode
    from workflows.activity_calls import give_up

T = TypeVar("T")

_REMEMBERED = 100


class Inbox:
    """The messages to one workload. `state` contains the number of the current attempt."""

    def __init__(self, state: WorkloadInput) -> None:
        self._state = state
        self._messages: deque[WorkloadMessage] = deque(state.mails)
        self._seen: deque[int] = deque(state.seen_mail, maxlen=_REMEMBERED)

    def put(self, message: WorkloadMessage) -> None:
        """Adds a message, unless it was delivered before."""
        if message.id not in self._seen:
            self._seen.append(message.id)
            self._messages.append(message)

    def put_for_any(self, message: WorkloadMessage) -> None:
        """Puts a message back, addressed to the next attempt, whatever its number."""
        self._messages.append(replace(message, attempt=0))

    def save(self) -> None:
        """Writes the inbox into the state, before the workflow continues as new."""
        self._state.mails, self._state.seen_mail = list(self._messages), list(self._seen)

    def has(self, kinds: Set[MessageKind]) -> bool:
        """Returns whether there is a current message of these kinds. Drops messages about earlier attempts."""
        newer = [m for m in self._messages if m.attempt >= self._state.attempt or _is_about_any(m)]
        if len(newer) < len(self._messages):
            self._messages = deque(newer)
        return any(m.kind in kinds and self._is_current(m) for m in self._messages)

    async def next(self, kinds: Set[MessageKind]) -> WorkloadMessage:
        """Waits for a current message of these kinds and removes it: a cancellation first, else the oldest."""
        await workflow.wait_condition(lambda: self.has(kinds))
        fitting = [m for m in self._messages if m.kind in kinds and self._is_current(m)]
        message = next((m for m in fitting if m.kind == MessageKind.CANCEL), fitting[0])
        self._messages.remove(message)
        return message

    async def unless_told(self, work: Coroutine[Any, Any, T]) -> T | WorkloadMessage:
        """Returns the result of `work`, or the first message that asks to stop; `work` is then cancelled."""
        if self.has(STOPS_EARLY):
            work.close()
            return await self.next(STOPS_EARLY)
        task = asyncio.ensure_future(work)
        await workflow.wait_condition(lambda: task.done() or self.has(STOPS_EARLY))
        if task.done():
            return await task
        give_up(task)
        return await self.next(STOPS_EARLY)

    def _is_current(self, message: WorkloadMessage) -> bool:
        if message.kind == MessageKind.AWARDED:
            return message.attempt > self._state.attempt
        return message.attempt == self._state.attempt or _is_about_any(message)


def _is_about_any(message: WorkloadMessage) -> bool:
    """Returns whether a message is about any attempt. An expiry names the attempt before the wait, which may be 0."""
    return message.attempt == 0 and message.detail.get("code") != ReasonCode.PENDING_EXPIRED.value
