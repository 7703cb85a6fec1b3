"""Generates scenarios without a trace, from MAST's statistics (5.1), for benchmarks and experiments."""

import time
from math import ceil, exp, inf, log
from statistics import NormalDist

from domain.scheduling import JobRequest, MachineState, TenantState
from reference.engine import on_reference
from research.traces.draws import pick
from research.traces.settings import TraceSettings
from simulation.policies import SchedulingPolicy
from simulation.random_draws import chance
from simulation.run import Run, Scenario
from simulation.settings import fit_lognormal
from simulation.workloads import SimulatedWorkload

_NORMAL = NormalDist()
GANG_GPUS = (log(16), log(128 / 16) / _NORMAL.inv_cdf(0.99))
"""(mu, sigma) of the lognormal of a workload's GPUs: P50 16 and P99 128 (the P90 is then 50; MAST's is 64)."""
_DURATION = fit_lognormal(20 * 60.0, 6.7 * 3600, 66 * 3600.0)
_GIB = 1 << 30
_PER_RACK = 16


def synthetic(
    workloads: int,
    *,
    seed: int = 0,
    regions: int = 3,
    machines: int = 40,
    load: float = 1.2,
    longest_s: float = 86400.0,
) -> Scenario:
    """Returns a scenario of `regions` regions with `machines` machines of 8 GPUs each, of two GPU types.

    Workloads arrive at constant intervals and request `load` times the supply. A gang of more than 8 GPUs has one task
    per machine. Gang sizes (at most half a region) and durations (at most `longest_s`) have MAST's quantiles, and
    priorities have its distribution. Each of three tenants has 0.3 of the supply as quota.
    """
    # The reference engines, used for comparison, do not support reservations.
    settings = TraceSettings(reserve_after_s=inf)
    states = {
        f"region-{r}": tuple(
            _machine(r, number, "a100" if number < machines // 2 else "v100") for number in range(machines)
        )
        for r in range(regions)
    }
    levels = {**settings.priority_percent, 7: 6.3}
    jobs, durations = [], []
    for number in range(workloads):
        whose = f"w{number:06d}"
        gpus = min(4 * machines // 2, max(1, round(lognormal_at(*GANG_GPUS, chance(seed, "gpus", whose)))))
        tasks = ceil(gpus / 8)
        each = ceil(gpus / tasks)
        gpu_type = pick(chance(seed, "type", whose), {"a100": 1.0, "v100": 1.0})
        jobs.append(JobRequest("main", tasks, each, (gpu_type,), 4000 * each, 32 * _GIB * each))
        durations.append(min(longest_s, max(60.0, lognormal_at(*_DURATION, chance(seed, "duration", whose)))))
    supply = 8 * machines * regions
    spacing_s = sum(job.gpus * s for job, s in zip(jobs, durations, strict=True)) / (load * supply) / max(1, workloads)
    share = {kind: round(0.3 * supply / 2) for kind in ("a100", "v100")}
    tenants = {name: TenantState(name, 1, share, None, 0.0) for name in ("tenant-0", "tenant-1", "tenant-2")}
    drawn = [
        SimulatedWorkload(
            f"w{number:06d}", f"tenant-{number % 3}", pick(chance(seed, "level", f"w{number:06d}"), levels),
            number * spacing_s, number * spacing_s, duration_s, (job,), None,
        )
        for number, (job, duration_s) in enumerate(zip(jobs, durations, strict=True))
    ]  # fmt: skip
    return Scenario(states, tenants, drawn, settings, seed, until_s=workloads * spacing_s)


def events_per_s(scenario: Scenario, policy: SchedulingPolicy, plain: bool = False, most: int | None = None) -> float:
    """Returns the events per second of wall time of a run of at most `most` events.

    The run uses the decision packages, or (`plain`) the reference implementations. Run a small scenario first: the
    first call of a compiled function loads its machine code.
    """
    run = Run(scenario, on_reference(policy) if plain else policy)
    begun = time.perf_counter()
    run.simulator.run(lambda progress: most is not None and progress.events >= most, every=1)
    return run.simulator.events / (time.perf_counter() - begun)


def lognormal_at(mu: float, sigma: float, quantile: float) -> float:
    """Returns a quantile of a lognormal distribution."""
    return exp(mu + sigma * _NORMAL.inv_cdf(quantile))


def _machine(region: int, number: int, gpu_type: str) -> MachineState:
    rack = f"r{number // _PER_RACK}"
    amounts = (8, 8, 64_000, 512 * _GIB, 64_000, 512 * _GIB)
    return MachineState(f"region-{region}/main/m{number:04d}", "main", rack, gpu_type, *amounts)
