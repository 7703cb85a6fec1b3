"""reclaim: the coordinator's decision when owners take back seven machines at once (ReclaimNet, appendix B.A, E5).

A decision contains the preparation of the topology from newly measured bandwidth, the destinations of seven jobs (P2),
and the admission and rates of their uploads on every link (P3). Checkpoints go by way of a store in each building. The
nodes are in buildings of 13 or 14, as in the paper's campus, with its mix of GPUs, bandwidth that varies by 60 %, and
checkpoints from 120 MB to 48 GB. Half of the nodes are loaded; the notice is from one minute to an hour.

The baseline is a numpy pass over the same arrays: the sum of each array that describes nodes, links or survival. The
second line is the exponent of the time of a decision over the number of nodes, from 500 to 50,000; the number of
reclaims stays seven.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from bench.harness import Bench, Figure, InvalidBenchmark, Line, Suite, exponent, interleave, medians, timed
from reclaim.admission import AdmissionDecision, Flows, decide
from reclaim.arrays import Floats, Ints
from reclaim.traffic import migration_share, wire_bytes
from research.reclaim.algorithm_2 import Algorithm2Choices, Nodes, choose
from research.reclaim.destinations import Leaving, Network
from research.reclaim.paths import links_bytes_s, paths
from research.reclaim.topology import NOWHERE, Links, Store, Topology

NODES = (500, 2_000, 10_000, 50_000)
RECLAIMS = 7
PER_BUILDING = 13.5
LOCAL_BYTES_S, CORE_BYTES_S = 820e6 / 8, 240e6 / 8


@dataclass(frozen=True)
class Campus:
    """One instance: what was measured, and the jobs that have to leave."""

    building: Ints
    up_bytes_s: Floats
    down_bytes_s: Floats
    distribution_bytes_s: Floats
    nodes: Nodes
    leaving: Leaving
    survival: Floats

    @classmethod
    def of(cls, count: int, seed: int = 0) -> "Campus":
        """Returns a campus with `count` nodes, drawn from a seed."""
        rng = np.random.default_rng(seed)
        buildings = max(1, round(count / PER_BUILDING))

        def varied(mean: float, size: int) -> Floats:
            return mean * rng.uniform(0.4, 1.6, size)

        return cls(
            building=np.arange(count) % buildings,
            up_bytes_s=varied(LOCAL_BYTES_S, count),
            down_bytes_s=varied(LOCAL_BYTES_S, count),
            distribution_bytes_s=varied(CORE_BYTES_S, buildings),
            nodes=Nodes.of(
                count,
                memory_bytes=rng.choice([24e9, 24e9, 40e9, 48e9], count),
                capability=rng.choice([8.6, 8.9, 8.0], count),
                load=rng.choice([0.2, 0.95], count),
            ),
            leaving=Leaving.of(
                rng.choice(count, RECLAIMS, replace=False),
                checkpoint_bytes=np.exp(rng.uniform(np.log(120e6), np.log(48e9), RECLAIMS)),
                memory_bytes=20e9,
                capability=8.0,
                notice_s=rng.uniform(60, 3600, RECLAIMS),
                load=0.5,
            ),
            survival=rng.uniform(0.2, 1.0, (RECLAIMS, count)),
        )

    def decide(self) -> tuple[Algorithm2Choices, AdmissionDecision]:
        """Decides as the coordinator does."""
        count, buildings = len(self.building), len(self.distribution_bytes_s)
        topology = Topology.of(
            self.building,
            np.zeros(buildings, np.int64),
            access=Links.of(self.up_bytes_s, self.down_bytes_s),
            distribution=Links.of(self.distribution_bytes_s, self.distribution_bytes_s),
            core=Links.of([1.25e9], 1.25e9),
            stores=[Store(0, building) for building in range(buildings)],
        )
        network = Network.by_store(topology)
        choices = choose(network, self.nodes, self.leaving, self.survival)
        flows = Flows.of(
            wire_bytes(self.leaving.checkpoint_bytes),
            self.leaving.notice_s,
            paths(topology, self.leaving.source, count + self.building[self.leaving.source]),
            rest_s=self.leaving.commit_s,
        )
        return choices, decide(flows, migration_share(links_bytes_s(topology)), 0.0)

    def read(self) -> float:
        """Reads each array once: the sum of all sums."""
        arrays = (
            self.building, self.up_bytes_s, self.down_bytes_s, self.distribution_bytes_s, self.nodes.memory_bytes,
            self.nodes.capability, self.nodes.load, self.survival,
        )  # fmt: skip
        return float(sum(np.sum(array) for array in arrays))


def run(bench: Bench) -> Iterator[Figure]:
    """Runs the suite, and yields its figures."""
    campuses = {count: Campus.of(count) for count in NODES}
    for count, campus in campuses.items():
        chosen = campus.decide()[0].destination
        if (chosen == NOWHERE).all():
            raise InvalidBenchmark(f"no job of the campus with {count:,} nodes has a destination; some must have one")
    first = campuses[NODES[0]]
    times = {f"{count}_nodes_s": timed(campus.decide, max(1, 5_000 // count)) for count, campus in campuses.items()}
    found = medians(interleave(bench, {**times, "pass_s": timed(first.read, 200)}))
    pass_s = found.pop("pass_s")
    decision_s = found[f"{NODES[0]}_nodes_s"]
    sizes = {"nodes": NODES[0], "reclaims": RECLAIMS}
    absolute = {"decision_ms": decision_s * 1e3, "pass_us": pass_s * 1e6}
    yield Figure(SUITE.name, SUITE.lines[0], decision_s / pass_s, absolute, bench.rounds, sizes)
    growth = exponent(NODES, found.values())
    yield Figure(SUITE.name, SUITE.lines[1], growth, found, bench.rounds, {"reclaims": RECLAIMS})


SUITE = Suite(
    "reclaim",
    (Line("7 reclaims among 500 nodes over a numpy pass", None), Line("exponent of time over nodes", 1)),
    run,
)
