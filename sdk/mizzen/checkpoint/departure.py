"""The course of a training from a notice to its exit: parts sent ahead, the last save, the exit."""

import time
from collections.abc import Callable, Mapping
from typing import NoReturn

from mizzen import notices, report
from mizzen.cadence import Cadence
from mizzen.checkpoint.background import BackgroundSave
from mizzen.checkpoint.pressure import Pressure, StepAction
from mizzen.checkpoint.presync import PreSync, Turn, Unsent


class Departure:
    """What one process does because of notices. Before the first notice, it only records how long saves take."""

    def __init__(self, cadence: Cadence, background: BackgroundSave) -> None:
        """`cadence` times the steps; `background` is the background save of the same process."""
        self._cadence = cadence
        self._background = background
        self._pressure = Pressure(cadence)
        self._pre_sync = PreSync()

    def measured(self, save_s: float) -> None:
        """Record the duration of a save until it was durable, in seconds."""
        self._pressure.measured(save_s)

    def action(self, saved: bool) -> StepAction:
        """Return what to do now because of the current notice. `saved`: this step is already saved or being saved."""
        return self._pressure.action(saved)

    def is_sending_ahead(self, unsent: Callable[[], Mapping[str, Unsent]], save: Callable[[], None]) -> bool:
        """Return whether the training continues within the notice, because parts of the state are sent ahead.

        Args:
            unsent: returns the parts that a save would have to write now.
            save: starts a background save of the present state.
        """
        left_s, save_s, saving = self._pressure.exactly_left_s(), self._pressure.save_s, self._background.is_running
        turn = self._pre_sync.turn(left_s, self._cadence.longest_step_s, save_s, notices.DEFAULT_MARGIN, saving)
        if turn is Turn.LOOK:
            turn = self._pre_sync.look(unsent())
            if turn is Turn.GO_ON:
                save()
        report.pre_sync(turn is Turn.GO_ON)
        return turn is not Turn.FLUSH

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
