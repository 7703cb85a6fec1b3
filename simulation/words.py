"""Formats figures for the report."""

from collections.abc import Mapping
from typing import Any

from domain.units import format_duration

PolicyRow = Mapping[str, Any]
"""The JSON object of one run (`simulation.run.Run.to_json`)."""
NONE = "–"


def name_of(outcome: PolicyRow) -> str:
    """Returns the name of a run: its policy, with the change in parentheses if there is one."""
    change = outcome["run"]["change"]
    return f"{outcome['policy']} ({change})" if change else str(outcome["policy"])


def percent(rate: float | None) -> str:
    """Formats a rate as a percentage."""
    return NONE if rate is None else f"{100 * rate:.2f} %"


def span(seconds: float | None) -> str:
    """Formats a duration, such as `45s`, `12m 30s` or `2d 3h`."""
    return NONE if seconds is None else format_duration(seconds)


def number(value: float | None) -> str:
    """Formats an integer, or an amount with one digit after the decimal point."""
    if value is None:
        return NONE
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"


def listed(names: list[str]) -> str:
    """Joins names to a list: `a`, `a and b`, `a, b and c`."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
