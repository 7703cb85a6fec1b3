"""P2 for live jobs: how good each building is for a job that has left a machine there (equation 11, algorithm 2).

The scheduler chooses the machines, so a building is scored as a whole. The network is that of `reclaim.topology`: each
region is a site, and each of its clusters a building with two equal nodes, so that the mean time of the next migration
includes one within the building. A checkpoint goes by way of the store of the source. A store that several buildings
share is at the core of the site, like the region's bucket.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from reclaim.arrays import Bools, Floats
from reclaim.destinations import DEFAULT_RULES, RESTART_S, Leaving, Network, Rules, scores_s
from reclaim.topology import Links, Store, Topology

_BYTES_S = 125_000.0
"""One Mbit/s in bytes per second."""
MACHINE_MBIT = 820.0
"""Bandwidth of a machine, if it was not measured: that within a building of the paper."""
BUILDING_MBIT = 240.0
"""Bandwidth of a building's link to the others, if it is not configured: that between buildings of the paper."""
SITE_MBIT = 4000.0
"""Bandwidth of a site's link to other sites."""


NEAR_S = 8 * 3600.0
"""For this time the expected departures follow the time of day; later they are a mean..."""
AHEAD_S = 96 * 3600.0
"""...over this time. What differs between owners lasts for days."""


class Rate(NamedTuple):
    """How often the owner of a machine is expected to take it back, per hour."""

    near: float = 0.0
    """Without notice, in the next `NEAR_S`..."""
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
    """How often the owners of the machines come that the job would get there, together: any of them ends its gang."""


@dataclass(frozen=True)
class Departure:
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
class Score:
    """How good a building is for a job."""

    away: bool
    """Whether other buildings than the job's are left out, and this is one of them (algorithm 2, line 6)."""
    score_s: float
    """T_mig(d) + alpha (1 - S_d(T_rem)) T_mig_mean(d), in seconds."""


@lru_cache(maxsize=4096)
def score(buildings: tuple[Building, ...], job: Departure, rules: Rules = DEFAULT_RULES) -> tuple[Score, ...]:
    """Returns the scores of all buildings, in their order. The building of the job must be one of them.

    Results are cached, because a job that waits is scored again in each pass.

    Raises:
        ValueError: the building of the job is not listed.
    """
    migrations = Migrations.of(buildings, job)
    departures = np.repeat([sum(b.rate.expected(job.remaining_s)) for b in buildings], 2)
    survival = np.concatenate([[0.0], np.exp(-departures)])
    found_s = scores_s(
        migrations.network, migrations.leaving, 0, migrations.candidates, migrations.migration_s, survival, rules
    )[1::2]
    stays = job.local_candidates >= rules.min_local
    return tuple(Score(stays and number != migrations.home, float(one_s)) for number, one_s in enumerate(found_s))


@dataclass(frozen=True)
class Migrations:
    """The network around a job: node 0 is its machine, and the nodes 2 n + 1 and 2 n + 2 are in building n."""

    home: int
    """The number of the job's building."""
    network: Network
    leaving: Leaving
    """The job, alone."""
    migration_s: Floats
    """T_mig to each node."""

    @classmethod
    def of(cls, buildings: Sequence[Building], job: Departure) -> "Migrations":
        """Returns the network of a job.

        Raises:
            ValueError: the building of the job is not listed.
        """
        home = next((n for n, b in enumerate(buildings) if (b.site, b.name) == (job.site, job.building)), None)
        if home is None:
            raise ValueError(f"building: {job.site}/{job.building}: must be one of the {len(buildings)} buildings")
        network = Network.by_store(_topology(buildings, home, job))
        leaving = Leaving.of([0], checkpoint_bytes=job.checkpoint_bytes, memory_bytes=0.0, restart_s=RESTART_S)
        return cls(home, network, leaving, network.times_s(leaving, 0)[0])

    @property
    def candidates(self) -> Bools:
        """All nodes but the job's machine."""
        return np.arange(self.network.topology.nodes) > 0


def _topology(buildings: Sequence[Building], home: int, job: Departure) -> Topology:
    sites = sorted({building.site for building in buildings})
    of = np.array([sites.index(building.site) for building in buildings])
    sharing = Counter(building.store for building in buildings)
    stores = [
        Store(int(of[n]), n) for n, building in enumerate(buildings) if building.store and sharing[building.store] == 1
    ]
    stores += [Store(number) for number in range(len(sites))]
    access = np.full(2 * len(buildings) + 1, MACHINE_MBIT * _BYTES_S)
    up = access.copy()
    if job.write_s:
        up[0] = job.checkpoint_bytes / job.write_s
    links = np.array([BUILDING_MBIT if b.link_mbit is None else b.link_mbit for b in buildings]) * _BYTES_S
    core = np.full(len(sites), SITE_MBIT * _BYTES_S)
    return Topology.of(
        np.concatenate([[home], np.repeat(np.arange(len(buildings)), 2)]),
        of,
        access=Links.of(up, access),
        distribution=Links.of(links, links),
        core=Links.of(core, core),
        stores=stores,
    )
