"""What notices ask of a training: to save once more, and to leave."""

import logging
import time
from enum import IntEnum

from mizzen import notices, report
from mizzen.cadence import Cadence
from mizzen.notices import Notice

_log = logging.getLogger(__name__)

LEAD_SAVES = 3.0
"""An end that is known ahead is told when so many saves still fit."""


class StepAction(IntEnum):
    """What to do after a step. The ranks of a gang do the greatest that any of them wishes."""

    NOTHING = 0
    SAVE = 1
    FLUSH = 2
    """Save, and leave."""
    LEAVE = 3
    """Leave: there is no time for a save."""


class Pressure:
    """Decides once for each notice."""

    def __init__(self, cadence: Cadence) -> None:
        """The cadence learns of ends that the platform names long before."""
        self._cadence = cadence
        self.save_s: float | None = None
        """How long the last save took until it was durable."""
        self._notice: Notice | None = None
        self._action = StepAction.NOTHING

    def measured(self, save_s: float) -> None:
        """A save took so long, in seconds, until it was durable."""
        self.save_s = save_s
        watcher = notices.watcher()
        if watcher is None:
            return
        watcher.lead_s = max(watcher.lead_s, LEAD_SAVES * save_s)
        # An end that somebody gave goes before that of the platform, whose own notice asks for the last save.
        if watcher.ends_at_s is not None and self._cadence.explain().ends_in_s is None:
            left_s = watcher.ends_at_s - watcher.lead_s - time.time()
            if left_s > 0:
                self._cadence.tell(ends_in_s=left_s)

    def action(self, saved: bool) -> StepAction:
        """What the current notice asks for now; `saved`: this very step is durable already, or being written."""
        notice = notices.current()
        if notice is None:
            return StepAction.NOTHING
        if notice is not self._notice:
            self._notice = notice
            decision = notices.decide(notice, self.save_s, now_s=time.time())
            certain = StepAction.FLUSH if decision.flush else StepAction.LEAVE
            self._action = certain if notice.certain else StepAction.SAVE
            _log.warning("%s", decision.why)
            report.noticed(notice, decision.why)
        action = self._action
        if action is StepAction.SAVE:
            # Advice is followed once; the training goes on.
            self._action = StepAction.NOTHING
            return StepAction.NOTHING if saved else action
        return action
