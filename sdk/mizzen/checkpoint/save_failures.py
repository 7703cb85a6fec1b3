"""Limits how long, and how often in a row, a training tolerates failing saves."""

import atexit
import errno
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from mizzen import report
from mizzen.checkpoint.errors import CheckpointError, CheckpointWarning, StaleAttemptError, StateError
from mizzen.notices.current_notice import flush_output

DEFAULT_MAX_FAILING_S = 3600.0
FIRST_SAVE_S = 60.0
"""Time limit of failing saves while there is no checkpoint: the root may be wrong, and all work is at risk."""
_RETRIES = 10
"""Saves are tried again at least this many times within the limit, whatever the interval is."""
_SHORTEST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 10.0
_FIRST_REPEAT_S = 0.1
_LONGEST_REPEAT_S = 5.0

T = TypeVar("T")


class StepStatus(Enum):
    """Whether `Checkpointer.step` has saved, and how."""

    NOT_DUE = "not due"
    """No save was due, or another rank saves."""
    SAVED = "saved"
    """The step is saved."""
    STARTED = "started"
    """The step is being saved in the background."""
    FAILED = "failed"
    """The newest save has failed, at this step or before. It is tried again later."""


@dataclass(frozen=True)
class Limits:
    """Limits of saves that fail in a row."""

    max_failing_s: float = DEFAULT_MAX_FAILING_S
    """Seconds since the first of them."""
    max_failures: int | None = None
    """Their number; None: not limited."""

    def __post_init__(self) -> None:
        if not self.max_failing_s >= 0:
            raise ValueError(f"max_failing_s={self.max_failing_s}: must be 0 or more seconds")
        if self.max_failures is not None and self.max_failures < 0:
            raise ValueError(f"max_failures={self.max_failures}: must be 0 or more")


def may_pass(error: Exception) -> bool:
    """Return whether a save's error may be temporary: errors of a store, but not of the program or the state."""
    if isinstance(error, StaleAttemptError | StateError):
        return False
    if isinstance(error, OSError):
        return error.errno != errno.EFBIG  # A file that exceeds the process's limit would exceed it again.
    if isinstance(error, CheckpointError):
        return error.__cause__ is not None  # The log could not be read.
    # Every client library of a store has its own exception types.
    return type(error).__module__ != "builtins"


def repeated(
    work: Callable[[], T],
    limit_s: float,
    goes_on: Callable[[Exception], bool],
    before_each: Callable[[], None] = lambda: None,
) -> T:
    """Call `work`; after an error repeat it, with backoff, for `limit_s` seconds while `goes_on` returns True.

    `before_each` is called before each repetition; its errors are raised.

    Raises:
        Exception: the error of the last call.
    """
    deadline_s = time.monotonic() + limit_s
    pause_s = _FIRST_REPEAT_S
    while True:
        try:
            return work()
        except Exception as error:
            if time.monotonic() + pause_s > deadline_s or not goes_on(error):
                raise
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_REPEAT_S)
        before_each()


class Failures:
    """Counts the saves of one process that failed in a row, reports them, and raises an error at a limit."""

    def __init__(self, limits: Limits, where: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`where` is the URI of the root, for messages; `clock` returns monotonic seconds."""
        self._limits = limits
        self._where = where
        self._clock = clock
        self._count = 0
        self._began_s = 0.0
        self._began_at_s = 0.0
        self._told = False

    def tolerate(self, step: int, error: BaseException, *, saved: bool) -> float:
        """Report a failed save with a `CheckpointWarning`; return after how many seconds to try again, at the latest.

        Args:
            step: the step that was not saved.
            error: why.
            saved: whether a valid checkpoint exists.

        Raises:
            CheckpointError: a limit is reached.
        """
        now_s = self._clock()
        if not self._told:
            self._told = True
            # The warnings of a full disk may be written to the same disk.
            atexit.register(flush_output)
        if not self._count:
            self._began_s, self._began_at_s = now_s, time.time()
        self._count += 1
        message = f"{self._where}: step {step} was not saved: {error}"
        limit_s = self._limits.max_failing_s if saved else min(self._limits.max_failing_s, FIRST_SAVE_S)
        reached = self._reached(now_s - self._began_s, limit_s, saved)
        report.save_failed(self._count, self._began_at_s, message, reached)
        if reached is not None:
            raise CheckpointError(f"{message}; {reached}") from error
        warnings.warn(message, CheckpointWarning, stacklevel=5)
        return limit_s / _RETRIES

    @property
    def are_failing(self) -> bool:
        """Whether the newest save has failed."""
        return self._count > 0

    def succeeded(self) -> None:
        """Start the count again: a save has succeeded. Any thread may call this method."""
        self._count = 0

    def pause_s(self) -> float:
        """Return the pause before a save that cannot be postponed is tried again. It grows with each failure."""
        return float(min(_LONGEST_PAUSE_S, _SHORTEST_PAUSE_S * 2.0 ** min(self._count, 10)))

    def _reached(self, failing_s: float, limit_s: float, saved: bool) -> str | None:
        """Return which limit is reached; None: none."""
        most = self._limits.max_failures
        if failing_s < limit_s and (most is None or self._count <= most):
            return None
        count = f"{self._count} saves in a row have failed" if self._count > 1 else "a save has failed"
        if most is not None and self._count > most:
            return f"{count}, and max_failures is {most}"
        none = "" if saved else " while there is no checkpoint"
        return f"{count} within {failing_s:.0f} s, and the limit{none} is {limit_s:g} s (max_failing)"
