"""Prints the signatures of compiled functions that decisions need and `activities.scheduling.precompile` did not load.

It runs in its own process, because other tests may have loaded these functions in the test process.
"""

import importlib
import pkgutil
from dataclasses import replace
from random import Random

from numba.core.dispatcher import Dispatcher

import gms
import rms
from activities.scheduling.precompile import precompile
from domain.scheduling import PlacedWorkload
from gms.auction.auction import Auction, Options
from gms.auction.candidate import Candidate
from gms.scan import scan
from rms.award import award, revoke
from rms.bid import bid_in
from rms.gang import Planner
from rms.region import RegionColumns
from tests.decisions.fleets import crowded
from tests.decisions.queues import job, queue, queued, tenant

_SEEDS = 150


def _loaded() -> set[tuple[str, str]]:
    """Returns the (function, signature) of all compiled functions that Python calls directly.

    Functions that these call are part of their machine code.
    """
    found: set[tuple[str, str]] = set()
    for package in (gms, rms):
        for info in pkgutil.iter_modules(package.__path__):
            module = importlib.import_module(f"{package.__name__}.{info.name}")
            for name, value in vars(module).items():
                if isinstance(value, Dispatcher):
                    found |= {(f"{module.__name__}.{name}", str(signature)) for signature in value.overloads}
    return found


def _decide(seed: int) -> None:
    """Makes bids, awards, revocations and reservations in a busy region, then removes every workload."""
    snapshot, request = crowded(seed)
    rng = Random(seed)
    if seed % 3 == 0:
        request = replace(request, jobs=tuple(replace(one, span_clusters=True) for one in request.jobs))
    region = RegionColumns.of(snapshot)
    answer = bid_in(Planner(region), request)
    if answer.plan is not None:
        awarded = award(region, answer.plan, request)
        if rng.random() < 0.5:
            revoke(region, awarded)
    region.refresh(snapshot.now_s + 60)
    region.compute_lost_work()
    candidates = [Candidate(replace(crowded(seed + n)[1], workload=f"new{n}"), waited_s=7200.0) for n in range(4)]
    auction = Auction([region], Options(reserve_after_s=3600.0))
    auction.open(snapshot.now_s + 60)
    auction.place(candidates)
    for workload in list(region.running):
        region.drop_running(workload)


def main() -> None:
    """Precompiles, makes decisions, and prints one line for each new signature."""
    precompile()
    before = _loaded()
    for seed in range(_SEEDS):
        _decide(seed)
    pending = [queued(f"w{n}", job(1, 1, "a100", "h100"), at_s=float(n % 3)) for n in range(200)]
    scan(
        queue([tenant(a100=40)], pending, [PlacedWorkload("sweep", "vision", 0.0, {"a100": 30}, 0, requested_level=7)])
    )
    scan(queue([tenant()], []))
    for function, signature in sorted(_loaded() - before):
        print(function, signature)


if __name__ == "__main__":
    main()
