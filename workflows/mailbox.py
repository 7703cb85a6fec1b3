"""A workload's mail: what was delivered, what is about the present attempt, and waiting for it."""

import asyncio
from collections import deque
from collections.abc import Coroutine, Set
from dataclasses import replace
from typing import Any, TypeVar

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from domain.protocol import Mail, MailKind, WorkloadInput
    from domain.reasons import ReasonCode
    from lifecycle.endings import STOPS
    from workflows.effects import give_up

T = TypeVar("T")

_REMEMBERED = 100


class Mailbox:
    """The mail of one workload. Which attempt is the present one, `state` says."""

    def __init__(self, state: WorkloadInput) -> None:
        self._state = state
        self._mails: deque[Mail] = deque(state.mails)
        self._seen: deque[int] = deque(state.seen_mail, maxlen=_REMEMBERED)

    def put(self, mail: Mail) -> None:
        """Takes mail; a repetition is dropped."""
        if mail.id not in self._seen:
            self._seen.append(mail.id)
            self._mails.append(mail)

    def put_for_any(self, mail: Mail) -> None:
        """Puts mail back, to be about whichever attempt comes next."""
        self._mails.append(replace(mail, attempt=0))

    def save(self) -> None:
        """Writes what a new history needs into the state."""
        self._state.mails, self._state.seen_mail = list(self._mails), list(self._seen)

    def has(self, kinds: Set[MailKind]) -> bool:
        """Whether there is current mail of these kinds. Mail about earlier attempts is dropped on the way."""
        newer = [m for m in self._mails if m.attempt >= self._state.attempt or _is_about_any(m)]
        if len(newer) < len(self._mails):
            self._mails = deque(newer)
        return any(m.kind in kinds and self._is_current(m) for m in self._mails)

    async def next(self, kinds: Set[MailKind]) -> Mail:
        """The oldest current mail of these kinds, a cancellation first; waits for one."""
        await workflow.wait_condition(lambda: self.has(kinds))
        fitting = [m for m in self._mails if m.kind in kinds and self._is_current(m)]
        mail = next((m for m in fitting if m.kind == MailKind.CANCEL), fitting[0])
        self._mails.remove(mail)
        return mail

    async def unless_told(self, work: Coroutine[Any, Any, T]) -> T | Mail:
        """What `work` gives, or the mail that asks to stop before: then `work` is cancelled."""
        if self.has(STOPS):
            work.close()
            return await self.next(STOPS)
        task = asyncio.ensure_future(work)
        await workflow.wait_condition(lambda: task.done() or self.has(STOPS))
        if task.done():
            return await task
        give_up(task)
        return await self.next(STOPS)

    def _is_current(self, mail: Mail) -> bool:
        if mail.kind == MailKind.AWARDED:
            return mail.attempt > self._state.attempt
        return mail.attempt == self._state.attempt or _is_about_any(mail)


def _is_about_any(mail: Mail) -> bool:
    """Whether mail is about whichever attempt there is. An expiry names the attempt before the wait, maybe 0."""
    return mail.attempt == 0 and mail.detail.get("code") != ReasonCode.PENDING_EXPIRED.value
