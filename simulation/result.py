"""Builds the JSON object of a run's outcome from its metrics."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from domain.capacity import CapacityKind
from simulation.meter import (
    HOUR_S,
    UNTIL,
    Hour,
    Meter,
    allocation_rate,
    by_level,
    count,
    miss_rate,
    ratio,
    saturated_allocation_rate,
    table_keys,
    wait_percentiles,
)

PolicyRow = Mapping[str, Any]
"""The JSON object of one run (`simulation.run.Run.to_json`)."""
_LOSSES = ("work", "eviction", "restart")


def name_of(outcome: PolicyRow) -> str:
    """Returns the name of a run: its policy, with the change in parentheses if there is one."""
    change = outcome["run"]["change"]
    return f"{outcome['policy']} ({change})" if change else str(outcome["policy"])


def table(of: Callable[[str, str], Any]) -> dict[str, dict[str, Any]]:
    """Returns `{quota status: {priority: value}}`; `all` stands for every status or priority."""
    out: dict[str, dict[str, Any]] = {}
    for quota, level in table_keys():
        out.setdefault(quota, {})[level] = of(quota, level)
    return out


def figures(hour: Hour) -> dict[str, Any]:
    """Returns the main figures of an hour, or of the whole measured span, with the waits until the award."""
    return {
        "allocation_rate": allocation_rate(hour),
        "saturated_allocation_rate": saturated_allocation_rate(hour),
        **_of_waits(hour, "award"),
        "preemptions": hour.preemptions,
        "lost_gpu_hours": _gpu_h(sum(hour.lost_gpu_s.values())),
    }


def start_figures(hour: Hour) -> dict[str, Any]:
    """Returns the figures of the waits until the start."""
    return _of_waits(hour, "start")


def more(hour: Hour) -> dict[str, Any]:
    """Returns the detailed counts and amounts from which the main figures are computed."""
    arrived, non_colocated = by_level(hour.arrived), by_level(hour.non_colocated)
    return {
        "arrived": arrived,
        "non_colocated": non_colocated,
        "non_colocated_rate": {level: ratio(non_colocated[level], whole) for level, whole in arrived.items()},
        **{
            until_key(f"objectives_{name}", until): table(partial(count, getattr(hour.until[until], name)))
            for name in ("judged", "missed")
            for until in UNTIL
        },
        "held_gpu_hours": _gpu_h(hour.held_gpu_s),
        "available_gpu_hours": _gpu_h(hour.supply_gpu_s),
        "queued_gpu_hours": _gpu_h(hour.queued_gpu_s),
        "saturated_gpu_hours": _gpu_h(hour.saturated_supply_gpu_s),
        "interruptions": hour.interruptions,
        "moves": hour.moves,
        "growths": hour.growths,
        "usd": round(sum(hour.usd.values()), 6),
        "usd_by": {kind.value: round(hour.usd.get(kind.value, 0.0), 6) for kind in CapacityKind},
        "demand_over_supply": ratio(hour.held_gpu_s + hour.queued_gpu_s, hour.supply_gpu_s),
        "lost_gpu_hours_by": {what: _gpu_h(hour.lost_gpu_s.get(what, 0.0)) for what in _LOSSES},
    }


def by_column(objects: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Transposes objects with equal keys into one object of lists."""
    if not objects:
        return {}
    out: dict[str, Any] = {}
    for key, value in objects[0].items():
        column = [one[key] for one in objects]
        out[key] = by_column(column) if isinstance(value, Mapping) else column
    return out


def hourly(meter: Meter, starts_s: float) -> dict[str, Any]:
    """Returns lists with a value for each hour; the first hour begins at `starts_s`."""
    hours = [
        {"start_s": starts_s + k * HOUR_S, **figures(hour), **start_figures(hour), **more(hour)}
        for k, hour in enumerate(meter.hours)
    ]
    return by_column(hours)


def until_key(name: str, until: str) -> str:
    """Returns the key of a figure of waits: `waits` for those until the award, `waits_to_start` until the start."""
    return name if until == "award" else f"{name}_to_{until}"


def _of_waits(hour: Hour, until: str) -> dict[str, Any]:
    waits = hour.until[until]
    return {
        until_key("objective_miss_rate", until): table(partial(miss_rate, waits)),
        until_key("waits", until): table(partial(wait_percentiles, waits)),
    }


def _gpu_h(gpu_s: float) -> float:
    return round(gpu_s / 3600, 6)
