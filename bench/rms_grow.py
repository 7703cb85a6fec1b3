"""rms-grow: how the time to schedule grows with a region (MAST 4.3.1: with the square of its hardware).

k times the region of rms-preempt gets k times 32 workloads, k = 1, 2, 4, 8 and 16: each is bid on and awarded before
the next one, what it takes and whom it evicts shows in the columns (`rms.award`), and after every 32 awards the region
follows its log (`Region.refresh`), as it does at every batch of a tick. Timed is all of that, not the making of the
region. The figure is the least-squares exponent of log time over log k: 1 is a time in proportion to the hardware, 2 is
MAST's.
"""

from collections.abc import Iterator
from functools import partial

from bench import regions
from bench.harness import Bench, Figure, Line, Suite, Unfit, exponent, interleave, medians, seconds
from rms.award import award
from rms.bid import bid_in
from rms.gang import Planner
from rms.region import Region

UNITS = (1, 2, 4, 8, 16)
BATCH = 32
"""Workloads a unit, and awards from one refresh to the next."""


def schedule(region: Region, workloads: int) -> float:
    """Seconds for so many workloads, one after the other.

    Raises:
        Unfit: one was refused.
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
        raise Unfit(f"{len(refused)} of {workloads} workloads were refused, the first is {refused[0]}")
    return took_s


def run(bench: Bench) -> Iterator[Figure]:
    """One figure."""
    schedule(Region.of(regions.full_region()), 8)  # The kernels are loaded now.
    snapshots = {}
    for k in UNITS:
        bench.say(f"drawing {k} times a region of {regions.MACHINES:,} machines")
        snapshots[k] = regions.full_region(units=k)

    def measured(k: int) -> float:
        region = Region.of(snapshots[k])
        bench.say(f"{k} times the region")
        return schedule(region, k * BATCH)

    found = medians(interleave(bench, {f"{k}_s": partial(measured, k) for k in UNITS}, warm_ups=0))
    sizes = {"machines": regions.MACHINES, "running": regions.CLUSTERS * regions.RUNNING, "workloads": BATCH}
    yield Figure(SUITE.name, SUITE.lines[0], exponent(UNITS, found.values()), found, bench.rounds, sizes)


SUITE = Suite("rms-grow", (Line("exponent of time over size", 1.5),), run)
