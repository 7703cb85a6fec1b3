"""Tests the estimator of hazards on real machines: the table of up and down intervals of the Failure Trace Archive.

Each end of an up interval counts as an emergency departure. The estimator sees the past of a site only, and its hazard
at the start of each half hour is compared with what follows: the log likelihood for each departure, minus that of the
constant hazard that fits the site best in hindsight. A positive value means that the estimate is better.
"""

import lzma
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from reclaim.arrays import Floats, Ints
from reclaim.hazard import HazardModel, HazardSettings
from research.experiments.reclaim.campus import DAY_S

STEP_S = 1800.0
MOST_NODES = 120


@dataclass(frozen=True)
class UpIntervals:
    """The intervals in which machines were up."""

    names: list[str]
    """The name of each machine: GRID/SITE/CLUSTER/NODE."""
    node: Ints
    """The number of the machine of each interval."""
    from_s: Floats
    to_s: Floats

    def of_site(self, site: str, from_s: float, to_s: float) -> "UpIntervals":
        """Returns the intervals of a site that touch a period, of its first 120 machines."""
        inside = (self.to_s > from_s) & (self.from_s < to_s)
        present = set(self.node[inside].tolist())
        numbers = [i for i, name in enumerate(self.names) if name.split("/")[1] == site and i in present][:MOST_NODES]
        place = np.full(len(self.names), -1)
        place[numbers] = np.arange(len(numbers))
        inside &= place[self.node] >= 0
        return UpIntervals(
            [self.names[i] for i in numbers], place[self.node[inside]], self.from_s[inside], self.to_s[inside]
        )


def read_up(path: Path) -> UpIntervals:
    """Reads `event_trace.tab.xz`: the up intervals (type 1) that are longer than 0 seconds.

    Raises:
        ValueError: a line has too few columns, or a column is no number.
    """
    found: list[tuple[str, float, float]] = []
    with lzma.open(path, "rt") as file:
        for line, text in enumerate(file, 1):
            columns = text.split("\t")
            if text.startswith("#"):
                continue
            try:
                kind, start_s, end_s = int(columns[5]), float(columns[6]), float(columns[7])
            except (IndexError, ValueError):
                raise ValueError(
                    f"{path}, line {line}: must have a type, a start and an end in columns 6 to 8"
                ) from None
            if kind == 1 and end_s > start_s:
                found.append((columns[4].strip(), start_s, end_s))
    names = sorted({name for name, _, _ in found})
    number = {name: i for i, name in enumerate(names)}
    return UpIntervals(
        names,
        np.array([number[name] for name, _, _ in found], dtype=np.int64),
        np.array([start_s for _, start_s, _ in found]),
        np.array([end_s for _, _, end_s in found]),
    )


class ForecastScore(NamedTuple):
    """How well the estimator predicted a site."""

    gain: float
    """The log likelihood for each departure, minus that of the best constant hazard."""
    departures: int
    ratio: float
    """The departures that the estimator expected, divided by those that happened."""
    dispersion: float


def score(up: UpIntervals, from_s: float, days: int, warm_days: int, settings: HazardSettings) -> ForecastScore | None:
    """Returns the score over a period of a site, without its first `warm_days`; None: there were no departures."""
    model = HazardModel(settings)
    size = len(up.names)
    state = model.start(up.names, [name.rpartition("/")[0] for name in up.names], from_s)
    likelihood = expected = lent_h = 0.0
    departures = 0
    for step in range(round(days * DAY_S / STEP_S)):
        now_s, then_s = from_s + step * STEP_S, from_s + (step + 1) * STEP_S
        near = (up.to_s > now_s) & (up.from_s <= then_s)
        node, start_s, end_s = up.node[near], up.from_s[near], up.to_s[near]
        gone = end_s <= then_s
        if step * STEP_S >= warm_days * DAY_S:
            hazard = model.hazards(state, now_s).mean_per_h
            hours = np.clip(np.minimum(end_s, then_s) - np.maximum(start_s, now_s), 0, None) / 3600
            likelihood += float(np.log(hazard[node[gone]]).sum())
            expected += float((hazard[node] * hours).sum())
            lent_h += float(hours.sum())
            departures += int(gone.sum())
        state = model.observe(state, then_s, node[gone], end_s[gone], node, start_s, end_s)
    if not departures or not size:
        return None
    constant = departures * np.log(departures / lent_h) - departures
    gain = (likelihood - expected - constant) / departures
    return ForecastScore(float(gain), departures, expected / departures, model.dispersion(state))


def scores(path: Path, least: int = 100) -> Iterator[list[str]]:
    """Returns the score of each site over two periods of six weeks with enough departures, the first two as warm-up."""
    up = read_up(path)
    first_s = float(up.from_s.min())
    for site in sorted({name.split("/")[1] for name in up.names}):
        for day in (100, 300):
            from_s = first_s + day * DAY_S
            found = score(up.of_site(site, from_s, from_s + 42 * DAY_S), from_s, 42, 14, HazardSettings())
            if found is not None and found.departures >= least:
                yield [site, f"{day}", f"{found.departures:,}", f"{found.dispersion:.0f}",
                       f"{found.gain:+.2f}", f"{found.ratio:.2f}"]  # fmt: skip
