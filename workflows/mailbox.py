"""The mailbox of a workload's workflow: stores delivered mail, and waits for mail about the current attempt."""

import asyncio
from collections import deque
from collections.abc import Coroutine, Set
from dataclasses import replace
from typing import Any, TypeVar

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from domain.lifecycle.endings import STOPS_EARLY
    from domain.protocol.mail import Mail, MailKind
    from domain.protocol.workloads import WorkloadInput
    from domain.reasons import ReasonCode
    from workflows.activity_calls import give_up

T = TypeVar("T")

_REMEMBERED = 100


class Mailbox:
    """The mail of one workload. `state` contains the number of the current attempt."""

    def __init__(self, state: WorkloadInput) -> None:
        self._state = state
        self._mails: deque[Mail] = deque(state.mails)
        self._seen: deque[int] = deque(state.seen_mail, maxlen=_REMEMBERED)

    def put(self, mail: Mail) -> None:
        """Adds a mail, unless it was delivered before."""
        if mail.id not in self._seen:
            self._seen.append(mail.id)
            self._mails.append(mail)

    def put_for_any(self, mail: Mail) -> None:
        """Returns a mail to the mailbox, addressed to whichever attempt comes next."""
        self._mails.append(replace(mail, attempt=0))

    def save(self) -> None:
        """Writes the mailbox into the state, before the workflow continues as new."""
        self._state.mails, self._state.seen_mail = list(self._mails), list(self._seen)

    def has(self, kinds: Set[MailKind]) -> bool:
        """Returns whether there is current mail of these kinds. Drops mail about earlier attempts."""
        newer = [m for m in self._mails if m.attempt >= self._state.attempt or _is_about_any(m)]
        if len(newer) < len(self._mails):
            self._mails = deque(newer)
        return any(m.kind in kinds and self._is_current(m) for m in self._mails)

    async def next(self, kinds: Set[MailKind]) -> Mail:
        """Waits for current mail of these kinds, removes it and returns it: a cancellation first, else the oldest."""
        await workflow.wait_condition(lambda: self.has(kinds))
        fitting = [m for m in self._mails if m.kind in kinds and self._is_current(m)]
        mail = next((m for m in fitting if m.kind == MailKind.CANCEL), fitting[0])
        self._mails.remove(mail)
        return mail

    async def unless_told(self, work: Coroutine[Any, Any, T]) -> T | Mail:
        """Returns the result of `work`. If mail asks to stop before `work` is done, cancels it and returns the mail."""
        if self.has(STOPS_EARLY):
            work.close()
            return await self.next(STOPS_EARLY)
        task = asyncio.ensure_future(work)
        await workflow.wait_condition(lambda: task.done() or self.has(STOPS_EARLY))
        if task.done():
            return await task
        give_up(task)
        return await self.next(STOPS_EARLY)

    def _is_current(self, mail: Mail) -> bool:
        if mail.kind == MailKind.AWARDED:
            return mail.attempt > self._state.attempt
        return mail.attempt == self._state.attempt or _is_about_any(mail)


def _is_about_any(mail: Mail) -> bool:
    """Returns whether a mail is about any attempt. An expiry names the attempt before the wait, which may be 0."""
    return mail.attempt == 0 and mail.detail.get("code") != ReasonCode.PENDING_EXPIRED.value
