"""Figures as the report shows them."""

from collections.abc import Mapping
from typing import Any

from domain.units import format_duration

Outcome = Mapping[str, Any]
"""The JSON object of one run (`simulation.run.Run.to_json`)."""
NONE = "–"


def name_of(outcome: Outcome) -> str:
    """What a run is called: its policy, and what was changed."""
    change = outcome["run"]["change"]
    return f"{outcome['policy']} ({change})" if change else str(outcome["policy"])


def percent(rate: float | None) -> str:
    """A rate in percent."""
    return NONE if rate is None else f"{100 * rate:.2f} %"


def span(seconds: float | None) -> str:
    """A length of time: `45s`, `12m 30s`, `2d 3h`."""
    return NONE if seconds is None else format_duration(seconds)


def number(value: float | None) -> str:
    """A count, or an amount with one digit after the point."""
    if value is None:
        return NONE
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"


def listed(names: list[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
