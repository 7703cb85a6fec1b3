"""The network between machines as a tree of measured links, and the bottleneck of any path (section VI.A).

A site (campus) has buildings, a building has nodes. Each node has an access link, each building a switch of its own and
a distribution link to the core of its site, each site a core and a link to other sites. A store (an object store for
checkpoints) is an endpoint like a node, in a building or at the core of its site. Because the network is a tree, a path
has at most eight links, so its bottleneck is a few lookups, however many nodes there are.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from reclaim.arrays import Floats, Ints, check_numbers

LEAST_BYTES_S = 1.0
"""The bandwidth of a link that is measured as less, or as nothing. It keeps every time finite; no deadline is met over
such a link."""
NOWHERE = -1
"""No building, no store, no destination."""


@dataclass(frozen=True)
class Links:
    """The links of one level of the tree (access, distribution, core), in bytes per second."""

    up_bytes_s: Floats
    """Towards the core."""
    down_bytes_s: Floats
    """From the core."""
    inside_bytes_s: Floats
    """Between members of the group: a building's switch, a site's core. For nodes it is not used."""

    @classmethod
    def of(
        cls, up_bytes_s: npt.ArrayLike, down_bytes_s: npt.ArrayLike, inside_bytes_s: npt.ArrayLike = np.inf
    ) -> "Links":
        """Returns links; a scalar applies to all. Bandwidths below `LEAST_BYTES_S` are raised to it.

        Raises:
            ValueError: a bandwidth is not a number.
        """
        arrays = np.broadcast_arrays(*(np.asarray(a, np.float64) for a in (up_bytes_s, down_bytes_s, inside_bytes_s)))
        for name, array in zip(("up_bytes_s", "down_bytes_s", "inside_bytes_s"), arrays, strict=True):
            if np.isnan(array).any():
                wrong = int(np.flatnonzero(np.isnan(array))[0])
                raise ValueError(f"{name}[{wrong}]: nan: must be a number")
        up, down, inside = (np.maximum(np.atleast_1d(array), LEAST_BYTES_S) for array in arrays)
        return cls(up, down, inside)

    def __len__(self) -> int:
        return len(self.up_bytes_s)


@dataclass(frozen=True)
class Store:
    """The place of a store for checkpoints in the network."""

    site: int
    building: int = NOWHERE
    """The building; NOWHERE: the store is at the core of its site."""
    read_bytes_s: float = np.inf
    write_bytes_s: float = np.inf


@dataclass(frozen=True)
class Topology:
    """Sites, buildings and endpoints. Endpoints are numbered: first the nodes, then the stores."""

    nodes: int
    building: Ints
    """The building of each endpoint; NOWHERE for a store at the core."""
    site: Ints
    """The site of each endpoint."""
    access: Links
    distribution: Links
    core: Links

    @classmethod
    def of(
        cls,
        node_building: npt.ArrayLike,
        building_site: npt.ArrayLike,
        *,
        access: Links,
        distribution: Links,
        core: Links,
        stores: Sequence[Store] = (),
    ) -> "Topology":
        """Returns the topology of nodes given by their building, and buildings given by their site.

        Raises:
            ValueError: a node, a building or a store is in a place that does not exist, or a level has a wrong number
                of links.
        """
        building, site = np.asarray(node_building, np.int64), np.asarray(building_site, np.int64)
        levels = ("access", access, len(building)), ("distribution", distribution, len(site))
        for name, links, count in levels:
            if len(links) != count:
                raise ValueError(f"{name}: {len(links)} links: must be {count}, one for each member of the level")
        check_numbers("node_building", building, len(site))
        check_numbers("building_site", site, len(core))
        check_numbers(
            "building of stores", np.array([s.building for s in stores if s.building != NOWHERE], np.int64), len(site)
        )
        check_numbers("site of stores", np.array([s.site for s in stores], np.int64), len(core))
        for number, store in enumerate(stores):
            if store.building != NOWHERE and site[store.building] != store.site:
                raise ValueError(
                    f"stores[{number}].site: {store.site}: must be {site[store.building]}, the site of its building"
                )
        ends = Links.of(
            np.concatenate([access.up_bytes_s, [s.read_bytes_s for s in stores]]),
            np.concatenate([access.down_bytes_s, [s.write_bytes_s for s in stores]]),
        )
        return cls(
            nodes=len(building),
            building=np.concatenate([building, np.array([s.building for s in stores], np.int64)]),
            site=np.concatenate([site[building], np.array([s.site for s in stores], np.int64)]),
            access=ends,
            distribution=distribution,
            core=core,
        )

    def store_of(self, nodes: npt.ArrayLike) -> Ints:
        """Returns the endpoint of the store of each node: that of its building, else of its site, else NOWHERE.

        Of several stores in one place the first is used.
        """
        asked = np.asarray(nodes, np.int64)
        of_building = np.full(len(self.distribution), NOWHERE)
        of_site = np.full(len(self.core), NOWHERE)
        for store in range(len(self.building) - 1, self.nodes - 1, -1):
            if self.building[store] == NOWHERE:
                of_site[self.site[store]] = store
            else:
                of_building[self.building[store]] = store
        local = of_building[self.building[asked]]
        return np.where(local == NOWHERE, of_site[self.site[asked]], local)

    def bandwidth_bytes_s(self, sources: npt.ArrayLike, targets: npt.ArrayLike) -> Floats:
        """Returns bw_bot, the least bandwidth of a link of each path from a source endpoint to a target endpoint.

        The arrays are broadcast, so one source and an array of targets is a row. A path from an endpoint to itself goes
        over the switch of its building; callers exclude it.
        """
        s, t = np.asarray(sources, np.int64), np.asarray(targets, np.int64)
        leave_building, leave_site = self.outward(s)
        same_building = (self.building[s] == self.building[t]) & (self.building[s] != NOWHERE)
        same_site = self.site[s] == self.site[t]
        near, middle, far = self.inward(t)
        within = np.minimum(self.access.up_bytes_s[s], self.switch_bytes_s(s))
        beyond = np.where(same_site, np.minimum(leave_building, middle), np.minimum(leave_site, far))
        return np.where(same_building, np.minimum(within, near), beyond)

    def switch_bytes_s(self, endpoints: Ints) -> Floats:
        """Returns the bandwidth of the switch of each endpoint's building; of a store at the core, infinity."""
        return _of_building(self.distribution.inside_bytes_s, self.building[endpoints])

    def outward(self, endpoints: Ints) -> tuple[Floats, Floats]:
        """Returns the bottlenecks from each endpoint to another building of its site, and to another site."""
        buildings, sites = self.building[endpoints], self.site[endpoints]
        up = np.minimum(self.access.up_bytes_s[endpoints], _of_building(self.distribution.up_bytes_s, buildings))
        core = np.minimum(up, self.core.inside_bytes_s[sites])
        return core, np.minimum(core, self.core.up_bytes_s[sites])

    def inward(self, endpoints: Ints) -> tuple[Floats, Floats, Floats]:
        """Returns the bottlenecks to each endpoint from its building, from the core of its site, from another site."""
        buildings, sites = self.building[endpoints], self.site[endpoints]
        near = self.access.down_bytes_s[endpoints]
        middle = np.minimum(near, _of_building(self.distribution.down_bytes_s, buildings))
        far = np.minimum(np.minimum(middle, self.core.inside_bytes_s[sites]), self.core.down_bytes_s[sites])
        return near, middle, far

    def migration_s(
        self,
        sources: npt.ArrayLike,
        targets: npt.ArrayLike,
        checkpoint_bytes: npt.ArrayLike,
        restart_s: npt.ArrayLike,
    ) -> Floats:
        """Returns C/bw_bot + T_r for each pair (equation 10)."""
        transfer_s = np.asarray(checkpoint_bytes, np.float64) / self.bandwidth_bytes_s(sources, targets)
        return np.asarray(transfer_s + np.asarray(restart_s, np.float64))


def _of_building(bandwidth_bytes_s: Floats, buildings: Ints) -> Floats:
    """Returns the bandwidth of each building, infinity for NOWHERE."""
    if not len(bandwidth_bytes_s):
        return np.full(buildings.shape, np.inf)
    return np.where(buildings == NOWHERE, np.inf, bandwidth_bytes_s[buildings])
