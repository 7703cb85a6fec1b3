"""Small random queues for GMS, and builders for examples."""

from dataclasses import replace
from math import inf

from hypothesis import strategies as st

from domain.scheduling import (
    CreditWeights,
    JobRequest,
    PlacedWorkload,
    QueuedWorkload,
    QueueSnapshot,
    TenantState,
)

WEIGHTS = CreditWeights(w_age=0.01, age_cap_s=3600.0, w_fair=10.0, w_user=10.0, w_short=10.0)


def tenant(
    name: str = "vision",
    level: int = 3,
    *,
    cpus_milli: int | None = None,
    share: float = 0.0,
    users: dict[str, float] | None = None,
    **gpus: int,
) -> TenantState:
    """Returns a tenant with a quota by GPU type, such as `a100=8`."""
    return TenantState(name, level, gpus, cpus_milli, share, users or {})


def job(tasks: int, gpus: int, *types: str, cpus_milli: int = 0, name: str = "train") -> JobRequest:
    """Returns a job that needs GPUs, by default of type a100."""
    return JobRequest(name, tasks, gpus, (types or ("a100",)) if gpus else (), cpus_milli, 0)


def queued(
    id_: str,
    *jobs: JobRequest,
    of: str = "vision",
    at_s: float = 0.0,
    requested_level: int | None = None,
    held: bool = False,
    user: str = "",
    gpu_s: float = inf,
) -> QueuedWorkload:
    """Returns a pending workload."""
    return QueuedWorkload(id_, of, at_s, jobs, requested_level, held, user, gpu_s)


def queue(
    tenants: list[TenantState],
    pending: list[QueuedWorkload],
    placed: list[PlacedWorkload] | None = None,
    now_s: float = 1000.0,
) -> QueueSnapshot:
    """Returns a snapshot at 1,000 s with `WEIGHTS`."""
    return QueueSnapshot(now_s, tuple(tenants), tuple(pending), tuple(placed or ()), WEIGHTS)


_TENANTS = [
    (level, gpus, cpus_milli, share)
    for gpus in ({"a100": 8}, {"a100": 16, "h100": 4}, {}, {"h100": 8, "a100": 0})
    for level in (3, 1, 7)
    for cpus_milli in (None, 0, 4000, 20_500)
    for share in (0.25, 0.0, 0.1, 1.0)
]
_PEOPLE: list[dict[str, float]] = [{}, {"ann": 0.5}, {"ann": 0.25, "bob": 0.5}, {"bob": 0.125, "cleo": 0.125}]
_SHAPES = [
    (gpus, types, cpus_milli)
    for gpus, types in [
        (1, ("a100",)),
        (4, ("a100",)),
        (2, ("h100", "a100")),
        (4, ("a100", "h100")),
        (1, ("v100", "h100")),
        (0, ()),
    ]
    for cpus_milli in (0, 500, 2000)
]
_PLACED = [
    (awarded_at_s, gpus, cpus_milli, requested_level)
    for awarded_at_s in (0.0, 10.0, 20.0)
    for gpus in ({"a100": 6}, {"a100": 5}, {"a100": 3, "h100": 2}, {}, {"v100": 1}, {"h100": 8, "a100": 0})
    for cpus_milli in (0, 1500)
    for requested_level in (None, 1, 6)
]
_LIVES = [
    (submitted_at_s, requested_level, held)
    for submitted_at_s in (0.0, 500.0, 900.5, 2000.0)
    for requested_level in (None, 2, 5)
    for held in (False, False, False, True)
]

_SIZES = (inf, inf, 0.0, 60.0, 3600.0, 8 * 3600.0, 32768.0, 1e9)


@st.composite
def snapshots(draw: st.DrawFn) -> QueueSnapshot:
    """Draws a few tenants with small quotas and their placed and pending workloads; ties are common."""
    drawn = draw(st.lists(st.sampled_from(_TENANTS), min_size=1, max_size=3))
    tenants = [TenantState(f"t{index}", *values, draw(st.sampled_from(_PEOPLE))) for index, values in enumerate(drawn)]
    names = st.sampled_from([t.name for t in tenants])
    placed = [
        PlacedWorkload(f"p{index}", draw(names), *draw(st.sampled_from(_PLACED)))
        for index in range(draw(st.integers(0, 6)))
    ]
    pending = []
    for index in range(draw(st.integers(0, 8))):
        gang = []
        for number in range(draw(st.sampled_from((1, 1, 2, 3)))):
            shape = draw(st.sampled_from(_SHAPES))
            gang.append(JobRequest(f"job{number}", draw(st.integers(1, 3)), shape[0], shape[1], shape[2], 0))
        if len(gang) == 1:
            gang = [replace(gang[0], most_tasks=draw(st.sampled_from((0, 0, 2, 6, 20))))]
        submitted_at_s, requested_level, held = draw(st.sampled_from(_LIVES))
        user = draw(st.sampled_from(("ann", "ann", "bob", "cleo")))
        gpu_s, of = draw(st.sampled_from(_SIZES)), draw(names)
        pending.append(QueuedWorkload(f"w{index}", of, submitted_at_s, tuple(gang), requested_level, held, user, gpu_s))
    weights = draw(st.sampled_from((WEIGHTS, CreditWeights(0.0, 0.0, 1.0, 1.0, 0.5), CreditWeights(1.0, 600.0, 0.0))))
    return QueueSnapshot(1000.0, tuple(tenants), tuple(pending), tuple(placed), weights)


@st.composite
def displacing(draw: st.DrawFn) -> QueueSnapshot:
    """Draws a tenant whose quota is used by low-priority work, and important pending work that often displaces it."""
    placed = [
        PlacedWorkload(f"p{index}", "t", float(draw(st.integers(0, 2))), {"a100": draw(st.integers(1, 6))}, 0, 6)
        for index in range(draw(st.integers(2, 8)))
    ]
    pending = [
        QueuedWorkload(
            f"w{index}", "t", float(index), (job(draw(st.integers(1, 3)), 4),), draw(st.sampled_from((None, 5)))
        )
        for index in range(draw(st.integers(1, 4)))
    ]
    return QueueSnapshot(1000.0, (tenant("t", a100=16),), tuple(pending), tuple(placed), WEIGHTS)
