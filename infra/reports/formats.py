"""Formats figures for people."""

from collections.abc import Sequence

from domain.units import format_duration

NONE = "-"
"""Placeholder for a missing figure."""


def percent(rate: float | None, places: int = 2) -> str:
    """Formats a rate as a percentage."""
    return NONE if rate is None else f"{100 * rate:.{places}f} %"


def span(seconds: float | None) -> str:
    """Formats a duration, such as `45s`, `12m 30s` or `2d 3h`."""
    return NONE if seconds is None else format_duration(seconds)


def number(value: float | None, places: int = 1) -> str:
    """Formats an integer, or a number with `places` decimal places; None and NaN are shown as missing."""
    if value is None or value != value:
        return NONE
    return f"{value:,}" if isinstance(value, int) else f"{value:,.{places}f}"


def listed(names: Sequence[str]) -> str:
    """Joins names to a list: `a`, `a and b`, `a, b and c`."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
