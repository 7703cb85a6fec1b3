"""What a task tells the agent that runs it: a small JSON file at `MIZZEN_REPORT`, replaced atomically.

    {"step": 120, "resumed_step": 100, "at_s": 1767225600.5,
     "checkpoint": {"step": 100, "at_s": 1767225590.1, "bytes": 52344, "duration_s": 0.012}}

`step` is the last one reported, `resumed_step` that of the checkpoint which this process started from, `checkpoint` the
last one that it committed; each is null until there is one. `at_s` is when the task last said anything. Times are
seconds since the epoch. Nothing is synced to the disk: a machine that dies takes its agent with it.

Without `MIZZEN_REPORT` all of this does nothing. A report that cannot be written never stops the training.
"""

import atexit
import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from mizzen import notices

MIN_PERIOD_S = 0.2
"""Steps are written at most this often; the last one is written by the next save, at a notice and at exit."""

_log = logging.getLogger(__name__)


class Reporter:
    """Writes the report at `path`. `clock` is monotonic seconds, for the throttle only."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._pid = os.getpid()
        self._step: int | None = None
        self._resumed_step: int | None = None
        self._checkpoint: dict[str, float] | None = None
        self._at_s = time.time()
        self._pending = False
        self._written_at_s: float | None = None
        self._failed = False

    def progress(self, step: int) -> None:
        """The training is at `step`."""
        self._step = step
        self._changed()
        if notices.preempted() or self._written_at_s is None or self._clock() >= self._written_at_s + MIN_PERIOD_S:
            self.flush()

    def resumed(self, step: int | None) -> None:
        """The training starts from the checkpoint of `step`, or (None) from the beginning."""
        self._resumed_step = step
        self._changed()
        self.flush()

    def saved(self, step: int, at_s: float, size_bytes: int, duration_s: float) -> None:
        """A checkpoint of `step` was committed at `at_s` (epoch) after `duration_s` of saving."""
        self._checkpoint = {"step": step, "at_s": at_s, "bytes": size_bytes, "duration_s": duration_s}
        self._changed()
        self.flush()

    def _changed(self) -> None:
        self._at_s = time.time()
        self._pending = True

    def flush(self) -> None:
        """Write what was not written yet."""
        # A forked child, such as a data loader's, has a copy of this object and must not speak for its parent.
        if not self._pending or os.getpid() != self._pid:
            return
        body = {
            "step": self._step,
            "resumed_step": self._resumed_step,
            "checkpoint": self._checkpoint,
            "at_s": self._at_s,
        }
        temporary = self._path.with_name(f"{self._path.name}.{self._pid}.tmp")
        try:
            temporary.write_text(json.dumps(body))
            temporary.replace(self._path)
        except OSError as error:
            if not self._failed:
                _log.warning("the report %s cannot be written: %s", self._path, error)
            self._failed = True
        self._pending = False
        self._written_at_s = self._clock()


_reporter: Reporter | None = None
_asked = False


def _current() -> Reporter | None:
    global _reporter, _asked
    if not _asked:
        _asked = True
        if path := os.environ.get("MIZZEN_REPORT"):
            _reporter = Reporter(Path(path))
            atexit.register(_reporter.flush)
    return _reporter


def progress(step: int) -> None:
    """Report that the training is at `step`. Cheap: call it at every step."""
    if reporter := _current():
        reporter.progress(step)


def resumed(step: int | None) -> None:
    """Report the step that the training resumes from; None: it starts from the beginning."""
    if reporter := _current():
        reporter.resumed(step)


def saved(step: int, at_s: float, size_bytes: int, duration_s: float) -> None:
    """Report a committed checkpoint: when (epoch seconds), its size and how long saving it took."""
    if reporter := _current():
        reporter.saved(step, at_s, size_bytes, duration_s)


def flush() -> None:
    """Write a step that the throttle held back."""
    if reporter := _current():
        reporter.flush()
