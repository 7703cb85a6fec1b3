"""Reports from a task to its agent: a small JSON file at `MIZZEN_REPORT`, which is replaced atomically.

    {"step": 120, "resumed_step": 100, "at_s": 1767225600.5, "metrics": {"loss": 0.25},
     "checkpoint": {"step": 100, "at_s": 1767225590.1, "bytes": 52344, "sent_bytes": 2344, "duration_s": 0.012,
                    "write_s": 0.4},
     "cadence": {"interval_s": 805.0, "cost_s": 30.0, "mtbf_s": 10800.0, "step_s": 2.0, "source": "scheduler"},
     "load": {"state": "loaded", "error": null, "skipped": 1},
     "failing": {"failures": 3, "since_s": 1767225580.2, "error": "s3://b/run: step 118 was not saved: ...",
                 "limit": null},
     "notice": {"platform": "aws", "kind": "preempt", "certain": true, "at_s": 1767225600.1,
                "ends_at_s": 1767225720.0, "words": "terminate", "decision": "Save now: ..."}}

| field | meaning |
| --- | --- |
| `step` | the last reported step |
| `metrics` | the values that were last reported, by name |
| `resumed_step` | the step of the checkpoint from which this process started |
| `checkpoint` | the newest commit: its save stalled the training for `duration_s`; it was durable after `write_s`;
`sent_bytes` of its `bytes` were written, the others were there already |
| `cadence` | how often the task saves: W, C, mu, the time of a step, and the source of mu |
| `load` | `started`, then `loaded`, `none` (no valid checkpoint) or `failed`; `skipped` counts damaged checkpoints |
| `failing` | the saves that have failed since the last commit: their number, the time of the first, the error of the
last, and the limit that has ended the task, if any |
| `pre_sync` | true while parts are sent ahead of the last checkpoint, within a notice; may be missing |
| `notice` | the last notice of a platform on which the task acts, and its decision |
| `at_s` | the time of the last report |

A field is null until it has a value. Times are seconds since the epoch. The file is not synced to the disk: if the
machine fails, the agent that reads the file fails with it.

Without `MIZZEN_REPORT` all functions do nothing. A report that cannot be written never stops the training. Any thread
may report.
"""

import atexit
import contextlib
import itertools
import json
import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mizzen import notices
from mizzen.logger import logger
from mizzen.notices import current_notice

MIN_PERIOD_S = 0.2
"""The least time between two writes of steps. The last step is written by the next save, at a notice and at exit."""

MAX_METRICS = 16
"""A report has at most this number of metrics."""

MAX_WORDS = 500
"""Errors and decisions are truncated to this many characters."""


class Reporter:
    """Writes the report to `path`; None: to the file at `MIZZEN_REPORT`, or nowhere if that is not set.

    The environment is read at the first report. `clock` returns monotonic seconds and is used only to limit the rate of
    writes.
    """

    def __init__(self, path: Path | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._pid: int | None = None
        # Reentrant: a signal handler may report while the interrupted frame is reporting.
        self._lock = threading.RLock()
        self._writes = itertools.count()
        self._body: dict[str, Any] = {
            "step": None, "metrics": {}, "resumed_step": None, "checkpoint": None, "cadence": None, "load": None,
            "failing": None, "notice": None, "at_s": time.time(),
        }  # fmt: skip
        self._pending = False
        self._written_at_s: float | None = None
        self._failed = False

    def progress(self, step: int, **metrics: float) -> None:
        """Report that the training is at `step`. The call is cheap: use it at every step.

        Args:
            step: number of steps done.
            metrics: values that are shown over time, such as `loss=0.25`: numbers, or what `float` takes. To read a
                tensor on a GPU waits for the GPU: report it at every tenth step or so. Values that are not finite are
                left out. A metric keeps its value until it is reported again; the `MAX_METRICS` newest names are kept.
        """
        if not metrics or self._file() is None:
            self._publish(hurry=False, step=step)
            return
        values = {name: number for name, value in metrics.items() if math.isfinite(number := float(value))}
        with self._lock:
            older = {name: value for name, value in self._body["metrics"].items() if name not in values}
            kept = [*older.items(), *values.items()][-MAX_METRICS:]
            self._publish(hurry=False, step=step, metrics=dict(kept))

    def saved(
        self,
        step: int,
        at_s: float,
        size_bytes: int,
        duration_s: float,
        write_s: float | None = None,
        sent_bytes: int | None = None,
    ) -> None:
        """Report a committed checkpoint.

        Args:
            step: number of steps done.
            at_s: the time of the commit, in seconds since the epoch.
            size_bytes: size of all its parts.
            duration_s: how long the save stalled the training.
            write_s: how long it took until the checkpoint was durable; None: `duration_s`.
            sent_bytes: size of the parts that this save wrote; None: all. The others were there already.
        """
        write_s = duration_s if write_s is None else write_s
        sent = size_bytes if sent_bytes is None else sent_bytes
        found = {
            "step": step, "at_s": at_s, "bytes": size_bytes, "sent_bytes": sent, "duration_s": duration_s,
            "write_s": write_s,
        }  # fmt: skip
        self._publish(checkpoint=found, failing=None)

    def save_failed(self, failures: int, since_s: float, error: str, limit: str | None) -> None:
        """Report that the last `failures` saves have failed, since `since_s` (epoch seconds), the last with `error`.

        `limit` says which limit is reached, so that the task ends; None: none.
        """
        limit = limit if limit is None else limit[:MAX_WORDS]
        found = {"failures": failures, "since_s": since_s, "error": error[:MAX_WORDS], "limit": limit}
        self._publish(failing=found)

    def pre_sync(self, active: bool) -> None:
        """Report whether the task sends parts of a checkpoint ahead of its last one, within a notice."""
        self._publish(pre_sync=active)

    def cadence(self, interval_s: float, cost_s: float, mtbf_s: float, step_s: float | None, source: str) -> None:
        """Report how often this task saves, and why.

        Args:
            interval_s: W, the work between two saves.
            cost_s: C, the time that a save costs the training.
            mtbf_s: mu, the mean time between interruptions of the whole gang.
            step_s: the time of a step; None: no step was timed yet.
            source: the source of mu, such as `scheduler`, `hazard` or `platform`.
        """
        figures = {"interval_s": interval_s, "cost_s": cost_s, "mtbf_s": mtbf_s, "step_s": step_s}
        # JSON has no infinite numbers.
        told = {name: n if n is not None and math.isfinite(n) else None for name, n in figures.items()}
        self._publish(cadence={**told, "source": source[:MAX_WORDS]})

    def loading(self) -> None:
        """Report that the newest checkpoint is being loaded. If the task fails before `loaded`, the load has failed."""
        self._publish(load={"state": "started", "error": None, "skipped": 0})

    def loaded(self, step: int | None, skipped: int = 0) -> None:
        """Report the step that was loaded (None: no valid checkpoint) and the number of skipped checkpoints."""
        state = "none" if step is None else "loaded"
        self._publish(load={"state": state, "error": None, "skipped": skipped}, resumed_step=step)

    def load_failed(self, error: object, skipped: int = 0) -> None:
        """Report that loading failed with `error` (an exception or a text) after `skipped` checkpoints were skipped."""
        words = f"{type(error).__name__}: {error}" if isinstance(error, BaseException) else str(error)
        self._publish(load={"state": "failed", "error": words[:MAX_WORDS], "skipped": skipped})

    def noticed(self, notice: notices.Notice, decision: str | None = None) -> None:
        """Report a platform's notice that this task will be stopped.

        `decision` describes the task's reaction (`notices.Decision.why`).
        """
        told = {
            "platform": notice.platform,
            "kind": str(notice.kind),
            "certain": notice.certain,
            "at_s": notice.seen_at_s,
            "ends_at_s": notice.ends_at_s,
            "words": notice.words,
            "decision": decision if decision is None else decision[:MAX_WORDS],
        }
        self._publish(notice=told)

    def _file(self) -> Path | None:
        """Return the report's file; None if this process writes none."""
        if self._pid is None:
            if self._path is None and (named := os.environ.get("MIZZEN_REPORT")):
                self._path = Path(named)
            self._pid = os.getpid()
            atexit.register(self.flush)
        # A forked child, such as a data loader's worker, has a copy of this object. It must not write the report.
        return self._path if os.getpid() == self._pid else None

    def _publish(self, hurry: bool = True, **news: object) -> None:
        if self._file() is None:
            return
        with self._lock:
            self._body.update(news, at_s=time.time())
            self._pending = True
            due = self._written_at_s is None or self._clock() >= self._written_at_s + MIN_PERIOD_S
            if hurry or due or notices.preempted():
                self.flush()

    def flush(self) -> None:
        """Write the report if it has changed since the last write."""
        path = self._file()
        if path is None:
            return
        with self._lock:
            if not self._pending:
                return
            temporary = path.with_name(f"{path.name}.{self._pid}.{next(self._writes)}.tmp")
            try:
                temporary.write_text(json.dumps(self._body))
                temporary.replace(path)
            except OSError as error:
                if not self._failed:
                    logger(__name__).warning("cannot write the report %s: %s", path, error)
                self._failed = True
                with contextlib.suppress(OSError):
                    temporary.unlink(missing_ok=True)
            else:
                self._failed = self._pending = False
            self._written_at_s = self._clock()


_process = Reporter()
progress = _process.progress
saved = _process.saved
save_failed = _process.save_failed
pre_sync = _process.pre_sync
cadence = _process.cadence
loading = _process.loading
loaded = _process.loaded
load_failed = _process.load_failed
noticed = _process.noticed
flush = _process.flush
current_notice.before_exit.append(flush)
