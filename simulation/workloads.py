"""From a trace's rows to workloads: copies and slices, and what the trace is silent about drawn."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from domain.priority import LOWEST_LEVEL
from domain.scheduling import JobRequest, MachineState, TenantState
from simulation.fleet import SimulatedFleet, quotas_by_rule, supply
from simulation.random_draws import chance, pick, sample
from simulation.settings import Settings
from simulation.trace.rows import BadRow, TraceRow

EVERYWHERE = 1 << 30
DAY_S = 86400.0


@dataclass(frozen=True, slots=True)
class Workload:
    """A workload of the simulation."""

    id: str
    tenant: str
    level: int
    submit_s: float
    """On the simulation's clock; its age counts from here."""
    arrives_s: float
    """When it is seen first: later than `submit_s` for one that was there when a slice began."""
    duration_s: float
    """Seconds of work."""
    jobs: tuple[JobRequest, ...]
    regions: frozenset[str] | None
    """Where its data is, or it may run; None: anywhere."""
    max_runtime_s: float = inf

    @property
    def gpus(self) -> int:
        """GPU slots of the whole gang."""
        return sum(job.gpus for job in self.jobs)


# --------------------------------------------------------------------------------------------------- copies and slices


def scaled(
    rows: Sequence[TraceRow], scale: Mapping[int, float], seed: int, days: int, jitter_s: float
) -> list[TraceRow]:
    """Each row `scale` times on average: as often as the whole part says, and once more with the rest as probability.

    `scale` is by the GPUs of a gang: each number of them stands for gangs of so many and more, up to the next.

    Copies keep all that the row says and get an id of their own (`ID~2`, `ID~3`, ...), so what is drawn for them is
    drawn anew. The original stays; a copy is submitted a whole number of days before or after it, at most `days`, and
    up to `jitter_s` sooner or later at that; where that is outside the trace, on the other side. So durations, sizes,
    the course of the day and that of the weeks stay, the load is multiplied, and a burst does not become one of
    everything times `scale`.
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
    """The simulation's 0: the first submission of the trace."""
    return min((row.submit_s for row in rows), default=0.0)


def sliced(rows: Iterable[TraceRow], from_s: float, to_s: float) -> list[tuple[TraceRow, float]]:
    """Rows submitted in `from_s <= t < to_s`, and those from before that would still run at `from_s`; with arrivals.

    One from before would still run had it started at once: it arrives at `from_s` with the rest of its work and its
    age. All times are on the clock of the rows.
    """
    out = []
    for row in rows:
        if from_s <= row.submit_s < to_s:
            out.append((row, row.submit_s))
        elif row.submit_s < from_s < row.submit_s + row.duration_s:
            out.append((replace(row, duration_s=row.submit_s + row.duration_s - from_s), from_s))
    out.sort(key=lambda pair: (pair[1], pair[0].submit_s, pair[0].workload_id))
    return out


# -------------------------------------------------------------------------------------------------------------- draws


_Kind = tuple[str, str | None, int, int, int]
"""Kind of capacity, GPU type, GPUs, thousandths of a core and bytes of memory of a machine."""


class Hardware:
    """What the fleet could hold if it were empty: for each kind of task, by region."""

    def __init__(self, machines: Mapping[str, tuple[MachineState, ...]]) -> None:
        self.supply = supply(machines)
        self.regions = tuple(sorted(machines))
        self._kinds: dict[tuple[str, str], dict[_Kind, int]] = {}
        self._merged: dict[str, dict[_Kind, int]] = {}
        """Of all clusters of a region."""
        for region, states in machines.items():
            for m in states:
                for kinds in (
                    self._kinds.setdefault((region, m.cluster), defaultdict(int)),
                    self._merged.setdefault(region, defaultdict(int)),
                ):
                    kinds[m.capacity, m.gpu_type, m.gpus, m.cpus_milli, m.memory_bytes] += 1
        self._known: dict[tuple[object, ...], tuple[tuple[str, str], ...]] = {}

    def clusters_for(self, job: JobRequest) -> tuple[tuple[str, str], ...]:
        """The (region, cluster) pairs that could hold all tasks of a job on machines of one of its GPU types.

        Only machines of its kinds of capacity count.
        """
        key = (
            job.tasks, job.gpus_per_task, job.gpu_types, job.cpus_milli_per_task, job.memory_bytes_per_task,
            job.capacity,
        )  # fmt: skip
        if key not in self._known:
            self._known[key] = tuple(sorted(place for place, kinds in self._kinds.items() if _holds(kinds, job)))
        return self._known[key]

    def regions_for(self, job: JobRequest) -> tuple[str, ...]:
        """The regions of which a cluster could hold a job, or all clusters together if it may span them."""
        able = {region for region, _ in self.clusters_for(job)}
        if job.span_clusters:
            able |= {region for region, kinds in self._merged.items() if _holds(kinds, job)}
        return tuple(sorted(able))

    def has_without_data(self, workload: Workload) -> bool:
        """Whether regions could hold a workload, and none of them is where its data is: it is not colocated."""
        if workload.regions is None:
            return False
        able = set.intersection(*(set(self.regions_for(job)) for job in workload.jobs))
        return bool(able) and able.isdisjoint(workload.regions)


def _holds(kinds: Mapping[_Kind, int], job: JobRequest) -> bool:
    wants = (job.gpus_per_task, job.cpus_milli_per_task, job.memory_bytes_per_task)
    room: dict[str | None, int] = defaultdict(int)
    for (capacity, gpu_type, *amounts), count in kinds.items():
        if capacity not in job.capacity:
            continue
        fit = min(amount // want for amount, want in zip(amounts, wants, strict=True) if want)
        room[gpu_type if job.gpus_per_task else None] += count * fit
    types: tuple[str | None, ...] = job.gpu_types if job.gpus_per_task else (None,)
    return any(room.get(gpu_type, 0) >= job.tasks for gpu_type in types)


class Completion:
    """Fills in what rows do not say, for one fleet and seed."""

    def __init__(self, fleet: SimulatedFleet, settings: Settings, seed: int) -> None:
        self._fleet, self._settings, self._seed = fleet, settings, seed
        self.hardware = Hardware(fleet.possible())
        self._jobs: dict[tuple[object, ...], JobRequest] = {}
        percent = settings.priority_percent
        self._levels = {**percent, 0: max(0.0, 100.0 - sum(percent.values()))}
        percent = settings.candidate_regions_percent
        self._counts = {**percent, EVERYWHERE: max(0.0, 100.0 - sum(percent.values()))}

    def unknown_types(self, rows: Iterable[TraceRow]) -> list[BadRow]:
        """Rows that name a GPU type which the fleet lacks."""
        known = ", ".join(self.hardware.supply) or "none"
        return [
            BadRow(row.line, "gpu_type", gpu_type, f"must be a GPU type of the fleet: {known}")
            for row in rows
            for gpu_type in row.gpu_types or ()
            if gpu_type not in self.hardware.supply
        ]

    def workload(self, row: TraceRow, arrives_s: float, zero_s: float, tenant: TenantState) -> Workload:
        """A row as a workload that arrives at a time of the row's clock, whose `zero_s` is the simulation's 0.

        Its level is its priority or its tenant's level, whichever is lower (a larger number).
        """
        whose = row.workload_id
        level = row.priority or pick(chance(self._seed, "priority", whose), self._levels) or LOWEST_LEVEL
        level = max(level, tenant.level)
        job = self._job(row, row.gpu_types or ())
        if row.gpus and row.gpu_types is None:
            job = self._job(row, self._drawn_type(row, job))
        return Workload(
            whose, row.tenant, level, row.submit_s - zero_s, arrives_s - zero_s, row.duration_s, (job,),
            self._regions(row, job),
        )  # fmt: skip

    def _job(self, row: TraceRow, types: tuple[str, ...]) -> JobRequest:
        s, gpus = self._settings, row.gpus_per_task
        cpus, memory = row.cpus_milli_per_task, row.memory_bytes_per_task
        if cpus is None:
            cpus = round(1000 * (s.cpus_per_gpu * gpus if gpus else s.cpus_without_gpu))
        if memory is None:
            memory = s.memory_bytes_per_gpu * gpus if gpus else s.memory_bytes_without_gpu
        key = (row.tasks, gpus, types, cpus, memory)
        return self._jobs.setdefault(key, JobRequest("main", row.tasks, gpus, types, cpus, memory))

    def _drawn_type(self, row: TraceRow, job: JobRequest) -> tuple[str, ...]:
        """In proportion to supply, of the types on which two regions could hold the gang (else one; else any)."""
        regions = {t: len(self.hardware.regions_for(replace(job, gpu_types=(t,)))) for t in self.hardware.supply}
        for least in (2, 1, 0):
            weights = {t: float(self.hardware.supply[t]) for t, count in regions.items() if count >= least}
            if any(weights.values()):
                return (pick(chance(self._seed, "gpu_type", row.workload_id), weights),)
        return ()

    def _regions(self, row: TraceRow, job: JobRequest) -> frozenset[str] | None:
        """Where its data is: drawn for the workload, or the regions that have all tables that the row names."""
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
    """Every tenant's level and quota, by name; and the rows of tenants for which there is none.

    Quotas by the fleet file's rule are shares of its supply, in proportion to what all of `rows` say.
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
            right = f"must be one of {', '.join(sorted(out))}, or the fleet file has `quotas`"
            bad.append(BadRow(row.line, "tenant", row.tenant, right))
            continue
        hours = row.gpus * row.duration_s / 3600
        weights[row.tenant] += {"gpu_hours": hours, "workloads": 1.0, "equal": 0.0}[rule.in_proportion_to]
    if rule is not None:
        if rule.in_proportion_to == "equal":
            weights = dict.fromkeys(weights, 1.0)
        out.update(quotas_by_rule(rule, weights, supply(fleet.possible())))
    return dict(sorted(out.items())), bad
