"""A pool, offers and shortages for the tests of sizing."""

from dataclasses import replace

from capacity.offers import Offer, Shape
from capacity.pools import Pool
from capacity.scaling import Shortage
from domain.capacity import CapacityKind
from domain.scheduling import JobRequest

GIB = 1 << 30

SHAPE = Shape("small", 4, "a100", 16_000, 64 * GIB)

CHEAP = Offer("sim", "west", "za", CapacityKind.SPOT, SHAPE, 4.0, 30.0)

DEAR = replace(CHEAP, zone="zb", kind=CapacityKind.ON_DEMAND, usd_per_h=12.0)

KEY = ("west", "burst")

POOL = Pool(*KEY, 0, max_size=4)


def job(tasks: int = 1, gpus: int = 4, **more: object) -> JobRequest:
    """Returns a job of tasks with this many GPUs each."""
    types = ("a100",) if gpus else ()
    return replace(JobRequest("main", tasks, gpus, types, 1000, GIB), **more)  # type: ignore[arg-type]


def shortage(workload: str, *jobs: JobRequest, regions: tuple[str, ...] = ("west",)) -> Shortage:
    """Returns the shortage of a waiting workload."""
    return Shortage(workload, jobs or (job(),), frozenset(regions))
