"""The links of a topology, numbered, and those of each path."""

import numpy as np
import numpy.typing as npt

from reclaim.arrays import Floats, Ints
from research.reclaim.topology import NOWHERE, Topology


def links_bytes_s(topology: Topology) -> Floats:
    """Returns the bandwidth of every link, in the numbering of `paths`."""
    parts = [topology.access.up_bytes_s, topology.access.down_bytes_s]
    for links in (topology.distribution, topology.core):
        parts += [links.up_bytes_s, links.down_bytes_s, links.inside_bytes_s]
    return np.concatenate(parts)


def paths(topology: Topology, sources: npt.ArrayLike, targets: npt.ArrayLike) -> Ints:
    """Returns the links of each path from a source to a target, one row for each pair, padded with -1."""
    s, t = np.broadcast_arrays(np.asarray(sources, np.int64), np.asarray(targets, np.int64))
    s, t = np.atleast_1d(s), np.atleast_1d(t)
    ends, buildings, sites = len(topology.access), len(topology.distribution), len(topology.core)
    first_building, first_site = 2 * ends, 2 * ends + 3 * buildings
    bs, bt, cs, ct = topology.building[s], topology.building[t], topology.site[s], topology.site[t]
    local = (bs == bt) & (bs != NOWHERE)
    abroad = cs != ct
    columns = [
        s,
        np.where(local, first_building + 2 * buildings + bs, NOWHERE),
        np.where(~local & (bs != NOWHERE), first_building + bs, NOWHERE),
        np.where(~local, first_site + 2 * sites + cs, NOWHERE),
        np.where(abroad, first_site + cs, NOWHERE),
        np.where(abroad, first_site + sites + ct, NOWHERE),
        np.where(abroad, first_site + 2 * sites + ct, NOWHERE),
        np.where(~local & (bt != NOWHERE), first_building + buildings + bt, NOWHERE),
        ends + t,
    ]
    return np.stack(columns, axis=1)
