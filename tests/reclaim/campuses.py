"""Random campuses and random jobs that leave, for the tests of P2 and P3."""

import numpy as np

from research.reclaim.algorithm_2 import Nodes
from research.reclaim.destinations import Leaving
from research.reclaim.topology import NOWHERE, Links, Store, Topology

BYTES_S = np.array([1e6, 3e7, 1.025e8, 1.25e8, 1.25e9])
"""Few values, so that many paths have equal bottlenecks."""


def topology(rng: np.random.Generator, nodes: int = 0, *, distinct: bool = False) -> Topology:
    """Returns a campus of one to three sites. Every site has a store at its core, some buildings have their own."""
    nodes = nodes or int(rng.integers(1, 25))
    sites = int(rng.integers(1, 4))
    site = np.concatenate([np.arange(sites), rng.integers(0, sites, int(rng.integers(0, 5)))])

    def links(count: int) -> Links:
        draw = (lambda: rng.uniform(1e6, 1.25e9, count)) if distinct else (lambda: rng.choice(BYTES_S, count))
        return Links.of(draw(), draw(), draw())

    stores = [Store(s, NOWHERE, float(rng.choice(BYTES_S)), float(rng.choice(BYTES_S))) for s in range(sites)]
    stores += [Store(int(site[b]), b, float(rng.choice(BYTES_S))) for b in range(len(site)) if rng.random() < 0.4]
    return Topology.of(
        rng.integers(0, len(site), nodes),
        site,
        access=links(nodes),
        distribution=links(len(site)),
        core=links(sites),
        stores=stores,
    )


def nodes(rng: np.random.Generator, count: int) -> Nodes:
    return Nodes.of(
        count,
        memory_bytes=rng.choice([8e9, 24e9, 48e9, 80e9], count),
        capability=rng.choice([7.5, 8.0, 8.6, 8.9], count),
        load=np.where(rng.random(count) < 0.1, np.inf, rng.choice([0.0, 0.3, 0.8, 0.9], count)),
    )


def leaving(rng: np.random.Generator, count: int, jobs: int) -> Leaving:
    size = rng.choice([1.2e8, 3.2e9, 4.8e10], jobs)
    return Leaving.of(
        rng.integers(0, count, jobs),
        checkpoint_bytes=size,
        upload_bytes=size * rng.choice([0.0, 0.1, 1.0], jobs),
        memory_bytes=rng.choice([4e9, 20e9, 40e9], jobs),
        capability=rng.choice([7.0, 8.0, 8.6], jobs),
        load=rng.choice([0.0, 0.25, 1.0], jobs),
        notice_s=rng.choice([10.0, 60.0, 300.0, 3600.0, np.inf], jobs),
        restart_s=rng.choice([0.0, 5.0, 30.0], jobs),
        commit_s=rng.choice([0.0, 2.0], jobs),
    )
