"""Converts the rows of a trace to workloads: copies, slices, and random draws for values that the trace lacks."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import exp, inf
from statistics import NormalDist

from domain.priority import LOWEST_LEVEL
from domain.scheduling import JobRequest, TenantState
from research.traces.draws import pick, sample
from research.traces.fleet import SimulatedFleet, quotas_by_rule
from research.traces.rows import BadRow, TraceRow
from research.traces.settings import TraceSettings
from simulation.hardware import Hardware, supply
from simulation.random_draws import chance
from simulation.workloads import SimulatedWorkload

EVERYWHERE = 1 << 30
DAY_S = 86400.0


def scaled(
    rows: Sequence[TraceRow], scale: Mapping[int, float], seed: int, days: int, jitter_s: float
) -> list[TraceRow]:
    """Returns each row `scale` times on average: the integer part, and one more with the fraction as probability.

    `scale` maps GPU counts of gangs to factors: a factor applies to gangs of at least so many GPUs, up to the next key.

    Copies have the values of the row and an id of their own (`ID~2`, `ID~3`, ...), so other random values are drawn for
    them. The first copy is the row itself. Each other copy is shifted by a random number of whole days, at most `days`,
    earlier or later, and in addition by up to `jitter_s`; a shift to outside the trace changes its sign. This
    multiplies the load and keeps durations, sizes and the daily and weekly pattern, without scaling up single bursts.
    """
    out = []
    first_s, last_s = started_at_s(rows), max((row.submit_s for row in rows), default=0.0)
    for row in rows:
        times = scale[max(gpus for gpus in scale if gpus <= row.gpus)]
        copies = int(times) + (chance(seed, "copies", row.workload_id) < times - int(times))
        for number in range(1, copies + 1):
            if number == 1:
                out.append(row)
                continue
            id_ = f"{row.workload_id}~{number}"
            shift_s = DAY_S * (int(chance(seed, "day", id_) * (2 * days + 1)) - days)
            shift_s += jitter_s * (2 * chance(seed, "jitter", id_) - 1)
            if not first_s <= row.submit_s + shift_s <= last_s:
                shift_s = -shift_s
            submit_s = min(max(first_s, row.submit_s + shift_s), last_s)
            out.append(replace(row, workload_id=id_, submit_s=submit_s))
    out.sort(key=lambda row: (row.submit_s, row.workload_id))
    return out


def started_at_s(rows: Iterable[TraceRow]) -> float:
    """Returns the time of the first submission of the trace."""
    return min((row.submit_s for row in rows), default=0.0)


def sliced(rows: Iterable[TraceRow], from_s: float, to_s: float) -> list[tuple[TraceRow, float]]:
    """Returns (row, arrival) for the rows of a slice of the trace. All times are on the clock of the rows.

    The slice has the rows submitted in `from_s <= t < to_s`, and earlier rows that would still run at `from_s` if they
    had started at their submission. These arrive at `from_s` with the rest of their work and their true age.
    """
    out = []
    for row in rows:
        if from_s <= row.submit_s < to_s:
            out.append((row, row.submit_s))
        elif row.submit_s < from_s < row.submit_s + row.duration_s:
            worked_s = from_s - row.submit_s
            limit_s = None if row.max_runtime_s is None else row.max_runtime_s - worked_s
            out.append((replace(row, duration_s=row.duration_s - worked_s, max_runtime_s=limit_s), from_s))
    out.sort(key=lambda pair: (pair[1], pair[0].submit_s, pair[0].workload_id))
    return out


class RowCompletion:
    """Converts rows to workloads for one fleet and seed; draws the values that rows lack."""

    def __init__(self, fleet: SimulatedFleet, settings: TraceSettings, seed: int) -> None:
        self._fleet, self._settings, self._seed = fleet, settings, seed
        self.hardware = Hardware(fleet.possible())
        self._jobs: dict[tuple[object, ...], JobRequest] = {}
        self._users = {f"user-{k}": 1 / k for k in range(1, settings.users + 1)}
        percent = settings.priority_percent
        self._levels = {**percent, 0: max(0.0, 100.0 - sum(percent.values()))}
        percent = settings.candidate_regions_percent
        self._counts = {**percent, EVERYWHERE: max(0.0, 100.0 - sum(percent.values()))}

    def unknown_types(self, rows: Iterable[TraceRow]) -> list[BadRow]:
        """Returns the rows with a GPU type that the fleet does not have, as bad rows."""
        known = ", ".join(self.hardware.supply) or "none"
        return [
            BadRow(row.line, "gpu_type", gpu_type, f"must be a GPU type of the fleet: {known}")
            for row in rows
            for gpu_type in row.gpu_types or ()
            if gpu_type not in self.hardware.supply
        ]

    def workload(self, row: TraceRow, arrives_s: float, zero_s: float, tenant: TenantState) -> SimulatedWorkload:
        """Returns a row as a workload. `arrives_s` and `zero_s`, the start of the simulation, are on the row's clock.

        The level is the row's priority or the tenant's level, whichever is the lower level (the larger number).
        """
        whose = row.workload_id
        level = row.priority or pick(chance(self._seed, "priority", whose), self._levels) or LOWEST_LEVEL
        level = max(level, tenant.level)
        job = self._job(row, row.gpu_types or ())
        if row.gpus and row.gpu_types is None:
            job = self._job(row, self._drawn_type(row, job))
        slower = row.tasks / job.tasks
        return SimulatedWorkload(
            whose, row.tenant, level, row.submit_s - zero_s, arrives_s - zero_s, row.duration_s * slower, (job,),
            self._regions(row, job), self._limit_s(row) * slower,
            row.user or pick(chance(self._seed, "user", whose), self._users), row.recurring,
        )  # fmt: skip

    def _limit_s(self, row: TraceRow) -> float:
        whose, s = row.workload_id, self._settings
        if row.max_runtime_s is not None:
            return row.max_runtime_s
        if 100 * chance(self._seed, "limited", whose) >= s.limited_percent:
            return inf
        factor = 2 * exp(s.limit_sigma * NormalDist().inv_cdf(chance(self._seed, "limit", whose)))
        return row.duration_s * max(1.0, factor)

    def _job(self, row: TraceRow, types: tuple[str, ...]) -> JobRequest:
        s, gpus = self._settings, row.gpus_per_task
        cpus, memory = row.cpus_milli_per_task, row.memory_bytes_per_task
        if cpus is None:
            cpus = round(1000 * (s.cpus_per_gpu * gpus if gpus else s.cpus_without_gpu))
        if memory is None:
            memory = s.memory_bytes_per_gpu * gpus if gpus else s.memory_bytes_without_gpu
        tasks, most = row.min_tasks or row.tasks, row.max_tasks or 0
        key = (tasks, most, gpus, types, cpus, memory)
        return self._jobs.setdefault(key, JobRequest("main", tasks, gpus, types, cpus, memory, most_tasks=most))

    def _drawn_type(self, row: TraceRow, job: JobRequest) -> tuple[str, ...]:
        """Returns a GPU type drawn in proportion to supply, from the types on which two regions could hold the gang.

        If there are none, from the types on which one region could; if there are none either, from all types.
        """
        regions = {t: len(self.hardware.regions_for(replace(job, gpu_types=(t,)))) for t in self.hardware.supply}
        for least in (2, 1, 0):
            weights = {t: float(self.hardware.supply[t]) for t, count in regions.items() if count >= least}
            if any(weights.values()):
                return (pick(chance(self._seed, "gpu_type", row.workload_id), weights),)
        return ()

    def _regions(self, row: TraceRow, job: JobRequest) -> frozenset[str] | None:
        """Returns the regions with the workload's data: drawn, or those that have all tables that the row names."""
        if row.tables is None:
            possible = self.hardware.regions_for(job)
            count = pick(chance(self._seed, "candidate_regions", row.workload_id), self._counts)
            if count >= len(possible):
                return None if len(possible) == len(self.hardware.regions) else frozenset(possible)
            return frozenset(sample(self._seed, "region", row.workload_id, possible, count))
        if not row.tables:
            return None
        return frozenset.intersection(*(self._replicas(table) for table in row.tables))

    def _replicas(self, table: str) -> frozenset[str]:
        if table in self._fleet.tables:
            return frozenset(self._fleet.tables[table])
        count = pick(chance(self._seed, "replicas", table), self._counts)
        return frozenset(sample(self._seed, "replica", table, self.hardware.regions, count))


def tenants_of(fleet: SimulatedFleet, rows: Iterable[TraceRow]) -> tuple[dict[str, TenantState], list[BadRow]]:
    """Returns each tenant's level and quota, by name; and the rows with an unknown tenant, as bad rows.

    Quotas by the fleet file's rule are shares of the supply, in proportion to the tenants' use in all of `rows`.
    """
    out = {
        name: TenantState(name, e.level, e.quota, None if e.cpus is None else round(1000 * e.cpus), 0.0)
        for name, e in fleet.tenants.items()
    }
    weights: dict[str, float] = defaultdict(float)
    bad = []
    rule = fleet.rule
    for row in rows:
        if row.tenant in out:
            continue
        if rule is None:
            right = f"must be one of {', '.join(sorted(out))}; or set `quotas` in the fleet file"
            bad.append(BadRow(row.line, "tenant", row.tenant, right))
            continue
        hours = row.gpus * row.duration_s / 3600
        weights[row.tenant] += {"gpu_hours": hours, "workloads": 1.0, "equal": 0.0}[rule.in_proportion_to]
    if rule is not None:
        if rule.in_proportion_to == "equal":
            weights = dict.fromkeys(weights, 1.0)
        out.update(quotas_by_rule(rule, weights, supply(fleet.possible())))
    return dict(sorted(out.items())), bad
