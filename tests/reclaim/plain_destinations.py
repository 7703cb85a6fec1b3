"""A plain network and a direct transcription of algorithm 2, with which tests compare the vectorised code.

The network is a graph of directed links, searched for the widest path. Nothing of `reclaim` computes a bandwidth here.
"""

import heapq
import math
from collections import defaultdict

import numpy as np

from reclaim.buildings import Rules
from research.reclaim.algorithm_2 import Nodes
from research.reclaim.destinations import Leaving
from research.reclaim.topology import NOWHERE, Topology


def graph(topology: Topology) -> dict[str, dict[str, float]]:
    """Returns the bandwidth of each directed link, by its ends."""
    links: dict[str, dict[str, float]] = defaultdict(dict)
    for end, (building, site) in enumerate(zip(topology.building, topology.site, strict=True)):
        into, out = (
            (f"core{site}-in", f"core{site}-out") if building == NOWHERE else (f"b{building}-in", f"b{building}-out")
        )
        links[f"from{end}"][into] = topology.access.up_bytes_s[end]
        links[out][f"to{end}"] = topology.access.down_bytes_s[end]
    site_of = {b: s for b, s in zip(topology.building, topology.site, strict=True) if b != NOWHERE}
    for building, site in site_of.items():
        links[f"b{building}-in"][f"b{building}-out"] = topology.distribution.inside_bytes_s[building]
        links[f"b{building}-in"][f"core{site}-in"] = topology.distribution.up_bytes_s[building]
        links[f"core{site}-out"][f"b{building}-out"] = topology.distribution.down_bytes_s[building]
    for site in range(len(topology.core)):
        # The core is crossed on the way to another site, too.
        links[f"core{site}-in"][f"core{site}-mid"] = topology.core.inside_bytes_s[site]
        links[f"core{site}-mid"][f"core{site}-out"] = math.inf
        links[f"core{site}-mid"]["world"] = topology.core.up_bytes_s[site]
        links["world"][f"world{site}"] = topology.core.down_bytes_s[site]
        links[f"world{site}"][f"core{site}-out"] = topology.core.inside_bytes_s[site]
    return links


def widest(links: dict[str, dict[str, float]], source: int, target: int) -> float:
    """Returns the bottleneck of the path with the fewest links.

    The shortest path is the one that packets take; a wider detour over the core is not used.
    """
    queue, seen = [(0, f"from{source}", math.inf)], set()
    while queue:
        hops, at, width = heapq.heappop(queue)
        if at == f"to{target}":
            return width
        if at in seen:
            continue
        seen.add(at)
        for then, bandwidth in links[at].items():
            heapq.heappush(queue, (hops + 1, then, min(width, bandwidth)))
    raise AssertionError("no path")


class PlainNetwork:
    """Migration times, from the graph."""

    def __init__(self, topology: Topology, by_store: bool) -> None:
        self._topology, self._links, self._by_store = topology, graph(topology), by_store
        self._known: dict[tuple[int, int], float] = {}

    def bandwidth(self, source: int, target: int) -> float:
        if (source, target) not in self._known:
            self._known[source, target] = widest(self._links, source, target)
        return self._known[source, target]

    def store(self, node: int) -> int:
        places = range(self._topology.nodes, len(self._topology.building))
        near = [s for s in places if self._topology.building[s] == self._topology.building[node]]
        core = [
            s
            for s in places
            if self._topology.building[s] == NOWHERE and self._topology.site[s] == self._topology.site[node]
        ]
        return (near + core)[0]

    def migration_s(
        self, source: int, target: int, size: float, restart_s: float, upload: float | None = None
    ) -> float:
        if not self._by_store:
            return size / self.bandwidth(source, target) + restart_s
        store = self.store(source)
        upload = size if upload is None else upload
        return upload / self.bandwidth(source, store) + size / self.bandwidth(store, target) + restart_s

    def stay_s(self, source: int, target: int, size: float, restart_s: float, upload: float, commit_s: float) -> float:
        if not self._by_store:
            return self.migration_s(source, target, size, restart_s)
        return upload / self.bandwidth(source, self.store(source)) + commit_s


def scores(
    network: PlainNetwork,
    topology: Topology,
    nodes: Nodes,
    leaving: Leaving,
    job: int,
    survival: np.ndarray,
    rules: Rules,
) -> dict[int, float]:
    """Returns the score of each destination that algorithm 2 considers for one job; empty: FAIL."""
    source, size, restart_s = leaving.source[job], leaving.checkpoint_bytes[job], leaving.restart_s[job]
    upload = leaving.upload_bytes[job]
    candidates = [
        d
        for d in range(topology.nodes)
        if d != source
        and nodes.memory_bytes[d] >= leaving.memory_bytes[job]
        and nodes.capability[d] >= leaving.capability[job]
        and nodes.load[d] <= rules.max_load
        and network.stay_s(source, d, size, restart_s, upload, leaving.commit_s[job]) <= leaving.notice_s[job]
    ]
    local = [d for d in candidates if topology.building[d] == topology.building[source]]
    out = {}
    for d in local if len(local) >= rules.min_local else candidates:
        onward = [network.migration_s(d, other, size, restart_s) for other in candidates if other != d]
        mean_s = sum(onward) / len(onward) if onward else restart_s
        out[d] = network.migration_s(source, d, size, restart_s, upload) + rules.alpha * (1 - survival[job, d]) * mean_s
    return out
