"""Decides what a training must do because of a notice: save once more, exit, or both."""

import logging
import time
from enum import IntEnum

from mizzen import notices, report
from mizzen.cadence import Cadence
from mizzen.notices import Notice

_log = logging.getLogger(__name__)

LEAD_SAVES = 3.0
"""A known end causes a notice when this many saves still fit before it."""


class StepAction(IntEnum):
    """What to do after a step. All ranks of a gang take the maximum over the ranks."""

    NOTHING = 0
    SAVE = 1
    FLUSH = 2
    """Save, then exit."""
    LEAVE = 3
    """Exit without a save: there is no time for one."""


class Pressure:
    """Decides what to do about each notice, once per notice."""

    def __init__(self, cadence: Cadence) -> None:
        """Passes an end that the platform announces long before to `cadence`."""
        self._cadence = cadence
        self.save_s: float | None = None
        """Duration of the last save until it was durable, in seconds."""
        self._notice: Notice | None = None
        self._action = StepAction.NOTHING

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
                self._cadence.tell(ends_in_s=left_s)

    def exactly_left_s(self) -> float | None:
        """Return the seconds until the end that the platform has announced; None: the end is only assumed."""
        notice, watcher = notices.current(), notices.watcher()
        exact = watcher.exact(notice) if watcher is not None and notice is not None else None
        return None if exact is None else exact.left_s(time.time())

    def action(self, saved: bool) -> StepAction:
        """Return what to do now because of the current notice. `saved`: this step is already saved or being saved."""
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
            _log.warning("%s", decision.why)
            report.noticed(notice, decision.why)
        action = self._action
        if action is StepAction.SAVE:
            # A recommendation causes one save; the training continues.
            self._action = StepAction.NOTHING
            return StepAction.NOTHING if saved else action
        return action
