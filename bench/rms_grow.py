"""rms-grow: the growth of scheduling time with the size of a region (MAST 4.3.1: with the square of its hardware).

For k = 1, 2, 4, 8 and 16, a region of k times the size of that of rms-preempt gets k times 32 workloads. The region
bids on each workload and awards it before the next one; the columns are updated with the award and its victims
(`rms.award`). After every 32 awards the region applies its change log (`RegionColumns.refresh`), as in every batch of
a tick. All of this is timed, but not the construction of the region. The figure is the least-squares slope of log time
over log k: 1 is a time in proportion to the hardware, 2 is MAST's.
"""

from collections.abc import Iterator
from functools import partial

from bench import regions
from bench.harness import Bench, Figure, InvalidBenchmark, Line, Suite, exponent, interleave, medians, seconds
from rms.award import award
from rms.bid import bid_in
from rms.gang import Planner
from rms.region import RegionColumns

UNITS = (1, 2, 4, 8, 16)
BATCH = 32
"""Workloads per unit of k, and awards between two refreshes."""


def schedule(region: RegionColumns, workloads: int) -> float:
    """Schedules workloads one after the other, and returns the seconds.

    Raises:
        InvalidBenchmark: a workload was refused.
    """
    planner, requests = Planner(region), regions.requests(workloads, 2)
    refused: list[str] = []

    def work() -> None:
        for number, request in enumerate(requests, 1):
            plan = bid_in(planner, request).plan
            if plan is None:
                refused.append(request.workload)
            else:
                award(region, plan, request)
            if number % BATCH == 0:
                region.refresh(regions.NOW_S)

    took_s = seconds(work)
    if refused:
        raise InvalidBenchmark(
            f"{len(refused)} of {workloads} workloads were refused, first {refused[0]}; all must fit"
        )
    return took_s


def run(bench: Bench) -> Iterator[Figure]:
    """Runs the suite, and yields its figure."""
    schedule(RegionColumns.of(regions.full_region()), 8)  # Loads the compiled kernels.
    snapshots = {}
    for k in UNITS:
        bench.say(f"generating {k} times a region of {regions.MACHINES:,} machines")
        snapshots[k] = regions.full_region(units=k)

    def measured(k: int) -> float:
        region = RegionColumns.of(snapshots[k])
        bench.say(f"{k} times the region")
        return schedule(region, k * BATCH)

    found = medians(interleave(bench, {f"{k}_s": partial(measured, k) for k in UNITS}, warm_ups=0))
    sizes = {"machines": regions.MACHINES, "running": regions.CLUSTERS * regions.RUNNING, "workloads": BATCH}
    yield Figure(SUITE.name, SUITE.lines[0], exponent(UNITS, found.values()), found, bench.rounds, sizes)


SUITE = Suite("rms-grow", (Line("exponent of time over size", 1.5),), run)
