"""Notices of preemption: SIGTERM sets a flag, and the training loop decides at its next step what to do.

The notice is an opportunity for one last save, never the safety net: machines also die without one, so saving goes by
the interval (`Checkpointer.should_save`).
"""

import signal
import sys
import threading
from types import FrameType
from typing import NoReturn

PREEMPTED_EXIT_CODE = 143
"""128 + SIGTERM. mizzen counts any exit after a notice as preempted; other supervisors know this one."""

# A plain name, not an Event: a handler that takes a lock can meet the frame that holds it.
_noticed = False


def preempted() -> bool:
    """Whether this process was told (SIGTERM) that it will be stopped soon."""
    return _noticed


class _Watcher:
    """The handler. Each has its own predecessor, so that one put over another's wrapper cannot call in a circle."""

    def __init__(self, previous: object) -> None:
        self._previous = previous

    def __call__(self, number: int, frame: FrameType | None) -> None:
        global _noticed
        _noticed = True
        if callable(self._previous):
            self._previous(number, frame)


def watch_sigterm() -> bool:
    """Let SIGTERM set the flag instead of killing the process, and call the Python handler that was there before.

    Returns whether the handler is in place: only the main thread can put it there.
    """
    current = signal.getsignal(signal.SIGTERM)
    if isinstance(current, _Watcher):
        return True
    if threading.current_thread() is not threading.main_thread():
        return False
    signal.signal(signal.SIGTERM, _Watcher(current))
    return True


def exit_preempted() -> NoReturn:
    """End the process with exit code 143 after its output and its report are written."""
    from mizzen import report

    report.flush()
    sys.stdout.flush()
    sys.stderr.flush()
    raise SystemExit(PREEMPTED_EXIT_CODE)
