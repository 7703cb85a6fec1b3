"""Parses and formats sizes and durations in the notation that users write."""

import re
from itertools import pairwise

_DURATION = re.compile(r"(?:[0-9]+(?:\.[0-9]+)?(?:ms|s|m|h|d))+")
_DURATION_PART = re.compile(r"([0-9.]+)(ms|s|m|h|d)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(i?)(B?)")
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_LONGEST = 50
_WHOLE_SECONDS = ((86400, "d"), (3600, "h"), (60, "m"), (1, "s"))


def parse_duration_s(text: str) -> float:
    """Returns the seconds of a duration such as `90s`, `10m`, `1h30m` or `2d`.

    Raises:
        ValueError: `text` is not a duration.
    """
    if len(text) > _LONGEST or not _DURATION.fullmatch(text):
        raise ValueError("must be a duration such as 30s, 10m, 2h or 1d")
    return sum(float(number) * _SECONDS[unit] for number, unit in _DURATION_PART.findall(text))


def parse_size_bytes(text: str) -> int:
    """Returns the bytes of a size such as `512MiB`, `1.5Gi` (powers of 1024), `16GB` (powers of 1000) or `4096`.

    Raises:
        ValueError: `text` is not a size.
    """
    match = _SIZE.fullmatch(text.strip()) if len(text) <= _LONGEST else None
    if match is None or (match[3] and not match[2]):
        raise ValueError("must be a size such as 512MiB or 16GB, or a whole number of bytes")
    base: int = 1024 if match[3] else 1000
    return round(float(match[1]) * float(base ** _POWERS[match[2]]))


def format_duration(seconds: float) -> str:
    """Formats a non-negative duration in its two largest units, rounded to the second: `45s`, `12m 30s`, `2d 3h`."""
    left = round(seconds)
    for (size, unit), (smaller, smaller_unit) in pairwise(_WHOLE_SECONDS):
        if left >= size:
            rest = left % size // smaller
            return f"{left // size:,}{unit}" + (f" {rest}{smaller_unit}" if rest else "")
    return f"{left}s"
