"""Builds a scenario from a snapshot of the live system, optionally with changed quotas or drained regions."""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from math import erf, exp, inf, log, sqrt
from pathlib import Path
from statistics import NormalDist

from pydantic import ValidationError

from domain.live import LiveSnapshot, LiveWorkload
from domain.priority import OVER_QUOTA_RANK
from domain.scheduling import MachineState, RunningWorkload, TenantState
from infra.documents import problem_lines
from infra.errors import ConfigurationError
from simulation.ledger import NOTHING, Amounts, plus
from simulation.random_draws import chance
from simulation.run import EVERYTHING, Span
from simulation.scenario import InitialHolder, Scenario
from simulation.settings import SimulationSettings, fit_lognormal
from simulation.workload_state import speed_of
from simulation.workloads import SimulatedWorkload

_QUOTA = re.compile(r"quota\.(?P<tenant>[^.=]+)\.(?P<type>[^=]+)=(?P<slots>.*)")
_MU, _SIGMA = fit_lognormal(20 * 60.0, 6.7 * 3600, 66 * 3600.0)
"""(mu, sigma) of the lognormal of the durations of GPU workloads, fitted to P50, P90 and P99 of MAST 5.1."""
_NORMAL = NormalDist()
_LEAST_S = 1.0


def load_live(path: Path) -> LiveSnapshot:
    """Reads the snapshot in a file that `mizzen export` wrote.

    Raises:
        ConfigurationError: the file cannot be read, or is not a valid snapshot; the message lists up to ten problems.
    """
    try:
        return LiveSnapshot.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigurationError(f"snapshot {path}: {error}") from None
    except ValidationError as error:
        raise ConfigurationError(f"snapshot {path}: " + "; ".join(problem_lines(LiveSnapshot, error)[:10])) from None


def change(live: LiveSnapshot, assignments: Iterable[str], drained: Iterable[str]) -> LiveSnapshot:
    """Returns the snapshot with changed quotas (`quota.TENANT.TYPE=SLOTS`) and without the machines of drained regions.

    Workloads that were placed in a drained region are queued again.

    Raises:
        ConfigurationError: an assignment is malformed, or names an unknown tenant, GPU type or region.
    """
    tenants = {tenant.name: tenant for tenant in live.tenants}
    types = sorted({m.gpu_type for m in live.machines if m.gpu_type})
    for assignment in assignments:
        match = _QUOTA.fullmatch(assignment)
        if match is None or not match["slots"].isdigit():
            raise ConfigurationError(
                f"--set {assignment}: must be quota.TENANT.TYPE=SLOTS, such as quota.vision.a100=256"
            )
        if match["tenant"] not in tenants:
            raise ConfigurationError(
                f"--set {assignment}: tenant {match['tenant']!r}: must be one of {', '.join(tenants)}"
            )
        if match["type"] not in types:
            raise ConfigurationError(
                f"--set {assignment}: GPU type {match['type']!r}: must be one of {', '.join(types)}"
            )
        tenant = tenants[match["tenant"]]
        quota = {**tenant.quota_gpus, match["type"]: int(match["slots"])}
        tenants[tenant.name] = tenant.model_copy(update={"quota_gpus": quota})
    regions = sorted({m.region for m in live.machines})
    gone = set(drained)
    for region in sorted(gone):
        if region not in regions:
            raise ConfigurationError(f"--drain {region}: must be one of {', '.join(regions)}")
    if gone == set(regions):
        raise ConfigurationError(f"--drain {', '.join(sorted(gone))}: must leave at least one region")
    workloads = tuple(
        w.model_copy(update={"placement": None}) if w.placement is not None and w.placement.region in gone else w
        for w in live.workloads
    )
    machines = tuple(m for m in live.machines if m.region not in gone)
    update = {"tenants": tuple(tenants.values()), "machines": machines, "workloads": workloads}
    return live.model_copy(update=update)


def live_scenario(
    live: LiveSnapshot, settings: SimulationSettings, seed: int, until_s: float = inf, measured: Span = EVERYTHING
) -> Scenario:
    """Returns the scenario that starts with a snapshot. 0 on its clock is the time of the snapshot.

    The remaining work of a workload is the rest of its maximum runtime if it has one. Otherwise the duration is drawn
    from MAST's distribution for GPU workloads (5.1: P50, P90 and P99 of 20 minutes, 6.7 and 66 hours; lognormal), under
    the condition that it is longer than the time that the workload has run. Running workloads are assumed to have saved
    a checkpoint every interval. Queued workloads that are held are left out. Slots that an award has promised count as
    handed over, and their victims as gone.

    Raises:
        ConfigurationError: the snapshot is inconsistent.
    """
    zero_s = live.taken_at.timestamp()
    tenants = {t.name: TenantState(t.name, t.level, t.quota_gpus, t.quota_cpus_milli, 0.0) for t in live.tenants}
    workloads, holding = [], {}
    taken: dict[str, Amounts] = defaultdict(lambda: NOTHING)
    known = {m.id for m in live.machines}
    for w in live.workloads:
        if w.held and w.placement is None:
            continue
        if w.tenant not in tenants:
            raise ConfigurationError(
                f"snapshot: workload {w.id}: tenant {w.tenant!r}: must be in the `tenants` of the snapshot"
            )
        workloads.append(_workload(w, zero_s, seed, tenants[w.tenant].level))
        if w.placement is not None:
            held = _held(w, zero_s, known)
            if held is None:
                continue
            holding[w.id] = held
            for h in held.running.holdings:
                taken[h.machine] = plus(taken[h.machine], (h.gpus, h.cpus_milli, h.memory_bytes))
    return Scenario(
        _machines(live, taken), tenants, workloads, settings, seed, until_s, measured.from_s, measured.to_s,
        holding=holding, says={"taken_at": live.taken_at.isoformat(), "held_back": _held_back(live.workloads)},
    )  # fmt: skip


def _held_back(workloads: Sequence[LiveWorkload]) -> list[str]:
    return sorted(w.id for w in workloads if w.held and w.placement is None)


def _workload(w: LiveWorkload, zero_s: float, seed: int, tenant_level: int) -> SimulatedWorkload:
    left_s = inf if w.max_runtime_s is None else max(_LEAST_S, w.max_runtime_s - w.ran_s)
    work_s = remaining_after_s(w.ran_s, chance(seed, "duration", w.id)) if left_s == inf else left_s
    if w.placement is not None and w.placement.started_at is not None:
        work_s += max(0.0, zero_s - w.placement.started_at.timestamp())  # Work that the present attempt has done.
        work_s *= speed_of(w.jobs, w.placement.holdings)
    return SimulatedWorkload(
        w.id, w.tenant, max(tenant_level, w.level or 1), w.submitted_at.timestamp() + w.paused_s - zero_s, 0.0,
        work_s, w.jobs,
        None if w.regions is None else frozenset(w.regions),
        inf if w.max_runtime_s is None else w.max_runtime_s, w.submitted_by, ran_s=w.ran_s,
    )  # fmt: skip


def remaining_after_s(ran_s: float, at: float) -> float:
    """Returns the quantile `at` of the remaining work of a GPU workload that has run for `ran_s` (MAST 5.1)."""
    below = 0.5 * (1 + erf((log(ran_s) - _MU) / _SIGMA / sqrt(2))) if ran_s > 0 else 0.0
    quantile = min(below + at * (1 - below), 1 - 1e-12)
    return max(_LEAST_S, exp(_MU + _SIGMA * _NORMAL.inv_cdf(quantile)) - ran_s)


def _held(w: LiveWorkload, zero_s: float, known: Collection[str]) -> InitialHolder | None:
    """Returns what a workload holds on the scenario's machines; None: nothing."""
    placement = w.placement
    assert placement is not None
    holdings = tuple(h for h in placement.holdings if h.machine in known)
    if not holdings:
        return None
    began = placement.started_at or placement.awarded_at
    running = RunningWorkload(w.id, OVER_QUOTA_RANK, began.timestamp() - zero_s, holdings, None)
    return InitialHolder(running, placement.region, placement.gpus, placement.started_at is not None)


def _machines(live: LiveSnapshot, taken: dict[str, Amounts]) -> dict[str, tuple[MachineState, ...]]:
    out: dict[str, list[MachineState]] = defaultdict(list)
    for m in live.machines:
        gpus, cpus, memory = taken[m.id]
        free = m.gpus - gpus, m.cpus_milli - cpus, m.memory_bytes - memory
        if min(free) < 0:
            raise ConfigurationError(f"snapshot: machine {m.id}: workloads hold more than the machine has")
        out[m.region].append(
            MachineState(
                m.id,
                m.cluster,
                m.rack,
                m.gpu_type,
                m.gpus,
                *free,
                m.cpus_milli,
                m.memory_bytes,
                m.capacity.value,
                m.gpu_usd_per_h,
                m.core_usd_per_h,
                m.departures_per_h,
            )
        )
    return {region: tuple(states) for region, states in out.items()}
