"""Formats times and sizes for people."""

import re
from datetime import UTC, datetime

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Control characters except tab and line end, and characters that change the direction of writing."""
_UNITS = ((86400 * 365, "y"), (86400, "d"), (3600, "h"), (60, "m"), (1, "s"))


def visible(text: str) -> str:
    """Return `text` with control characters replaced by visible text: `^[` for an escape, `<9b>` for C1 and others."""
    return _CONTROL.sub(lambda found: _shown(ord(found[0])), text)


def _shown(code: int) -> str:
    return f"^{chr(code ^ 0x40)}" if code < 0x80 else f"<{code:02x}>"


def instant(text: str) -> datetime:
    """Parse an ISO 8601 time. Without a time zone it is UTC."""
    at = datetime.fromisoformat(text)
    return at if at.tzinfo else at.replace(tzinfo=UTC)


def duration(seconds: float) -> str:
    """Format a duration in at most two units: `3m`, `1h 20m`, `2d 4h`. Below an hour it has one unit."""
    left = max(0, int(seconds))
    parts: list[str] = []
    for size, unit in _UNITS:
        if left >= size or (unit == "s" and not parts):
            parts.append(f"{left // size}{unit}")
            left %= size
        elif parts:
            break
    return " ".join(parts[:2] if parts[0][-1] in "ydh" else parts[:1])


def between(start: str | None, end: str | None) -> str | None:
    """Format the time from `start` to `end`, or to now if `end` is None. Returns None if `start` is None."""
    if start is None:
        return None
    until = datetime.now(UTC) if end is None else instant(end)
    return duration((until - instant(start)).total_seconds())


def size(bytes_: float | None) -> str | None:
    """Format a size as `512 B` or `1.5 MiB`."""
    if bytes_ is None:
        return None
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if bytes_ < 1024 or unit == "PiB":
            return f"{bytes_:.0f} {unit}" if unit == "B" or bytes_ >= 100 else f"{bytes_:.1f} {unit}"
        bytes_ /= 1024
    return None
