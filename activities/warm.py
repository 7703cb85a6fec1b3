"""Has the decision packages' inner loops compiled before anybody waits for a decision.

Their machine code is kept from then on (`domain.compiled`): it takes two minutes once for each version of the
sources, and a second in every process after that. `python -m activities.warm` does it at installation.
"""

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
from gms.scan import scan
from rms.award import award
from rms.bid import bid_in
from rms.gang import Planner
from rms.region import Region
from tetris.climb import load

_GPU = JobRequest("gpu", 2, 1, ("a",), 1000, 1)
_CPU = JobRequest("cpu", 1, 0, (), 1000, 1)


def warm() -> None:
    """Scans a small queue, and bids in a small region: what is free, what takes a victim, what is refused."""
    tenants = (TenantState("t", 1, {"a": 1}, None, 0.0),)
    pending = (QueuedWorkload("w", "t", 0.0, (_GPU, _CPU)),)
    placed = (PlacedWorkload("v", "t", 0.0, {"a": 1}, 1000),)
    scan(QueueSnapshot(1.0, tenants, pending, placed, CreditWeights(1.0, 1.0, 1.0)))
    machines = tuple(MachineState(m, "c", "r", "a", 2, free, 4000, 8, 8000, 8) for m, free in (("m", 0), ("n", 2)))
    running = (RunningWorkload("v", 8, 0.0, (Holding("m", 2, 1000, 1),), 0.0),)
    region = Region.of(RegionSnapshot("here", 1.0, machines, running))
    planner = Planner(region)
    for number in range(3):
        request = PlacementRequest(f"w{number}", 1, (_GPU, _CPU))
        answer = bid_in(planner, request)
        if answer.plan is not None:
            award(region, answer.plan, request)
            region.refresh(1.0)


if __name__ == "__main__":
    warm()
    load()  # Nights are planned in processes of their own.
