"""From an instance of Tetris with its homes and replicas to a scenario: a day of its jobs on its regions' hardware.

What an instance does not say is drawn by a hash of the seed and the job's name, as where a trace is silent.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, log2

import numpy as np

from domain.scheduling import JobRequest, MachineState, TenantState
from simulation.fleet import supply
from simulation.random_draws import chance
from simulation.run import Scenario
from simulation.settings import Settings
from simulation.supply.sources import Machines
from simulation.synthetic import GANG_GPUS, lognormal_at
from simulation.workloads import DAY_S, Workload
from tetris.columns import ML, NONE, Columns, Ints
from tetris.documents import ReplicaEntry
from tetris.needed import Needed
from tetris.replicas import Flags, Parts, candidate_regions

TENANT = "jobs"
"""The only tenant, within its quota with all that it asks for: an instance knows no tenants, so levels decide."""
FIVE_MINUTES = Settings(tick_spacing_s=300)
"""MAST 5.4: a pass over the queue every five minutes still gives good schedules."""
_DAY_H = 24.0
_SHORTEST_H = 1 / 60
_PER_MACHINE, _PER_RACK = 8, 16


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the data is."""

    held: Parts | Flags
    """[T, R] part of each table that is in a region; with `needed`, which pieces are there [T + P, R]."""
    needed: Needed | None = None
    """What jobs read of their tables; None: all of them."""


def placement_of(
    columns: Columns, home: Ints, replicas: Sequence[ReplicaEntry] | None, needed: Needed | None = None
) -> Placement:
    """The homes [T] and the replicas; None: those that the instance has, which are used up and left as homes move.

    Raises:
        ValueError: a replica has a partition that no job needs.
    """
    needed = Needed.of(columns) if needed is None else needed
    whole = np.zeros((len(home), len(columns.regions)), np.bool_)
    if replicas is None:
        owner = np.repeat(np.arange(len(home)), np.diff(columns.replica_start))
        whole[owner, columns.replica] = True
    whole[np.arange(len(home)), home] = True
    region, table = ({name: n for n, name in enumerate(names)} for names in (columns.regions, columns.table_names))
    for one in replicas or ():
        if one.partitions is None:
            whole[table[one.table], region[one.region]] = True
    pieces = needed.expand(whole).copy()
    number = {name: len(home) + n for n, name in enumerate(needed.partition_names)}
    for index, one in enumerate(replicas or ()):
        for name in one.partitions or ():
            if name not in number:
                raise ValueError(
                    f"replicas.{index}.partitions: {name!r} is read by no job: give the reads that the replicas are for"
                )
            pieces[number[name], region[one.region]] = True
    return Placement(pieces, needed)


def day_of(
    columns: Columns,
    placement: Placement,
    *,
    seed: int = 0,
    days: int = 1,
    settings: Settings = FIVE_MINUTES,
) -> Scenario:
    """Every ML job on GPUs once a day, at a moment of its own; the last of `days` is measured.

    A region's hours of supply are those of a day, on machines of 8 GPUs. A job's hours become a gang with MAST's
    quantiles, which works no longer than a day, and is at most half of the smallest region that has its type where that
    lets it. Spark's and Presto's jobs have schedulers of their own.
    """
    machines = _machines(columns)
    possible = candidate_regions(columns, placement.held, placement.needed)
    smallest = [min((h for h in row if h > 0), default=0.0) / _DAY_H for row in columns.supply_h]
    workloads = []
    for job, (kind, gpu_type, hours) in enumerate(zip(columns.kind, columns.gpu_type, columns.gpu_h, strict=True)):
        if kind != ML or gpu_type == NONE or hours <= 0:
            continue
        name = columns.job_names[job]
        gang = _gang(
            columns.gpu_types[gpu_type], float(hours), smallest[gpu_type], chance(seed, "gpus", name), settings
        )
        regions = frozenset(columns.regions[r] for r in possible[job].nonzero()[0])
        at_s = DAY_S * chance(seed, "arrival", name)
        duration_s = float(hours) / gang.gpus * 3600
        for day in range(days):
            whose = name if day == 0 else f"{name}~{day + 1}"
            submit_s = day * DAY_S + at_s
            level = int(columns.priority[job])
            workloads.append(Workload(whose, TENANT, level, submit_s, submit_s, duration_s, (gang,), regions))
    asked = {gpu_type: sum(w.gpus for w in workloads) for gpu_type in supply(machines)}
    tenants = {TENANT: TenantState(TENANT, 1, asked, None, 0.0)}
    return Scenario(
        machines, tenants, workloads, settings, seed, days * DAY_S, (days - 1) * DAY_S,
        says={"tables": len(columns.table_names), "jobs": len(columns.job_names), "days": days},
    )  # fmt: skip


def _gang(gpu_type: str, hours: float, smallest: float, at: float, settings: Settings) -> JobRequest:
    """A power of two, so that many ask for the same; more where a day would not be enough."""
    wanted = min(lognormal_at(*GANG_GPUS, at), hours / _SHORTEST_H, smallest / 2)
    gpus = max(2 ** int(log2(max(wanted, 1.0))), ceil(hours / _DAY_H))
    tasks = ceil(gpus / _PER_MACHINE)
    each = ceil(gpus / tasks)
    cpus, memory = round(1000 * settings.cpus_per_gpu * each), settings.memory_bytes_per_gpu * each
    return JobRequest("main", tasks, each, (gpu_type,), cpus, memory)


def _machines(columns: Columns) -> Machines:
    return {region: tuple(_region(columns, number, region)) for number, region in enumerate(columns.regions)}


def _region(columns: Columns, number: int, region: str) -> Iterator[MachineState]:
    for gpu_type, row in zip(columns.gpu_types, columns.supply_h, strict=True):
        left = max(1, round(row[number] / _DAY_H)) if row[number] > 0 else 0
        for machine in range(ceil(left / _PER_MACHINE)):
            gpus = min(_PER_MACHINE, left - machine * _PER_MACHINE)
            rack = f"{gpu_type}-{machine // _PER_RACK}"
            # Twice what a gang asks for by default: only GPUs are short.
            amounts = 8000 * gpus, (64 << 30) * gpus
            id_ = f"{region}/{gpu_type}/m{machine:05d}"
            yield MachineState(id_, "ml", rack, gpu_type, gpus, gpus, *amounts, *amounts)
