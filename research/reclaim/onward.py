"""The mean time of a migration from a destination to the other candidates: T_mig_mean(d) of equation 11.

Summed pair by pair, the means of n nodes take n^2 steps. A path's bottleneck is the lesser of an outward part, which
depends on the source and on how far the target is (same building, same site, other site), and an inward part of the
target. So the sum over the targets of a building, of a site or of all sites follows from the targets sorted by inward
bandwidth: a target below the source's outward bandwidth counts with its own bandwidth, any other with the source's.
Sorting depends only on the topology. For each set of candidates prefix sums are enough, which take linear time.
"""

from dataclasses import dataclass

import numpy as np

from reclaim.arrays import Bools, Floats, Ints
from research.reclaim.topology import NOWHERE, Topology


@dataclass(frozen=True)
class _Sums:
    """Sums of seconds per byte over the candidates of a group, for one outward bandwidth of each source."""

    order: Ints
    """The nodes, by group, and within a group by inward bandwidth."""
    inward_s_byte: Floats
    """The inverse of the inward bandwidth of each node, in this order."""
    outward_s_byte: Floats
    """The inverse of the outward bandwidth of each source."""
    first: Ints
    """Where the group of each source begins in the order."""
    middle: Ints
    """Where the nodes of the group begin whose inward bandwidth exceeds the outward bandwidth of the source."""
    last: Ints
    """Where the group ends."""

    @classmethod
    def of(cls, group: Ints, groups: int, inward_bytes_s: Floats, asked: Ints, outward_bytes_s: Floats) -> "_Sums":
        """Returns the sums of nodes in groups for sources that each ask for one group; NOWHERE asks for none."""
        # Ranks make the pair (group, bandwidth) one integer, which can be sorted and searched.
        ascending = np.sort(inward_bytes_s)
        step = len(group) + 1
        keys = group * step + np.searchsorted(ascending, inward_bytes_s, side="right")
        order = np.argsort(keys, kind="stable")
        found = keys[order]
        first = np.searchsorted(found, asked * step, side="left")
        last = np.searchsorted(found, (asked + 1) * step, side="left")
        limit = asked * step + np.searchsorted(ascending, outward_bytes_s, side="right")
        middle = np.searchsorted(found, limit, side="right")
        none = (asked == NOWHERE) | (asked >= groups)
        first, middle, last = (np.where(none, 0, place) for place in (first, middle, last))
        return cls(order, 1 / inward_bytes_s[order], 1 / outward_bytes_s, first, middle, last)

    def over(self, candidates: Bools) -> tuple[Floats, Ints]:
        """Returns the sum of seconds per byte and the number of the candidates, for each source."""
        chosen = candidates[self.order]
        seconds = np.concatenate([[0.0], np.cumsum(np.where(chosen, self.inward_s_byte, 0.0))])
        count = np.concatenate([[0], np.cumsum(chosen)])
        slow_s = seconds[self.middle] - seconds[self.first]
        fast_s = (count[self.last] - count[self.middle]) * self.outward_s_byte
        return slow_s + fast_s, count[self.last] - count[self.first]


@dataclass(frozen=True)
class Onward:
    """Mean seconds per byte from each node to the other candidates, for any set of candidates."""

    upload_s_byte: Floats
    """Seconds per byte from each node to its store; 0 for direct migrations."""
    self_s_byte: Floats
    """Seconds per byte of the path from the source back to the node itself, which is no candidate."""
    building: _Sums
    """The targets in the building of the source."""
    minus_building: _Sums
    """The same targets at the bandwidth with which the sum of the site contains them."""
    site: _Sums
    """The targets in the site of the source."""
    abroad: tuple[_Sums, _Sums] | None
    """All targets, and those of the site at the bandwidth with which the first sum contains them; None: one site."""

    @classmethod
    def of(cls, topology: Topology, stores: Ints | None = None) -> "Onward":
        """Returns the means for direct migrations, or for those by way of the store of each node."""
        nodes = np.arange(topology.nodes)
        sources = nodes if stores is None else stores
        near, middle, far = topology.inward(nodes)
        within = np.minimum(topology.access.up_bytes_s[sources], topology.switch_bytes_s(sources))
        leave_building, leave_site = topology.outward(sources)
        of_node, of_source = topology.building[nodes], topology.building[sources]
        site_of_node, site_of_source = topology.site[nodes], topology.site[sources]
        buildings, sites = len(topology.distribution), len(topology.core)
        abroad = None
        if sites > 1:
            abroad = (
                _Sums.of(np.zeros_like(nodes), 1, far, np.zeros_like(nodes), leave_site),
                _Sums.of(site_of_node, sites, far, site_of_source, leave_site),
            )
        return cls(
            upload_s_byte=np.zeros(len(nodes)) if stores is None else 1 / topology.bandwidth_bytes_s(nodes, stores),
            self_s_byte=1 / topology.bandwidth_bytes_s(sources, nodes),
            building=_Sums.of(of_node, buildings, near, of_source, within),
            minus_building=_Sums.of(of_node, buildings, middle, of_source, leave_building),
            site=_Sums.of(site_of_node, sites, middle, site_of_source, leave_building),
            abroad=abroad,
        )

    def mean_s_byte(self, candidates: Bools) -> Floats:
        """Returns the mean for each node over the candidates other than itself; 0 if there are none."""
        seconds, count = self.building.over(candidates)
        for whole, part in [(self.site, self.minus_building)] + ([self.abroad] if self.abroad else []):
            more_s, more = whole.over(candidates)
            less_s, less = part.over(candidates)
            # Where both contain the same nodes, the difference of the sums is only a rounding error.
            seconds = seconds + np.where(more > less, more_s - less_s, 0.0)
            count = count + (more - less)
        seconds = seconds - np.where(candidates, self.self_s_byte, 0.0)
        others = count - candidates
        return np.where(others > 0, self.upload_s_byte + seconds / np.maximum(others, 1), 0.0)
