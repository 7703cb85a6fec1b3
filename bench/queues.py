"""Generates queues for the GMS benchmarks from a seed.

- Tenants: the levels 1 to 7 have MAST's shares of workloads (section 5.1): 3, 20, 16, 54, 0.2, 0.5 and 6.3 %. Tenant i
  submits in proportion to 1 / i (Zipf). One in four has a limit on CPUs. The shares of the window's use are uniform up
  to 2%.
- Gangs: 2,000, some of them equal. 30% have no GPUs; the others have 8, 16, 32, 64, 128 or 256 (35, 25, 20, 12, 7, 1%;
  MAST's P50, P90 and P99 are 16, 64 and 128) of one to three accepted types, in tasks of 8. One in two also has
  a job without GPUs. Each workload has a random gang, with equal probability.
- Submissions: 70% uniform over the last week, 30% in 100 bursts of a minute.
- Placed workloads: 2% of the number of pending ones, each with the GPUs of a gang of its most preferred types.
- Quotas: for each tenant and GPU type, the placed slots plus 20% to 100% (uniform) of what its pending workloads could
  take, so that about four in five are within quota.
- One workload in 20 requests level 6, one in 100 is held. One in three has a known size, of 10,000 different ones.
"""

from collections.abc import Iterator, Sequence
from math import inf
from typing import NamedTuple

import numpy as np

from domain.scheduling import CreditWeights, JobRequest, PlacedWorkload, QueuedWorkload, QueueSnapshot, TenantState

NOW_S = 1_000_000.0
PEOPLE = 20
"""People of each tenant."""
WEIGHTS = CreditWeights(1.0 / 3600, 7 * 86400.0, 10.0, 10.0, 10.0)
GANGS = 2000
LEVEL_SHARES = np.array((3, 20, 16, 54, 0.2, 0.5, 6.3)) / 100
_WEEK_S = 7 * 86400.0
_TYPES = (
    ("h100",),
    ("a100",),
    ("v100",),
    ("h100", "a100"),
    ("a100", "h100"),
    ("a100", "v100"),
    ("h100", "a100", "v100"),
)
_GIB = 1 << 30


class Draw(NamedTuple):
    """The random values of a queue as columns: for each workload the numbers of its tenant and gang, and so on."""

    tenant: np.ndarray
    gang: np.ndarray
    submitted_at_s: np.ndarray
    requested_level: np.ndarray
    held: np.ndarray
    gangs: Sequence[tuple[JobRequest, ...]]


def gangs(rng: np.random.Generator) -> list[tuple[JobRequest, ...]]:
    """Draws the gangs of a queue."""
    gpus = rng.choice((8, 16, 32, 64, 128, 256), GANGS, p=(0.35, 0.25, 0.2, 0.12, 0.07, 0.01))
    gpus[rng.random(GANGS) < 0.3] = 0
    types, beside, tasks = rng.integers(len(_TYPES), size=GANGS), rng.random(GANGS) < 0.5, rng.integers(1, 2000, GANGS)
    out = []
    for k in range(GANGS):
        jobs = []
        if gpus[k]:
            jobs.append(JobRequest("train", int(gpus[k]) // 8, 8, _TYPES[types[k]], 32_000, 256 * _GIB))
        if beside[k] or not gpus[k]:
            jobs.append(JobRequest("read", int(tasks[k]), 0, (), 16_000, 64 * _GIB))
        out.append(tuple(jobs))
    return out


def draw(
    rng: np.random.Generator, workloads: int, tenants: int, among: Sequence[tuple[JobRequest, ...]] | None = None
) -> Draw:
    """Draws workloads in random order, with gangs from `among` (None: new gangs are drawn)."""
    share = 1.0 / np.arange(1, tenants + 1)
    at_s = NOW_S - rng.random(workloads) * _WEEK_S
    bursts = rng.random(workloads) < 0.3
    at_s[bursts] = (NOW_S - rng.random(100) * _WEEK_S)[rng.integers(100, size=int(bursts.sum()))]
    at_s[bursts] += rng.random(int(bursts.sum())) * 60
    return Draw(
        rng.choice(tenants, workloads, p=share / share.sum()),
        rng.integers(GANGS, size=workloads),
        np.minimum(at_s, NOW_S),
        rng.random(workloads) < 0.05,
        rng.random(workloads) < 0.01,
        gangs(rng) if among is None else among,
    )


def pending(drawn: Draw, first: int = 0) -> Iterator[QueuedWorkload]:
    """Yields the workloads of a draw, numbered from `first`."""
    names = [f"t{t:03}" for t in range(int(drawn.tenant.max()) + 1)]
    rows = zip(*(column.tolist() for column in drawn[:5]), strict=True)
    for number, (tenant, gang, at_s, requested_level, held) in enumerate(rows, first):
        yield QueuedWorkload(
            f"wl-{number:016x}", names[tenant], at_s, drawn.gangs[gang], 6 if requested_level else None, held,
            f"u{number % PEOPLE}", inf if number % 3 else 60.0 * (1 + number % 10_000),
        )  # fmt: skip


def tenants(rng: np.random.Generator, number: int, waiting: Draw, holding: Draw) -> tuple[TenantState, ...]:
    """Returns tenants whose quotas cover their placed workloads and a random part of their pending ones."""
    levels = rng.choice(7, number, p=LEVEL_SHARES / LEVEL_SHARES.sum()) + 1
    wants = {t: np.zeros(number) for t in ("h100", "a100", "v100")}
    has = {t: np.zeros(number) for t in wants}
    for gpu_type, amounts in wants.items():
        each = np.array([sum(j.gpus for j in gang if gpu_type in j.gpu_types) for gang in waiting.gangs])
        np.add.at(amounts, waiting.tenant, each[waiting.gang])
        each = np.array([_held(gang).get(gpu_type, 0) for gang in holding.gangs])
        np.add.at(has[gpu_type], holding.tenant, each[holding.gang])
    fraction = {t: rng.uniform(0.2, 1.0, number) for t in wants}
    cpus = np.array([sum(j.cpus_milli for j in gang) for gang in waiting.gangs])
    wanted_cpus = np.zeros(number)
    np.add.at(wanted_cpus, waiting.tenant, cpus[waiting.gang])
    limited, share = rng.random(number) < 0.25, rng.uniform(0.0, 0.02, number)
    return tuple(
        TenantState(
            f"t{k:03}",
            int(levels[k]),
            {t: int(has[t][k] + fraction[t][k] * wants[t][k]) for t in wants},
            int(wanted_cpus[k]) if limited[k] else None,
            float(share[k]),
            {f"u{user}": float(share[k]) / (user + 1) for user in range(PEOPLE)},
        )
        for k in range(number)
    )


def _held(gang: tuple[JobRequest, ...]) -> dict[str, int]:
    return {job.gpu_types[0]: job.gpus for job in gang if job.gpus}


def queue(workloads: int, number_of_tenants: int, seed: int = 1) -> QueueSnapshot:
    """Returns a queue with `workloads` pending workloads; equal seeds give equal queues on all platforms."""
    rng = np.random.default_rng(seed)
    waiting, holding = draw(rng, workloads, number_of_tenants), draw(rng, workloads // 50, number_of_tenants)
    placed = tuple(
        PlacedWorkload(f"pl-{k:016x}", w.tenant, w.submitted_at_s, _held(w.jobs), sum(j.cpus_milli for j in w.jobs))
        for k, w in enumerate(pending(holding))
    )
    listed = tenants(rng, number_of_tenants, waiting, holding)
    return QueueSnapshot(NOW_S, listed, tuple(pending(waiting)), placed, WEIGHTS)
