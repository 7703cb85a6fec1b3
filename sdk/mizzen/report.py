"""What a task tells the agent that runs it: a small JSON file at `MIZZEN_REPORT`, replaced atomically.

    {"step": 120, "resumed_step": 100, "at_s": 1767225600.5,
     "checkpoint": {"step": 100, "at_s": 1767225590.1, "bytes": 52344, "duration_s": 0.012, "write_s": 0.4},
     "cadence": {"interval_s": 805.0, "cost_s": 30.0, "mtbf_s": 10800.0, "step_s": 2.0, "source": "scheduler"},
     "load": {"state": "loaded", "error": null, "skipped": 1},
     "notice": {"platform": "aws", "kind": "preempt", "certain": true, "at_s": 1767225600.1,
                "ends_at_s": 1767225720.0, "words": "terminate", "decision": "Save now: ..."}}

| field | what |
| --- | --- |
| `step` | the last one that was reported |
| `resumed_step` | that of the checkpoint which this process started from |
| `checkpoint` | the newest one that it committed: `duration_s` held the training up, after `write_s` it was durable |
| `cadence` | how often it saves: W, C, mu, the time of a step, and who says mu |
| `load` | `started`; then `loaded`, `none` (nothing valid was there) or `failed`; `skipped` were damaged |
| `notice` | the last word of a platform that it acts upon, and what it decided |
| `at_s` | when the task last said anything |

Each is null until there is one. Times are seconds since the epoch. Nothing is synced to the disk: a machine that dies
takes its agent with it.

Without `MIZZEN_REPORT` all of this does nothing. A report that cannot be written never stops the training. Any thread
may report.
"""

import atexit
import itertools
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mizzen import notices

MIN_PERIOD_S = 0.2
"""Steps are written at most this often; the last one is written by the next save, at a notice and at exit."""

MAX_WORDS = 500
"""Errors and a platform's words are cut to this many characters."""

_log = logging.getLogger(__name__)


class Reporter:
    """Writes the report at `path`. `clock` is monotonic seconds, for the throttle only."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._pid = os.getpid()
        # A handler of a signal may report while the frame below it does.
        self._lock = threading.RLock()
        self._writes = itertools.count()
        self._body: dict[str, Any] = {
            "step": None, "resumed_step": None, "checkpoint": None, "cadence": None, "load": None, "notice": None,
            "at_s": time.time(),
        }  # fmt: skip
        self._pending = False
        self._written_at_s: float | None = None
        self._failed = False

    def progress(self, step: int) -> None:
        """The training is at `step`."""
        self._tell(hurry=False, step=step)

    def resumed(self, step: int | None) -> None:
        """The training starts from the checkpoint of `step`, or (None) from the beginning."""
        self._tell(resumed_step=step)

    def saved(self, step: int, at_s: float, size_bytes: int, duration_s: float, write_s: float | None = None) -> None:
        """A checkpoint of `step` was committed at `at_s` (epoch).

        Args:
            step: number of steps done.
            at_s: when it was committed, in seconds since the epoch.
            size_bytes: of all its parts.
            duration_s: how long the save held the training up.
            write_s: how long it took until it was durable; None: as long.
        """
        write_s = duration_s if write_s is None else write_s
        found = {"step": step, "at_s": at_s, "bytes": size_bytes, "duration_s": duration_s, "write_s": write_s}
        self._tell(checkpoint=found)

    def cadence(self, interval_s: float, cost_s: float, mtbf_s: float, step_s: float | None, source: str) -> None:
        """How often this task saves, and why.

        Args:
            interval_s: W, the work between two saves.
            cost_s: C, what a save costs the training.
            mtbf_s: mu, the mean time between interruptions of the whole gang.
            step_s: one step; None: none was timed yet.
            source: who says mu, such as `scheduler`, `hazard` or `platform`.
        """
        figures = {"interval_s": interval_s, "cost_s": cost_s, "mtbf_s": mtbf_s, "step_s": step_s}
        # What is infinite is not in JSON.
        told = {name: n if n is not None and math.isfinite(n) else None for name, n in figures.items()}
        self._tell(cadence={**told, "source": source[:MAX_WORDS]})

    def loading(self) -> None:
        """The newest checkpoint is being looked for and loaded."""
        self._tell(load={"state": "started", "error": None, "skipped": 0})

    def loaded(self, step: int | None, skipped: int = 0) -> None:
        """The checkpoint of `step` was loaded, or (None) there was nothing valid; `skipped` were passed over."""
        state = "none" if step is None else "loaded"
        self._tell(load={"state": state, "error": None, "skipped": skipped}, resumed_step=step)

    def load_failed(self, error: object, skipped: int = 0) -> None:
        """Loading ended with `error`, an exception or words; `skipped` were passed over before."""
        words = f"{type(error).__name__}: {error}" if isinstance(error, BaseException) else str(error)
        self._tell(load={"state": "failed", "error": words[:MAX_WORDS], "skipped": skipped})

    def noticed(self, notice: notices.Notice, decision: str | None = None) -> None:
        """A platform says that this task will be stopped; `decision` is what is done about it, in words."""
        told = {
            "platform": notice.platform,
            "kind": str(notice.kind),
            "certain": notice.certain,
            "at_s": notice.seen_at_s,
            "ends_at_s": notice.ends_at_s,
            "words": notice.words,
            "decision": decision if decision is None else decision[:MAX_WORDS],
        }
        self._tell(notice=told)

    def _tell(self, hurry: bool = True, **news: object) -> None:
        # A forked child, such as a data loader's, has a copy of this object and must not speak for its parent.
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._body.update(news, at_s=time.time())
            self._pending = True
            due = self._written_at_s is None or self._clock() >= self._written_at_s + MIN_PERIOD_S
            if hurry or due or notices.preempted():
                self.flush()

    def flush(self) -> None:
        """Write what was not written yet."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if not self._pending:
                return
            temporary = self._path.with_name(f"{self._path.name}.{self._pid}.{next(self._writes)}.tmp")
            try:
                temporary.write_text(json.dumps(self._body))
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


def saved(step: int, at_s: float, size_bytes: int, duration_s: float, write_s: float | None = None) -> None:
    """Report a committed checkpoint: when (epoch seconds), its size, and how long it held the training up.

    `write_s` is how long it took until it was durable, where that is longer.
    """
    if reporter := _current():
        reporter.saved(step, at_s, size_bytes, duration_s, write_s)


def cadence(interval_s: float, cost_s: float, mtbf_s: float, step_s: float | None, source: str) -> None:
    """Report how often this task saves: W, C, mu and the time of a step, in seconds, and who says mu."""
    if reporter := _current():
        reporter.cadence(interval_s, cost_s, mtbf_s, step_s, source)


def loading() -> None:
    """Report that the newest checkpoint is being loaded: an end by an error before `loaded` is a load that failed."""
    if reporter := _current():
        reporter.loading()


def loaded(step: int | None, skipped: int = 0) -> None:
    """Report the step that was loaded, None where nothing valid was there, and how many were passed over."""
    if reporter := _current():
        reporter.loaded(step, skipped)


def load_failed(error: object, skipped: int = 0) -> None:
    """Report that loading ended with an error, and how many checkpoints were passed over before."""
    if reporter := _current():
        reporter.load_failed(error, skipped)


def noticed(notice: notices.Notice, decision: str | None = None) -> None:
    """Report a platform's notice and, in words, what is done about it (`notices.Decision.why`)."""
    if reporter := _current():
        reporter.noticed(notice, decision)


def flush() -> None:
    """Write a step that the throttle held back."""
    if reporter := _current():
        reporter.flush()
