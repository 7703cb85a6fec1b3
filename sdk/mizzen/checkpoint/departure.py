"""The course of a training from a notice to its exit: the decision, parts sent ahead, the last save, the exit.

In a gang only some ranks get the notice, and each rank knows only its own saves and parts. So after each step within a
notice the ranks agree on the numbers from which they decide, and every rank computes the same from them. The number of
agreements depends on agreed numbers alone.
"""

import math
import time
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import NamedTuple, NoReturn

from mizzen import notices, report
from mizzen.cadence import Cadence
from mizzen.checkpoint.background import BackgroundSave
from mizzen.checkpoint.presync import PreSync, Turn, Unsent
from mizzen.logger import logger
from mizzen.notices import Notice

LEAD_SAVES = 3.0
"""A known end causes a notice when this many saves still fit before it."""
_MOST = (1 << 31) - 2
"""Largest number that the ranks agree on, in milliseconds or KiB. This plus one means unknown."""


class StepAction(IntEnum):
    """The action after a step. All ranks of a gang take the maximum over the ranks."""

    NOTHING = 0
    SAVE = 1
    FLUSH = 2
    """Save, then exit."""
    LEAVE = 3
    """Exit without a save: there is no time for one."""


class Sender(NamedTuple):
    """The parts that one process can send ahead, and how it sends them."""

    can: bool
    """Whether the process may continue training while parts are sent."""
    is_writer: bool
    """Whether it saves."""
    unsent: Callable[[], Mapping[str, Unsent]]
    """Returns the parts that a save would have to write now."""
    save: Callable[[], None]
    """Starts a background save of the current state."""
    abandon: Callable[[int], None]
    """Makes the running save of a step fail instead of waiting for other ranks."""


class _Numbers(NamedTuple):
    """The numbers from which all ranks make the same decision. None: not known."""

    left_s: float | None
    longest_step_s: float | None
    save_s: float | None
    saving: bool
    failed: bool
    """Whether the newest background save has failed."""

    def agreed(self, agree: Callable[[int], int]) -> "_Numbers":
        """Return the numbers of the gang: the least time that is left, and the greatest of every other number."""
        left = agree(_MOST + 1 if self.left_s is None else _MOST - _whole(self.left_s, 1e3, math.floor))
        step, save = (agree(_whole(number, 1e3, math.ceil)) for number in (self.longest_step_s, self.save_s))
        background = agree(2 if self.failed else int(self.saving))
        return _Numbers(
            None if left > _MOST else (_MOST - left) / 1e3,
            None if step > _MOST else step / 1e3,
            None if save > _MOST else save / 1e3,
            background == 1,
            background == 2,
        )


class Departure:
    """The reaction of one process to notices. Before the first notice, it only records how long saves take."""

    def __init__(self, cadence: Cadence, background: BackgroundSave) -> None:
        """`cadence` times the steps. An end that the platform announces long before is passed to `Cadence.update`.

        `background` is the background save of the same process.
        """
        self._cadence = cadence
        self._background = background
        self.save_s: float | None = None
        """Duration of the last save until it was durable, in seconds."""
        self._notice: Notice | None = None
        """The notice for which `_action` was decided."""
        self._action = StepAction.NOTHING
        self._pre_sync = PreSync()
        self._not_started = False

    def measured(self, save_s: float) -> None:
        """Record the duration of a save until it was durable, in seconds."""
        self.save_s = save_s
        watcher = notices.watcher()
        if watcher is None:
            return
        watcher.lead_s = max(watcher.lead_s, LEAD_SAVES * save_s)
        # An end that the user configured has precedence. The platform's end gets the last save from its own notice.
        if watcher.ends_at_s is not None and self._cadence.explain().ends_in_s is None:
            left_s = watcher.ends_at_s - watcher.lead_s - time.time()
            if left_s > 0:
                self._cadence.update(ends_in_s=left_s)

    def action(self, saved: bool) -> StepAction:
        """Return the action for the current notice. `saved`: this step is already saved or being saved."""
        notice = notices.current()
        if notice is None:
            return StepAction.NOTHING
        if notice is not self._notice:
            self._notice = notice
            watcher = notices.watcher()
            exact = watcher.exact(notice) if watcher is not None else None
            decision = notices.decide(exact or notice, self.save_s, now_s=time.time())
            certain = StepAction.FLUSH if decision.flush else StepAction.LEAVE
            self._action = certain if notice.certain else StepAction.SAVE
            logger(__name__).warning("%s", decision.why)
            report.noticed(notice, decision.why)
        action = self._action
        if action is StepAction.SAVE:
            # A recommendation causes one save; the training continues.
            self._action = StepAction.NOTHING
            return StepAction.NOTHING if saved else action
        return action

    def is_sending_ahead(self, sender: Sender, agree: Callable[[int], int] | None) -> bool:
        """Return whether the training continues within the notice, because parts of the state are sent ahead.

        Args:
            sender: the parts that this process can send ahead.
            agree: returns the maximum of a number over all ranks, which call this after the same step; None: there are
                no other ranks.
        """
        if agree is None and not sender.can:
            return False
        numbers = self._numbers(sender)
        if agree is not None:
            numbers = numbers.agreed(agree)
        if numbers.failed and self._background.step is not None:
            # A sharded checkpoint needs all ranks. Without this, the last save would wait for the one that failed.
            sender.abandon(self._background.step)
        turn = self._pre_sync.turn(
            numbers.left_s, numbers.longest_step_s, numbers.save_s, notices.DEFAULT_MARGIN, numbers.saving
        )
        if turn is Turn.LOOK:
            ahead, unsent = self._pre_sync.compare(sender.unsent())
            if agree is not None:
                ahead, unsent = (agree(_whole(size, 1 / 1024, math.ceil)) for size in (ahead, unsent))
            turn = self._pre_sync.next_turn(ahead, unsent)
            if turn is Turn.GO_ON:
                sender.save()
                self._not_started = sender.is_writer and self._background.step is None
        report.pre_sync(turn is Turn.GO_ON and sender.is_writer)
        return turn is not Turn.FLUSH

    def _numbers(self, sender: Sender) -> _Numbers:
        """Return the numbers of this process. A rank that writes nothing has 0 s: the numbers of the writers count."""
        notice = notices.current()
        left_s = self._exactly_left_s() if notice is not None and notice.certain else math.inf
        background = self._background
        return _Numbers(
            left_s if sender.can else None,
            self._cadence.longest_step_s if sender.is_writer else 0.0,
            self.save_s if sender.is_writer else 0.0,
            background.is_running,
            background.has_failed or self._not_started,
        )

    def _exactly_left_s(self) -> float | None:
        """Return the seconds until the end that the platform has announced; None: the end is only assumed."""
        notice, watcher = notices.current(), notices.watcher()
        exact = watcher.exact(notice) if watcher is not None and notice is not None else None
        return None if exact is None else exact.left_s(time.time())

    def exit(self, action: StepAction, agree: Callable[[int], int] | None) -> NoReturn:
        """Wait for the background save as long as the notice permits, and exit the process.

        Args:
            action: what all ranks do now, `FLUSH` or `LEAVE`.
            agree: returns the maximum of a number over all ranks; None: there are no other ranks.

        Raises:
            SystemExit: with code 143.
        """
        notice = notices.current()
        self._background.join(notice.left_s(time.time()) if notice else None)
        if agree is not None:
            # A launcher may kill all ranks when one exits, so each rank waits until all have saved.
            agree(action)
        notices.acknowledge()
        notices.exit_preempted()


def _whole(number: float | None, factor: float, rounded: Callable[[float], int]) -> int:
    """Return a number as an integer that ranks can agree on; None: `_MOST` + 1."""
    if number is None:
        return _MOST + 1
    return rounded(min(max(number * factor, 0.0), float(_MOST)))
