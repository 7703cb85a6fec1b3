"""P2 for live jobs: scores each building as a destination for a job that has left a machine (equation 11, algorithm 2).

The scheduler chooses the machines, so a building is scored as a whole. Each region is a site, and each of its clusters
a building with two equal machines, so that the mean time of the next migration includes one within the building. A
checkpoint goes by way of the store of the source. A store that several buildings share is at the core of the site,
like the region's bucket. Links between sites are faster than those of machines, so they limit nothing.
"""

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

_BYTES_S = 125_000.0
"""One Mbit/s in bytes per second."""
_LEAST_BYTES_S = 1.0
"""The bandwidth of a write that was measured as slower."""
MACHINE_MBIT = 820.0
"""Bandwidth of a machine, if it was not measured: that within a building of the paper."""
BUILDING_MBIT = 240.0
"""Bandwidth of a building's link to the others, if it is not configured: that between buildings of the paper."""
RESTART_S = 30.0
"""T_r if nothing was measured: the start of a container and of a training."""
NEAR_S = 8 * 3600.0
"""For this time the expected departures follow the time of day; later they are a mean..."""
AHEAD_S = 96 * 3600.0
"""...over this time. What differs between owners lasts for days."""


@dataclass(frozen=True)
class Rules:
    """The parameters of algorithm 2 (docs/reclaim-traffic.md has their sensitivity)."""

    alpha: float = 1.0
    """The weight of the expected next migration, dimensionless."""
    max_load: float = 0.8
    """Theta: a node with a higher load is not a candidate."""
    min_local: int = 2
    """k_min: with at least as many candidates in the building of the source, all others are left out."""

    def __post_init__(self) -> None:
        if not self.alpha >= 0:
            raise ValueError(f"alpha: {self.alpha}: must be 0 or more")
        if not 0 <= self.max_load <= 1:
            raise ValueError(f"max_load: {self.max_load}: must be from 0 to 1")
        if self.min_local < 1:
            raise ValueError(f"min_local: {self.min_local}: must be 1 or more")


DEFAULT_RULES = Rules()


class Rate(NamedTuple):
    """How often the owner of a machine is expected to take it back, per hour."""

    near: float = 0.0
    """Departures without notice in the next `NEAR_S`..."""
    later: float = 0.0
    """...and after that."""
    noticed_near: float = 0.0
    """The same with notice."""
    noticed_later: float = 0.0

    def expected(self, ahead_s: float) -> tuple[float, float]:
        """Returns the departures that are expected in the next `ahead_s` seconds: without notice, and with."""
        near_h = min(ahead_s, NEAR_S) / 3600
        later_h = ahead_s / 3600 - near_h
        return self.near * near_h + self.later * later_h, self.noticed_near * near_h + self.noticed_later * later_h


NO_DEPARTURES = Rate()


@dataclass(frozen=True)
class Building:
    """A cluster, as P2 sees it."""

    site: str
    """The region."""
    name: str
    store: str | None = None
    """URL of its own store; None: it uses that of the site."""
    link_mbit: float | None = None
    """Bandwidth of its link to the other buildings, in Mbit/s; None: `BUILDING_MBIT`."""
    rate: Rate = NO_DEPARTURES
    """Sum of the departure rates of the machines that the job would get there: each departure ends its gang."""


@dataclass(frozen=True)
class DepartedJob:
    """A job that has left a machine, with its newest checkpoint."""

    site: str
    building: str
    checkpoint_bytes: float
    """C."""
    write_s: float | None
    """How long writing the checkpoint to the store took; None: it was not measured."""
    remaining_s: float
    """T_rem, the expected remaining runtime."""
    local_candidates: int
    """Number of machines in the building that have room for a task of the job."""


@dataclass(frozen=True)
class BuildingScore:
    """The score of a building as the destination of a job."""

    away: bool
    """Whether other buildings than the job's are left out, and this is one of them (algorithm 2, line 6)."""
    score_s: float
    """T_mig(d) + alpha (1 - S_d(T_rem)) T_mig_mean(d), in seconds."""


@lru_cache(maxsize=4096)
def score(buildings: tuple[Building, ...], job: DepartedJob, rules: Rules = DEFAULT_RULES) -> tuple[BuildingScore, ...]:
    """Returns the scores of all buildings, in their order. The building of the job must be one of them.

    T_mig_mean is the mean over two machines of each building, without that of the job. Results are cached, because a
    job that waits is scored again in each pass.

    Raises:
        ValueError: the building of the job is not listed.
    """
    home = next((n for n, b in enumerate(buildings) if (b.site, b.name) == (job.site, job.building)), None)
    if home is None:
        raise ValueError(f"building: {job.site}/{job.building}: must be one of the {len(buildings)} buildings")
    sharing = Counter(building.store for building in buildings)
    own = np.array([building.store is not None and sharing[building.store] == 1 for building in buildings])
    link = np.array([BUILDING_MBIT if b.link_mbit is None else b.link_mbit for b in buildings]) * _BYTES_S
    machine = MACHINE_MBIT * _BYTES_S
    write = max(job.checkpoint_bytes / job.write_s, _LEAST_BYTES_S) if job.write_s else machine
    # The bandwidth from a machine to the store of its building, and from that store to a machine of each building.
    upload = np.where(own, machine, np.minimum(machine, link))
    download = np.minimum(machine, np.minimum(np.where(own, link, np.inf)[:, None], link))
    np.fill_diagonal(download, np.where(own, machine, np.minimum(machine, link)))
    size = job.checkpoint_bytes
    first_s = size / (write if own[home] else min(write, link[home]))
    migration_s = first_s + size / download[home] + RESTART_S
    to_others = (2 * (1 / download).sum(axis=1) - 1 / download.diagonal()) / (2 * len(buildings) - 1)
    next_s = size * (1 / upload + to_others) + RESTART_S
    departs = np.array([sum(building.rate.expected(job.remaining_s)) for building in buildings])
    scores_s = migration_s + rules.alpha * (1 - np.exp(-departs)) * next_s
    stays = job.local_candidates >= rules.min_local
    return tuple(BuildingScore(stays and number != home, float(one_s)) for number, one_s in enumerate(scores_s))
