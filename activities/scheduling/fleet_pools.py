"""The free amounts of a fleet as pools and machines, for the forecast of starts (`gms.starts`)."""

from collections.abc import Mapping, Sequence

import numpy as np

from domain.scheduling import Holding
from gms.starts.kernels import I8, FreeMachines
from rms.machines import CPUS_MILLI, GPUS
from rms.region import RegionColumns

MOST_POOLS = 62
"""The pools of a workload are bits of a signed integer. Others are not considered."""
CPUS = ""
"""Stands for the GPU type of workloads without GPUs, whose amounts are thousandths of a core."""
Pool = tuple[str, str]
"""Region and GPU type."""


class FleetPools:
    """The pools of all regions: GPUs of one type on machines, or the CPUs of a region, whose machines do not count."""

    def __init__(self, regions: Mapping[str, RegionColumns]) -> None:
        """`regions` are as of now; later changes of them are not seen."""
        self._regions = regions
        names = sorted((name, kind) for name, region in regions.items() for kind in (CPUS, *region.types))
        self.pools: dict[Pool, int] = {pool: number for number, pool in enumerate(names[:MOST_POOLS])}
        self.free = [0] * len(self.pools)
        """The free amount of each pool of CPUs; 0 for the others."""
        self._numbers: dict[str, I8] = {}
        pools, free, count = [np.empty(0, np.int64)], [np.empty(0, np.int64)], 0
        for name, region in regions.items():
            columns = region.machines
            if (name, CPUS) in self.pools:
                self.free[self.pools[name, CPUS]] = int(columns.kind_free[CPUS_MILLI].sum())
            # Machines without GPUs have the last entry, because their type is -1.
            of_type = np.full(len(region.types) + 1, -1, np.int64)
            for gpu_type, number in region.types.items():
                of_type[number] = self.pools.get((name, gpu_type), -1)
            pool = of_type[columns.kind_type[columns.kind]]
            known = pool >= 0
            self._numbers[name] = np.where(known, count + np.cumsum(known) - 1, -1)
            pools.append(pool[known])
            free.append(np.maximum(columns.free[GPUS][known], 0))
            count += int(known.sum())
        self.machines = FreeMachines(np.concatenate(pools), np.concatenate(free))

    def gpus_on(self, region: str, pool: int, holdings: Sequence[Holding]) -> tuple[tuple[int, int], ...]:
        """Returns (machine, GPUs) of the holdings on open machines of a pool, by number in `machines`."""
        columns, found = self._regions[region], []
        for h in holdings:
            row = columns.row(h.machine) if h.gpus else None
            if row is not None:
                number = int(self._numbers[region][row])
                if number >= 0 and self.machines.pool[number] == pool:
                    found.append((number, h.gpus))
        return tuple(found)
