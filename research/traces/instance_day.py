"""Builds a scenario from a Tetris instance with its homes and replicas: a day of its jobs on its regions' hardware.

Values that the instance does not contain are drawn by a hash of the seed and the job's name, as for a trace.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, log2

import numpy as np

from domain.scheduling import JobRequest, MachineState, TenantState
from research.traces.settings import TraceSettings
from research.traces.synthetic import GANG_GPUS, lognormal_at
from research.traces.workloads import DAY_S
from simulation.hardware import supply
from simulation.random_draws import chance
from simulation.run import Scenario
from simulation.supply import Machines
from simulation.workloads import SimulatedWorkload
from tetris.columns import ML, NONE, Columns, Ints
from tetris.documents import ReplicaEntry
from tetris.pieces import RequiredPieces
from tetris.replicas import Flags, Parts, candidate_regions

TENANT = "jobs"
"""The only tenant, whose quota covers all its workloads: an instance has no tenants, so only priority levels matter."""
FIVE_MINUTES = TraceSettings(tick_spacing_s=300)
"""MAST 5.4: a pass over the queue every five minutes still gives good schedules."""
_DAY_H = 24.0
_SHORTEST_H = 1 / 60
_PER_MACHINE, _PER_RACK = 8, 16


@dataclass(frozen=True, slots=True)
class Placement:
    """The regions that hold the data."""

    held: Parts | Flags
    """[T, R] fraction of each table that a region holds; with `needed`, [T + P, R] whether a region holds a piece."""
    needed: RequiredPieces | None = None
    """The partitions that jobs read; None: jobs read whole tables."""


def placement_of(
    columns: Columns, home: Ints, replicas: Sequence[ReplicaEntry] | None, needed: RequiredPieces | None = None
) -> Placement:
    """Returns the placement in which `home[t]` is the home of table t. `replicas`: None: those of the instance.

    Raises:
        ValueError: a replica lists a partition that no job reads.
    """
    needed = RequiredPieces.of(columns) if needed is None else needed
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
                    f"replicas.{index}.partitions: {name!r} is read by no job: pass the reads that the replicas serve"
                )
            pieces[number[name], region[one.region]] = True
    return Placement(pieces, needed)


def day_of(
    columns: Columns,
    placement: Placement,
    *,
    seed: int = 0,
    days: int = 1,
    settings: TraceSettings = FIVE_MINUTES,
) -> Scenario:
    """Returns a scenario in which every ML job on GPUs is submitted once a day, at a random time of the day.

    The last of `days` is measured. A region's supply in GPU hours is the capacity of one day, on machines of 8 GPUs.
    The GPU hours of a job become one gang, whose size is drawn from MAST's quantiles. A gang works at most a day.
    Unless that requires more GPUs, it has at most half of the GPUs of the smallest region with its GPU type. Spark and
    Presto jobs are left out: they have their own schedulers.
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
            workloads.append(SimulatedWorkload(whose, TENANT, level, submit_s, submit_s, duration_s, (gang,), regions))
    asked = {gpu_type: sum(w.gpus for w in workloads) for gpu_type in supply(machines)}
    tenants = {TENANT: TenantState(TENANT, 1, asked, None, 0.0)}
    return Scenario(
        machines, tenants, workloads, settings, seed, days * DAY_S, (days - 1) * DAY_S,
        says={"tables": len(columns.table_names), "jobs": len(columns.job_names), "days": days},
    )  # fmt: skip


def _gang(gpu_type: str, hours: float, smallest: float, at: float, settings: TraceSettings) -> JobRequest:
    """Returns a gang whose GPU count is a power of two, so that many gangs are alike; or more, to finish in a day."""
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
            # Twice the CPUs and memory that a gang requests by default, so that only GPUs are scarce.
            amounts = 8000 * gpus, (64 << 30) * gpus
            id_ = f"{region}/{gpu_type}/m{machine:05d}"
            yield MachineState(id_, "ml", rack, gpu_type, gpus, gpus, *amounts, *amounts)
