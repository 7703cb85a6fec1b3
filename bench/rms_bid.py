"""rms-bid: bids in a region of MAST's size where 2% of the GPUs are free (MAST 4.3; 1.3 ms there, section 5.4).

The baseline is `numpy.sum` of a (66,500 x 4) int32 array, which reads four numbers of each machine once. Region and
workloads are from `bench.regions`. A bid is a plan with its list of machines, or the reasons why there is none. Bids
are independent: there is no negative cache, and nothing is awarded. A round bids on every workload once, with a sum
after each bid. Successful and refused bids are separate lines, each with the median time.

The third line has no bar: the GPUs of its workloads fit, but their tasks without GPUs do not fit in one cluster,
although the free cores of all machines would suffice.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median

import numpy as np

from bench import regions
from bench.harness import Bench, Figure, InvalidBenchmark, Line, Suite, collector_off, interleave, medians
from domain.scheduling import PlacementRequest
from rms.bid import bid_in
from rms.gang import Planner
from rms.region import RegionColumns

WORKLOADS = 60
AT_LEAST_PLACED = 0.6


def bids(planner: Planner, requests: Sequence[PlacementRequest], table: np.ndarray) -> Mapping[str, float]:
    """Bids on each request, with a sum after each; returns the median seconds of placed and refused bids and of sums.

    The planner caches its choice of victims until the region changes. The region does not change here, so the cache is
    cleared before each bid.
    """
    took: dict[str, list[float]] = {"sum_s": []}
    with collector_off():
        for request in requests:
            planner.forget()
            start_s = time.perf_counter()
            answer = bid_in(planner, request)
            middle_s = time.perf_counter()
            np.sum(table)
            end_s = time.perf_counter()
            took.setdefault("placed_s" if answer.plan else "refused_s", []).append(middle_s - start_s)
            took["sum_s"].append(end_s - middle_s)
    return {name: median(values) for name, values in took.items()}


def placed_share(planner: Planner, requests: Sequence[PlacementRequest]) -> float:
    """Returns the share of requests that get a plan.

    Raises:
        InvalidBenchmark: the share is below `AT_LEAST_PLACED`.
    """
    share = sum(bid_in(planner, request).plan is not None for request in requests) / len(requests)
    if share < AT_LEAST_PLACED:
        raise InvalidBenchmark(f"{share:.0%} of the bids succeed, must be at least {AT_LEAST_PLACED:.0%}")
    return share


def with_too_many_readers(requests: Sequence[PlacementRequest]) -> list[PlacementRequest]:
    """Returns requests for 16 GPUs with more tasks without GPUs than any cluster has idle machines for."""
    gpus, _ = regions.SIZES[0]
    small = [r for r in requests if r.jobs[0].gpus == gpus]
    return [replace(r, jobs=(r.jobs[0], replace(r.jobs[1], tasks=550))) for r in small]


def run(bench: Bench) -> Iterator[Figure]:
    """Runs the suite, and yields its three figures."""
    bench.say(f"generating a region of {regions.MACHINES:,} machines")
    planner = Planner(RegionColumns.of(regions.free_region()))
    table = regions.table_to_sum()
    requests = regions.requests(WORKLOADS, 3)
    sizes = {"machines": regions.MACHINES, "workloads": WORKLOADS, "placed": placed_share(planner, requests)}
    lacking = with_too_many_readers(requests)
    if any(bid_in(planner, request).plan for request in lacking):
        raise InvalidBenchmark("the requests with too many readers fit in a cluster, must be refused")

    def second() -> Mapping[str, float]:
        found = bids(planner, lacking, table)
        return {"lacking_s": found["refused_s"], "lacking_sum_s": found["sum_s"]}

    found = medians(interleave(bench, {"first": lambda: bids(planner, requests, table), "second": second}))
    names = ("placed_s", "sum_s"), ("refused_s", "sum_s"), ("lacking_s", "lacking_sum_s")
    for line, (ours, theirs) in zip(SUITE.lines, names, strict=True):
        absolute = {"bid_us": found[ours] * 1e6, "sum_us": found[theirs] * 1e6}
        yield Figure(SUITE.name, line, found[ours] / found[theirs], absolute, bench.rounds, sizes)


SUITE = Suite(
    "rms-bid",
    (Line("bids that succeed", 5), Line("bids that are refused", 1), Line("refused by a lack of CPUs", None)),
    run,
)
