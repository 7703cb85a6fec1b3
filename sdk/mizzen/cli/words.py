"""Times, sizes and other values as people read them."""

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([KMGTP]?)(i?)B?")
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Control characters but tab and line end, and those that change the direction of writing."""
_UNITS = ((86400 * 365, "y"), (86400, "d"), (3600, "h"), (60, "m"), (1, "s"))


def visible(text: str) -> str:
    """`text` without what could command a terminal: `^[` for an escape, `<9b>` for other such characters."""
    return _CONTROL.sub(lambda found: _shown(ord(found[0])), text)


def _shown(code: int) -> str:
    return f"^{chr(code ^ 0x40)}" if code < 0x80 else f"<{code:02x}>"


def instant(text: str) -> datetime:
    """The time that an ISO text with a zone says; without one it is UTC."""
    at = datetime.fromisoformat(text)
    return at if at.tzinfo else at.replace(tzinfo=UTC)


def duration(seconds: float) -> str:
    """At most two units: `3m`, `1h 20m`, `2d 4h`; below an hour one."""
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
    """How long from `start` to `end`, or until now; None before the start."""
    if start is None:
        return None
    until = datetime.now(UTC) if end is None else instant(end)
    return duration((until - instant(start)).total_seconds())


def ago(text: str | None) -> str | None:
    """`3m ago`."""
    return None if text is None else f"{between(text, None)} ago"


def until(text: str) -> str:
    """How long it is from now to `text`: `3d 2h`."""
    return duration((instant(text) - datetime.now(UTC)).total_seconds())


def is_ahead(text: str) -> bool:
    """Whether it is still to come."""
    return instant(text) > datetime.now(UTC)


def clock(text: str) -> str:
    """Local date and time to the second."""
    return instant(text).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def hours(amount: float) -> str:
    """`1,234.5`; less than an hour in four digits."""
    return f"{amount:,.1f}" if amount >= 1 else f"{amount:.4f}"


def usd(amount: float | None) -> str | None:
    """`$12.30`; less than a cent in four digits."""
    if amount is None:
        return None
    return f"${amount:,.2f}" if amount >= 0.01 or not amount else f"${amount:.4f}"


def size(bytes_: float | None) -> str | None:
    """`512 B`, `1.5 MiB`."""
    if bytes_ is None:
        return None
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if bytes_ < 1024 or unit == "PiB":
            return f"{bytes_:.0f} {unit}" if unit == "B" or bytes_ >= 100 else f"{bytes_:.1f} {unit}"
        bytes_ /= 1024
    return None


def bytes_of(text: str) -> int:
    """Bytes of `512MiB` (powers of 1024), `5PB` (of 1000) or `4096`.

    Raises:
        ValueError: it is no size.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None or (found[3] and not found[2]):
        raise ValueError(f"{text!r} is not a size such as 512MiB, 5PB or a number of bytes")
    power = " KMGTP".index(found[2]) if found[2] else 0
    return round(float(found[1]) * float((1024 if found[3] else 1000) ** power))


def pairs(mapping: Mapping[str, Any] | None) -> str:
    """`a=1,b=2`."""
    return ",".join(f"{key}={value}" for key, value in sorted((mapping or {}).items()))


def reason(body: Mapping[str, Any] | None) -> str | None:
    """`code: sentence`."""
    return None if body is None else f"{body['code']}: {body.get('sentence') or body.get('detail')}"


def resources(body: Mapping[str, Any]) -> str:
    """One task's resources: `a100|h100:8, 4 cpus, 2.0 GiB`."""
    parts = []
    if body.get("gpus"):
        parts.append(f"{'|'.join(body.get('gpu_types') or ['gpu'])}:{body['gpus']}")
    if body.get("cpus") is not None:
        parts.append(plural(body["cpus"], "cpu"))
    if body.get("memory_bytes") is not None:
        parts.append(str(size(body["memory_bytes"])))
    return ", ".join(parts)


def plural(number: float, noun: str) -> str:
    """`1 task`, `2 tasks`, `0.5 cpus`."""
    return f"{number:g} {noun}" if number == 1 else f"{number:g} {noun}s"
