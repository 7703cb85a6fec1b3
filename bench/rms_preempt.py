"""rms-preempt: bids in a region where nothing is free and 5,000 workloads run (MAST 4.3; 5.5 ms there, section 5.4).

Like rms-bid, with `bench.regions.full_region`. The workloads have level 2, and bids choose victims among the running
workloads, which all have worse ranks. Nothing is evicted: every bid sees the same region.
"""

from collections.abc import Iterator

from bench import regions
from bench.harness import Bench, Figure, Line, Suite, interleave, medians
from bench.rms_bid import WORKLOADS, bids, placed_share
from rms.bid import bid_in
from rms.gang import Planner
from rms.region import RegionColumns


def run(bench: Bench) -> Iterator[Figure]:
    """Runs the suite, and yields its figure."""
    bench.say(f"generating a region of {regions.MACHINES:,} machines")
    snapshot = regions.full_region()
    planner = Planner(RegionColumns.of(snapshot))
    table = regions.table_to_sum()
    requests = regions.requests(WORKLOADS, 2)
    share = placed_share(planner, requests)
    plans = [plan for request in requests if (plan := bid_in(planner, request).plan)]
    victims = sum(len(plan.victims) for plan in plans) / len(plans)
    found = medians(interleave(bench, {"bids": lambda: bids(planner, requests, table)}))
    absolute = {"bid_us": found["placed_s"] * 1e6, "sum_us": found["sum_s"] * 1e6}
    sizes = {
        "machines": regions.MACHINES, "running": len(snapshot.running), "workloads": WORKLOADS, "placed": share,
        "victims_a_plan": victims,
    }  # fmt: skip
    yield Figure(SUITE.name, SUITE.lines[0], found["placed_s"] / found["sum_s"], absolute, bench.rounds, sizes)


SUITE = Suite("rms-preempt", (Line("bids with victims", 15),), run)
