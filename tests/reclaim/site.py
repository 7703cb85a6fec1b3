"""A synthetic campus: nodes in four buildings, lent at all times, with known hazards (the counts of section IV)."""

from dataclasses import dataclass

import numpy as np

DAY_S = 86400.0
PEAKS_H = ((11.5, 13.0), (17.5, 20.0))


@dataclass(frozen=True)
class Site:
    """Hazards that are known, and departures drawn from them."""

    levels_per_h: np.ndarray
    """The mean hazard of each node over a day."""
    buildings: list[str]
    peak: float = 6.0

    @property
    def nodes(self) -> list[str]:
        return [f"node-{i}" for i in range(len(self.levels_per_h))]

    def factor(self, at_s: np.ndarray) -> np.ndarray:
        """The hazard at a time divided by its mean over a day."""
        hour = np.asarray(at_s) % DAY_S / 3600
        high = np.zeros(hour.shape, bool)
        for start, end in PEAKS_H:
            high |= (hour >= start) & (hour < end)
        mean = (4 * self.peak + 20) / 24
        return np.where(high, self.peak, 1.0) / mean

    def departures(
        self, draw: np.random.Generator, from_s: float, to_s: float, shift: float = 1.0
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draws the node and time of each departure, by thinning."""
        top = shift * self.levels_per_h * self.factor(np.array(12 * 3600.0))
        counts = draw.poisson(top * (to_s - from_s) / 3600)
        node = np.repeat(np.arange(len(counts)), counts)
        at_s = draw.uniform(from_s, to_s, len(node))
        kept = draw.random(len(node)) < self.factor(at_s) / self.factor(np.array(12 * 3600.0))
        order = np.argsort(at_s[kept])
        return node[kept][order], at_s[kept][order]


def campus(draw: np.random.Generator, nodes: int = 54, per_day: float = 356 / 60, spread: float = 0.5) -> Site:
    """A site with as many emergency departures a day as section IV counts; node levels vary by `spread`."""
    levels = draw.lognormal(0, spread, nodes)
    levels *= per_day / 24 / levels.sum()
    return Site(levels, [f"building-{i * 4 // nodes}" for i in range(nodes)])
