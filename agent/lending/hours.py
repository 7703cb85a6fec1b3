"""Lending hours: the weekly windows in which an owner lends a machine, such as `20:00-08:00 mon-fri; 00:00-24:00 sat`.

Times are those of the machine's time zone. A time that the clock skips in spring is the instant of the skip. While the
clock repeats an hour in autumn, the windows stay as they were in the last minute of the first pass. Pure.
"""

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

_DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_DAY = 24 * 60
_WEEK = 7 * _DAY
_MINUTE = timedelta(minutes=1)
_NAMES = r"[a-z]{3}(?:-[a-z]{3})?"
_WINDOW = re.compile(rf"(\d{{1,2}}):(\d\d)-(\d{{1,2}}):(\d\d)(?:\s+({_NAMES}(?:,{_NAMES})*))?")
_FORM = "must be like '20:00-08:00 mon-fri' or '09:00-12:00 mon,wed; 00:00-24:00 sat-sun'"


@dataclass(frozen=True)
class LendingHours:
    """Weekly windows."""

    text: str
    """The windows as the owner wrote them."""
    windows: tuple[tuple[int, int], ...]
    """Begin and end of each window in minutes since Monday 00:00, sorted, without overlaps. An end is at most one week
    after its begin, and may be in the next week."""

    @classmethod
    def parse(cls, text: str) -> "LendingHours":
        """Returns the windows in `text`: windows separated by `;`, each `HH:MM-HH:MM` and days.

        Days are names, ranges of names, or both with commas; without days, a window is on each day. A window whose end
        is not after its begin ends on the next day; its days are those on which it begins.

        Raises:
            ValueError: the text has another form.
        """
        minutes: set[int] = set()
        for part in text.lower().split(";"):
            found = _WINDOW.fullmatch(part.strip())
            if found is None:
                raise ValueError(f"hours: {text!r}: {_FORM}")
            begin = _minute(found[1], found[2], text)
            end = _minute(found[3], found[4], text)
            length = end - begin if end > begin else end - begin + _DAY
            for day in _days(found[5] or "mon-sun", text):
                minutes.update((day * _DAY + begin + passed) % _WEEK for passed in range(length))
        return cls(text, _merged(minutes))

    def is_open(self, at: datetime) -> bool:
        """Returns whether the machine is lent at a local time."""
        return self._window(at) is not None

    def closes_at(self, at: datetime) -> datetime | None:
        """Returns when the window that contains `at` ends; None: none contains it, or the windows cover the week."""
        window = self._window(at)
        return None if window is None or self._always else _later(at, window[1])

    def opens_at(self, at: datetime) -> datetime | None:
        """Returns when the next window begins; None: one contains `at`."""
        if self._window(at) is not None:
            return None
        return min(_later(at, begin) for begin, _ in self.windows)

    @property
    def _always(self) -> bool:
        return self.windows == ((0, _WEEK),)

    def _window(self, at: datetime) -> tuple[int, int] | None:
        minute = _of_week(at)
        for begin, end in self.windows:
            if begin <= minute < end or begin <= minute + _WEEK < end:
                return begin, end
        return None


def _minute(hour: str, minute: str, text: str) -> int:
    found = int(hour) * 60 + int(minute)
    if int(minute) > 59 or found > _DAY:
        raise ValueError(f"hours: {text!r}: {hour}:{minute} is not a time from 00:00 to 24:00")
    return found


def _days(names: str, text: str) -> set[int]:
    found: set[int] = set()
    for part in names.split(","):
        first, _, last = part.partition("-")
        for name in filter(None, (first, last)):
            if name not in _DAYS:
                raise ValueError(f"hours: {text!r}: {name!r} is not a day; days are {', '.join(_DAYS)}")
        begin = _DAYS.index(first)
        count = (_DAYS.index(last or first) - begin) % 7 + 1
        found.update((begin + passed) % 7 for passed in range(count))
    return found


def _merged(minutes: set[int]) -> tuple[tuple[int, int], ...]:
    if len(minutes) == _WEEK:
        return ((0, _WEEK),)
    windows = []
    for begin in sorted(minute for minute in minutes if (minute - 1) % _WEEK not in minutes):
        end = begin
        while end % _WEEK in minutes:
            end += 1
        windows.append((begin, end))
    return tuple(windows)


def _of_week(at: datetime) -> int:
    at = _shown(at)
    return at.weekday() * _DAY + at.hour * 60 + at.minute


def _later(at: datetime, minute: int) -> datetime:
    """Returns the first full minute after `at` that is `minute` of a week, on the local clock."""
    passed = (minute - _of_week(at)) % _WEEK or _WEEK
    local = _shown(at).replace(second=0, microsecond=0) + passed * _MINUTE
    return local if at.tzinfo is None else _first(local)


def _shown(at: datetime) -> datetime:
    """Returns the latest time that the local clock has shown until `at`, without a zone, as `at` if that has none."""
    if at.tzinfo is None:
        return at
    at = at.astimezone()
    first = at.replace(tzinfo=None, fold=0).astimezone()
    if first >= at:
        return at.replace(tzinfo=None)
    # The clock repeats an hour.
    while (later := (first + _MINUTE).astimezone()).utcoffset() == first.utcoffset():
        first = later
    return first.replace(tzinfo=None)


def _first(local: datetime) -> datetime:
    """Returns the first instant at which the local clock shows a time without a zone, or a later one."""
    # `astimezone` of a skipped time applies the wrong offset, so instants are computed from timestamps.
    found = datetime.fromtimestamp(local.timestamp(), UTC).astimezone()
    if found.replace(tzinfo=None) == local:
        return found
    # The clock skips this time. With `fold`, it is computed with the offset after the skip, so it is before the skip.
    before = datetime.fromtimestamp(local.replace(fold=1).timestamp(), UTC).astimezone()
    while (later := (before + _MINUTE).astimezone()).utcoffset() == before.utcoffset():
        before = later
    return later
