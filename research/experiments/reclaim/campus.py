"""A synthetic campus with known hazards and bandwidth, with the counts and rates of ReclaimNet's section IV."""

from dataclasses import dataclass

import numpy as np

from reclaim.arrays import Floats, Ints

DAY_S = 86400.0
EMERGENCIES_PER_DAY = 847 * 0.42 / 60
"""847 departures in two months, 42% of them emergencies."""
NODES = 54
PEAKS_H = ((11.5, 13.0), (17.5, 20.0))
"""The hours of the two daily peaks (F1)."""
LOCAL_BYTES_S, CORE_BYTES_S = 820e6 / 8, 240e6 / 8
"""The mean bandwidth within a building and over the core (F3)."""


@dataclass(frozen=True)
class Site:
    """Nodes with known hazards, which are lent at all times."""

    levels_per_h: Floats
    """The mean hazard of each node over a day."""
    buildings: list[str]
    peak: float = 6.0
    """The hazard in the peaks divided by that at other times."""

    @property
    def nodes(self) -> list[str]:
        """The names of the nodes."""
        return [f"node-{i}" for i in range(len(self.levels_per_h))]

    def factor(self, at_s: Floats) -> Floats:
        """Returns the hazard at each time divided by its mean over a day."""
        hour = np.asarray(at_s) % DAY_S / 3600
        high = np.zeros(hour.shape, dtype=bool)
        for start, end in PEAKS_H:
            high |= (hour >= start) & (hour < end)
        share = sum(end - start for start, end in PEAKS_H) / 24
        return np.where(high, self.peak, 1.0) / (1 + share * (self.peak - 1))

    def departures(
        self, draw: np.random.Generator, from_s: float, to_s: float, shift: float = 1.0
    ) -> tuple[Ints, Floats]:
        """Draws the node and the time of each departure, by thinning, with hazards multiplied by `shift`."""
        most = float(self.factor(np.array(PEAKS_H[0][0] * 3600)))
        counts = draw.poisson(shift * self.levels_per_h * most * (to_s - from_s) / 3600)
        node = np.repeat(np.arange(len(counts)), counts)
        at_s = draw.uniform(from_s, to_s, len(node))
        kept = draw.random(len(node)) < self.factor(at_s) / most
        order = np.argsort(at_s[kept])
        return node[kept][order], at_s[kept][order]


def campus(
    draw: np.random.Generator, nodes: int = NODES, per_day: float = EMERGENCIES_PER_DAY, spread: float = 0.5
) -> Site:
    """Returns a site in four buildings. The logarithms of the nodes' levels have the standard deviation `spread`."""
    levels = draw.lognormal(0, spread, nodes)
    levels *= per_day / 24 / levels.sum()
    return Site(levels, [f"building-{i * 4 // nodes}" for i in range(nodes)])


def bandwidth(draw: np.random.Generator, links: int, seconds: int, mean_bytes_s: float) -> Floats:
    """Draws the available bandwidth of each link in each second.

    The logarithm is a stationary process with a correlation time of five minutes and the standard deviation 0.35, so
    most values within ten minutes are within 60% of their mean (F3), plus noise of 0.3 from second to second.
    """
    kept = np.exp(-1 / 300)
    steps = draw.normal(0, 0.35 * np.sqrt(1 - kept**2), (links, seconds))
    steps[:, 0] = draw.normal(0, 0.35, links)
    slow = np.empty_like(steps)
    slow[:, 0] = steps[:, 0]
    for second in range(1, seconds):
        slow[:, second] = kept * slow[:, second - 1] + steps[:, second]
    noise = draw.normal(0, 0.3, steps.shape)
    return np.asarray(mean_bytes_s * np.exp(slow + noise - (0.35**2 + 0.3**2) / 2))


def payloads(draw: np.random.Generator, jobs: int) -> Floats:
    """Draws checkpoint sizes in bytes: 120 MB to 48 GB with a median of 3.2 GB (F2)."""
    return np.clip(draw.lognormal(np.log(3.2e9), 1.3, jobs), 120e6, 48e9)
