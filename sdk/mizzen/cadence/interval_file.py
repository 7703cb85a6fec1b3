"""The interval that the coordinator of a site computed for a task, in a file that its agent replaces.

`MIZZEN_INTERVAL_FILE` is the path of the file. The file may be missing for some or all of the time.

    {"interval_s": 412.5, "least_s": 90.0, "hazard_per_h": 0.8, "expires_at_s": 1767225900.0, "period_s": 30.0,
     "offset_s": 11.2}

| field | meaning |
| --- | --- |
| `interval_s` | longest time between two saves in seconds, 1 to 86,400; the task's own formula may give less |
| `least_s` | shortest time between two saves in seconds, even if the task's own formula gives less; may be missing |
| `expires_at_s` | seconds since the epoch; from then on the file is ignored |
| `hazard_per_h` | expected interruptions of the gang per hour, for explanations; may be missing |
| `period_s`, `offset_s` | saves begin `offset_s` after a multiple of `period_s` since the epoch; may be missing |

The coordinator gives each job of a site a different offset, so that their saves do not begin together.

A file that is missing, too large, invalid or expired has no effect, and the cadence uses its own formula. A task could
write the file itself, but it would only change its own interval.
"""

import json
import os
import stat
import time
from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any, NamedTuple

INTERVAL_FILE = "MIZZEN_INTERVAL_FILE"
LOOK_PERIOD_S = 1.0
"""The file's status is read at most this often."""
MIN_INTERVAL_S = 1.0
MAX_INTERVAL_S = 86_400.0
MAX_BYTES = 4096
_MAX_HAZARD_PER_H = 3600.0


class SiteInterval(NamedTuple):
    """The content of the file."""

    interval_s: float
    expires_at_s: float
    hazard_per_h: float | None = None
    period_s: float | None = None
    offset_s: float = 0.0
    least_s: float = 0.0

    def clipped_s(self, own_s: float) -> float:
        """Return the interval of a task whose own formula gives `own_s`."""
        return max(self.least_s, min(self.interval_s, own_s))

    def staggered_s(self, interval_s: float, begins_at_s: float) -> float:
        """Return an interval that begins at a time since the epoch, with its end moved to the offset of the task.

        The end is moved by at most half a period. An interval shorter than two periods is not changed.
        """
        if self.period_s is None or interval_s < 2 * self.period_s:
            return interval_s
        ends_at_s = begins_at_s + interval_s
        periods = round((ends_at_s - self.offset_s) / self.period_s)
        return periods * self.period_s + self.offset_s - begins_at_s


def parse(text: bytes) -> SiteInterval | None:
    """Return the content of the file; None: it is invalid."""
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(body, dict):
        return None
    interval_s = _number(body, "interval_s", MIN_INTERVAL_S, MAX_INTERVAL_S)
    expires_at_s = _number(body, "expires_at_s", 0.0, 1e12)
    if interval_s is None or expires_at_s is None:
        return None
    hazard_per_h = _number(body, "hazard_per_h", 0.0, _MAX_HAZARD_PER_H)
    period_s = _number(body, "period_s", 1.0, MAX_INTERVAL_S)
    offset_s = _number(body, "offset_s", 0.0, MAX_INTERVAL_S)
    least_s = _number(body, "least_s", 0.0, interval_s) or 0.0
    if period_s is None or offset_s is None:
        return SiteInterval(interval_s, expires_at_s, hazard_per_h, least_s=least_s)
    return SiteInterval(interval_s, expires_at_s, hazard_per_h, period_s, offset_s, least_s)


def _number(body: dict[str, Any], name: str, least: float, most: float) -> float | None:
    value = body.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # Compared before the conversion, which fails for a large whole number.
    return float(value) if least <= value <= most and isfinite(value) else None


class IntervalFile:
    """Reads the file again whenever it was replaced."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Create a reader.

        Args:
            path: the file.
            clock: returns monotonic seconds.
            wall: returns seconds since the epoch.
        """
        self._path = path
        self._clock = clock
        self._wall = wall
        self._look_at_s: float | None = None
        self._seen: tuple[int, int, int] | None = None
        self._found: SiteInterval | None = None

    @classmethod
    def from_environ(cls, environ: Mapping[str, str], clock: Callable[[], float]) -> "IntervalFile | None":
        """Return a reader of the file in `MIZZEN_INTERVAL_FILE`; None: the variable is not set."""
        path = environ.get(INTERVAL_FILE)
        return cls(path, clock) if path else None

    def current(self) -> SiteInterval | None:
        """Return the content of the file; None: it has no effect now."""
        now_s = self._clock()
        if self._look_at_s is None or now_s >= self._look_at_s:
            self._look_at_s = now_s + LOOK_PERIOD_S
            self._reread()
        found = self._found
        return found if found is not None and self._wall() < found.expires_at_s else None

    def staggered_s(self, found: SiteInterval, interval_s: float, passed_s: float) -> float:
        """Return an interval that began `passed_s` seconds ago, as `SiteInterval.staggered_s`."""
        return found.staggered_s(interval_s, self._wall() - passed_s)

    def _reread(self) -> None:
        try:
            status = os.lstat(self._path)
        except (OSError, ValueError):
            self._seen = self._found = None
            return
        seen = (status.st_ino, status.st_mtime_ns, status.st_size)
        if seen != self._seen:
            self._seen = seen
            text = _read(self._path)
            self._found = None if text is None else parse(text)


def _read(path: str | os.PathLike[str]) -> bytes | None:
    try:
        # A pipe without a writer must not block the training.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        text = os.read(descriptor, MAX_BYTES + 1)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return text if len(text) <= MAX_BYTES else None
