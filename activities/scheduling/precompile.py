"""Compiles the inner loops of the decision packages in advance, so that no decision waits for the compiler.

The machine code is cached (`domain.compiled`). Compiling takes about 25 s of CPU time once for each version of the
sources; after that, loading takes a second in each process. `python -m activities.scheduling.precompile` compiles at
installation, the queue and the bids in separate processes. The placement of tables is compiled at its first use, in
separate processes, or in advance by `python -m activities.scheduling.precompile search exact`.
"""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from domain.machine_code import mark_complete
from domain.scheduling import (
    CreditWeights,
    Holding,
    JobRequest,
    MachineState,
    PlacedWorkload,
    PlacementRequest,
    QueuedWorkload,
    QueueSnapshot,
    RegionSnapshot,
    RunningWorkload,
    TenantState,
)
from domain.topology import TopologyRule
from gms.scan import scan
from gms.starts.forecast import HeldAmount, StartForecaster, WaitingDemand
from gms.starts.kernels import FreeMachines
from infra import children
from rms.award import award
from rms.bid import bid_in
from rms.gang import Planner
from rms.region import RegionColumns
from rms.reserve import available_from_s, reserve, reserve_unknown
from tetris.climb import load

_GPU = JobRequest("gpu", 2, 1, ("a",), 1000, 1)
_CPU = JobRequest("cpu", 1, 0, (), 1000, 1)


def precompile() -> None:
    """Scans a small queue and bids in a small region, on free machines, with a victim, and with a refusal."""
    compile_queue()
    compile_bids()


def compile_queue() -> None:
    """Compiles the inner loops of the queue by a scan of a small queue."""
    tenants = (TenantState("t", 1, {"a": 2}, None, 0.0),)
    pending = (QueuedWorkload("w", "t", 0.0, (_GPU, _CPU)),)
    placed = (PlacedWorkload("v", "t", 0.0, {"a": 1}, 1000, requested_level=7),)  # Displaced by `w`.
    scan(QueueSnapshot(1.0, tenants, pending, placed, CreditWeights(1.0, 1.0, 1.0)))
    held = [HeldAmount("v", ("t", "1"), 0, 1, 0.0, on=((0, 1),))]
    machines = FreeMachines(np.zeros(1, np.int64), np.ones(1, np.int64))
    StartForecaster().forecast(1.0, [WaitingDemand("w", ("t", "1"), 1, 1, 1, 1)], held, [0], machines=machines)


def compile_bids() -> None:
    """Compiles the inner loops of bids by bids, awards, reservations and releases in a small region."""
    machines = tuple(MachineState(m, "c", "r", "a", 2, free, 4000, 8, 8000, 8) for m, free in (("m", 0), ("n", 2)))
    running = (
        RunningWorkload("v", 8, 0.0, (Holding("m", 2, 1000, 1),), 0.0),
        RunningWorkload("young", 8, 0.0, (Holding("m", 0, 1000, 1),), 0.0, protected_until_s=9.0),
    )
    region = RegionColumns.of(RegionSnapshot("here", 1.0, machines, running))
    planner = Planner(region)
    for number in range(3):
        request = PlacementRequest(f"w{number}", 1, (_GPU, _CPU))
        answer = bid_in(planner, request)
        if answer.plan is not None:
            award(region, answer.plan, request)
            region.refresh(1.0)
    bid_in(planner, PlacementRequest("elsewhere", 1, (_CPU,), avoids=frozenset(("m",))))
    bid_in(planner, PlacementRequest("together", 1, (replace(_GPU, topology=TopologyRule(slice_tasks=2)),)))
    large = PlacementRequest("large", 1, (_GPU,))
    available_s = available_from_s(planner, large)
    reserve(planner, large, available_s)
    reserve_unknown(planner, large, available_s)
    for workload in list(region.running):
        region.drop_running(workload)


_PARTS: dict[str, Callable[[], None]] = {
    "queue": compile_queue,
    "bids": compile_bids,
    "search": partial(load, exact=False),
    "exact": partial(load, search=False),
}
_PACKAGES = {"queue": "gms", "bids": "rms"}


def main(parts: list[str]) -> int:
    """Compiles the named parts in this process or, without names, the queue and the bids concurrently."""
    if parts:
        for part in parts:
            _PARTS[part]()
            if part in _PACKAGES:
                mark_complete(_PACKAGES[part])
        return 0
    started = [
        subprocess.Popen(children.python("-m", "activities.scheduling.precompile", part)) for part in ("queue", "bids")
    ]
    return max(process.wait() for process in started)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
