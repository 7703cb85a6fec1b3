"""Writes the files of a cell from a trace: window, load, levels and quotas. Any checkout can replay the files."""

import csv
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from domain.priority import LOWEST_LEVEL
from research.experiments.cases import (
    BY_TENANT,
    HIGH_AT_MOST,
    HIGH_LEVELS,
    HOUR_S,
    NODES,
    SOURCES,
    ExperimentCase,
    Sizes,
)
from research.experiments.fleets import fleet_body, openb_regions, philly_regions
from research.traces.draws import pick
from research.traces.fleet import QuotaRule, SimulatedFleet, quotas_by_rule
from research.traces.lublin import lublin_rows
from research.traces.rows import TraceRow
from research.traces.settings import TraceSettings
from research.traces.trace_readers import COLUMNS, read_trace
from research.traces.workloads import scaled
from simulation.hardware import supply
from simulation.random_draws import chance

EXAMPLE = Path(__file__).parents[2] / "examples" / "philly" / "fleet.yaml"
OPENB_LEVELS = {"guaranteed": 1, "ls": 2, "burstable": 4, "be": 7}
"""Level by openb's quality of service: guaranteed, latency sensitive, burstable, best effort."""
LOW_LEVELS = (4, 7, 3, 6, 5)
"""Levels of the tenants that do not have level 1 or 2, assigned in turn."""
APART_S = 24 * HOUR_S
"""Smallest distance between the starts of windows of different seeds."""
_TRIES = 16
_NEAR = 0.004
"""Tolerance of the load, as a fraction of the fleet's GPU hours."""
_MOST_COPIES = 500.0
_SYNTHETIC_DAYS = 21.0
_MAST_LEVELS = {
    **TraceSettings().priority_percent,
    LOWEST_LEVEL: 100.0 - sum(TraceSettings().priority_percent.values()),
}


@dataclass(frozen=True)
class MeasuredWindow:
    """The measured span, on the trace's clock."""

    from_s: float
    to_s: float


@dataclass(frozen=True)
class RowLevels:
    """The priority level of each row: that of its tenant, or a random one. Copies of a row have the row's level."""

    seed: int
    by_tenant: Mapping[str, int] | None = None
    _drawn: dict[str, int] = field(default_factory=dict, compare=False, repr=False)

    def of(self, row: TraceRow) -> int:
        """Returns the level of a row, from 1 to 7."""
        if self.by_tenant is not None:
            return self.by_tenant[row.tenant]
        original = row.workload_id.partition("~")[0]
        if original not in self._drawn:
            self._drawn[original] = pick(chance(self.seed, "level", original), _MAST_LEVELS)
        return self._drawn[original]


def build(case: ExperimentCase, data: Path, out: Path, sizes: Sizes) -> None:
    """Writes `fleet.yaml`, `trace.csv` and `case.json` into the case's folder.

    Raises:
        TraceError, OSError: the trace cannot be read.
    """
    trace = SOURCES[case.trace]
    whole = _rows(case.trace, case.seed, data)
    if case.trace == "openb":
        regions = openb_regions(data / NODES, sizes.machines, sizes.regions)
    else:
        regions = philly_regions(EXAMPLE, sizes.philly_machines)
    # Data is in every region.
    settings: dict[str, Any] = {"candidate_regions_percent": {}, "tick_spacing_s": sizes.tick_spacing_s}
    machines = SimulatedFleet.model_validate(fleet_body(regions, {}, settings)).states()
    gpus = sum(supply(machines).values())
    most = max(max(supply({region: states}).values()) for region, states in machines.items())
    rows = [row for row in whole if row.gpus <= most]
    window = windows(rows, trace.gang_gpus, case.seed + 1, sizes)[case.seed]
    rows = near(rows, window, sizes)
    levels = _levels(case, rows, window)
    loaded = at_load(rows, levels, window, case, gpus)
    from_s, end_s = window.from_s - sizes.warm_up_s, window.to_s + sizes.after_s
    seen = [row for row in loaded if row.submit_s < end_s and row.submit_s + row.duration_s > from_s]
    weights = _held_gpu_s(whole, -inf, inf)
    quotas = {t: dict(s.quota_gpus) for t, s in quotas_by_rule(QuotaRule(), weights, supply(machines)).items()}
    folder = case.folder(out)
    folder.mkdir(parents=True, exist_ok=True)
    body = fleet_body(regions, quotas, settings)
    (folder / "fleet.yaml").write_text(yaml.safe_dump(body, sort_keys=False))
    _write_rows(folder / "trace.csv", seen, levels)
    first_s = min(row.submit_s for row in seen)
    arriving = [row for row in seen if window.from_s <= row.submit_s < window.to_s]
    facts = {
        "name": case.name,
        "seed": case.seed,
        "from_s": max(0.0, from_s - first_s),  # Before the first row, nothing happens.
        "measure_from_s": window.from_s - first_s,
        "measure_to_s": window.to_s - first_s,
        "until_s": end_s - first_s,
        "gpus": gpus,
        "machines": sum(map(len, machines.values())),
        "window_begins_h": (window.from_s - min(row.submit_s for row in whole)) / HOUR_S,
        "offered": offered(loaded, levels, window, gpus),
        "arriving": len(arriving),
        "arriving_gangs": sum(row.gpus >= trace.gang_gpus for row in arriving),
        "arriving_gang_gpus": sum(row.gpus for row in arriving if row.gpus >= trace.gang_gpus),
        "levels": levels.by_tenant,
        "quotas": quotas,
    }
    (folder / "case.json").write_text(json.dumps(facts, indent=1))


@lru_cache(maxsize=2)
def _rows(trace: str, seed: int, data: Path) -> tuple[TraceRow, ...]:
    """Returns the rows of a trace with work; the synthetic one is generated by the seed."""
    if not SOURCES[trace].file:
        return tuple(lublin_rows(_SYNTHETIC_DAYS, seed))
    return _file_rows(trace, data)


@lru_cache(maxsize=2)
def _file_rows(trace: str, data: Path) -> tuple[TraceRow, ...]:
    return tuple(row for row in read_trace(f"{trace}:{data / SOURCES[trace].file}").rows if row.duration_s > 0)


def near(rows: Iterable[TraceRow], window: MeasuredWindow, sizes: Sizes) -> list[TraceRow]:
    """Returns the rows that, or copies of which, may run in the simulated span.

    A copy beyond the first or last row is moved to the other side of its original, hence twice the days.
    """
    apart_s = 2 * TraceSettings().copy_days * 24 * HOUR_S
    from_s, to_s = window.from_s - sizes.warm_up_s - apart_s, window.to_s + sizes.after_s + apart_s
    return [row for row in rows if row.submit_s < to_s and row.submit_s + row.duration_s > from_s]


def windows(rows: Sequence[TraceRow], gang_gpus: int, count: int, sizes: Sizes) -> list[MeasuredWindow]:
    """Returns the `count` spans with the most submitted GPUs of gangs, largest first, at least `APART_S` apart.

    The warm-up before each span lies within the trace.
    """
    first_s, last_s = min(row.submit_s for row in rows), max(row.submit_s for row in rows)
    hours = int((last_s - first_s) // HOUR_S) + 1
    submitted = np.zeros(hours)
    for row in rows:
        if row.gpus >= gang_gpus:
            submitted[int((row.submit_s - first_s) // HOUR_S)] += row.gpus
    length = max(1, round(sizes.measured_s / HOUR_S))
    sums = np.convolve(submitted, np.ones(length), "valid")
    sums[: int(np.ceil(sizes.warm_up_s / HOUR_S))] = -1
    found = []
    for _ in range(count):
        begin = int(np.argmax(sums))
        found.append(MeasuredWindow(first_s + begin * HOUR_S, first_s + begin * HOUR_S + sizes.measured_s))
        near = int(APART_S / HOUR_S)
        sums[max(0, begin - near) : begin + near + 1] = -1
    return found


def offered(rows: Sequence[TraceRow], levels: RowLevels, window: MeasuredWindow, gpus: int) -> dict[str, float]:
    """Returns the load of the high levels and of all: GPU hours in a window, divided by those of the fleet.

    The GPU hours are those that workloads would hold if each started at its submission.
    """
    high = [row for row in rows if levels.of(row) in HIGH_LEVELS]
    return {"high": _load(high, window, gpus), "all": _load(rows, window, gpus)}


def _load(rows: Iterable[TraceRow], window: MeasuredWindow, gpus: int) -> float:
    return sum(_held_gpu_s(rows, window.from_s, window.to_s).values()) / (gpus * (window.to_s - window.from_s))


def at_load(
    rows: Sequence[TraceRow], levels: RowLevels, window: MeasuredWindow, case: ExperimentCase, gpus: int
) -> list[TraceRow]:
    """Returns the trace, copied so many times that it offers the case's load in the window.

    The high levels keep their share of the load, but offer at most `HIGH_AT_MOST` of the fleet; the other levels offer
    the rest.
    """
    natural = offered(rows, levels, window, gpus)
    share = natural["high"] / natural["all"]
    high = min(share * case.load, HIGH_AT_MOST)
    out: list[TraceRow] = []
    for is_high, target in ((True, high), (False, case.load - high)):
        part = [row for row in rows if (levels.of(row) in HIGH_LEVELS) == is_high]
        out += _copies(part, window, case.seed, gpus, target)
    out.sort(key=lambda row: (row.submit_s, row.workload_id))
    return out


def _copies(rows: Sequence[TraceRow], window: MeasuredWindow, seed: int, gpus: int, target: float) -> list[TraceRow]:
    """Returns the trace scaled by bisection to offer the target load in the window; the closest of all tries.

    The load grows with the number of copies, but not in proportion: copies are shifted in time, so they add less to a
    window that was chosen for its many submissions.
    """
    settings = TraceSettings()
    found: tuple[float, list[TraceRow]] | None = None
    low, high = 0.0, inf
    times = target / max(1e-9, _load(rows, window, gpus))
    for _ in range(_TRIES):
        copies = scaled(rows, {0: times}, seed, settings.copy_days, settings.copy_jitter_s)
        is_ = _load(copies, window, gpus)
        if found is None or abs(is_ - target) < found[0]:
            found = abs(is_ - target), copies
        if abs(is_ - target) < _NEAR:
            break
        low, high = (times, high) if is_ < target else (low, times)
        times = 2 * low if high == inf else (low + high) / 2
        if times > _MOST_COPIES:
            break
    assert found is not None
    return found[1]


def _levels(case: ExperimentCase, rows: Sequence[TraceRow], window: MeasuredWindow) -> RowLevels:
    """Returns the levels of a case: drawn for each workload, or (variant `BY_TENANT`) one for each tenant.

    A tenant of openb has the level of its quality of service. Other tenants are put in a random order. In this
    order they get levels 1 and 2 in turn, as long as these levels offer at most `HIGH_AT_MOST` of the fleet at this
    load and at most half of the tenants have them. The others get the `LOW_LEVELS` in turn.
    """
    if case.variant != BY_TENANT:
        return RowLevels(case.seed)
    tenants = sorted({row.tenant for row in rows})
    if case.trace == "openb":
        return RowLevels(case.seed, {tenant: OPENB_LEVELS.get(tenant, LOWEST_LEVEL) for tenant in tenants})
    held = _held_gpu_s(rows, window.from_s, window.to_s)
    total, high = sum(held.values()), 0.0
    out: dict[str, int] = {}
    highs = lows = 0
    for tenant in sorted(tenants, key=lambda t: chance(case.seed, "level", t)):
        part = case.load * held.get(tenant, 0.0) / total
        if high + part <= HIGH_AT_MOST and highs < len(tenants) // 2:
            out[tenant] = HIGH_LEVELS[highs % 2]
            high, highs = high + part, highs + 1
        else:
            out[tenant] = LOW_LEVELS[lows % len(LOW_LEVELS)]
            lows += 1
    return RowLevels(case.seed, out)


def _held_gpu_s(rows: Iterable[TraceRow], from_s: float, to_s: float) -> dict[str, float]:
    held: dict[str, float] = defaultdict(float)
    for row in rows:
        span_s = min(to_s, row.submit_s + row.duration_s) - max(from_s, row.submit_s)
        if span_s > 0:
            held[row.tenant] += row.gpus * span_s
    return held


def _write_rows(path: Path, rows: Iterable[TraceRow], levels: RowLevels) -> None:
    """Writes the rows in the simulator's own format."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for row in rows:
            cpus = "" if row.cpus_milli_per_task is None else row.cpus_milli_per_task / 1000
            memory = "" if row.memory_bytes_per_task is None else row.memory_bytes_per_task
            types = "" if row.gpu_types is None else "|".join(row.gpu_types) or "-"
            writer.writerow(
                (
                    row.workload_id, row.submit_s, row.tenant, levels.of(row), row.duration_s, row.tasks,
                    row.gpus_per_task, types, cpus, memory, "", row.user, row.max_runtime_s, row.recurring,
                )
            )  # fmt: skip
