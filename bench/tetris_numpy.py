"""Finds a table's best region with numpy: for all regions at once, on the table's jobs only.

It is the baseline for the compiled moves; the benchmark first checks that both have the same results.
"""

import numpy as np

from tetris.columns import ML, NONE, Floats, Ints, Longs
from tetris.problem import PlacementProblem


def _sigmoid_less_half(over: Floats, mean: Floats) -> Floats:
    """Returns the penalty of an excess demand, in its shape: sigmoid(over / mean) - 1/2, or 1/2 where `mean` is 0."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        inside = 1 / (1 + np.exp(-over / mean)) - 0.5
    return np.where(over > 0, np.where(mean > 0, inside, 0.5), 0.0)


class Numpy:
    """A plan as arrays, for the objective only: CPU quotas, the home threshold and moved bytes are ignored."""

    def __init__(self, problem: PlacementProblem) -> None:
        """Takes the plan of a problem, which must not change afterwards; tables must have no replicas."""
        c = self.c = problem.columns
        self.home, self.demand, self.stored = problem.home, problem.state.demand, problem.state.stored
        levels = np.unique(c.priority)
        self.key = np.where(c.gpu_type == NONE, NONE, c.gpu_type * len(levels) + np.searchsorted(levels, c.priority))
        self.supply = np.repeat(c.supply_h, len(levels), axis=0)
        sums = self.supply.sum(axis=1, keepdims=True)
        self.share = np.divide(self.supply, sums, out=np.zeros_like(self.supply), where=sums > 0)
        count = np.maximum((self.supply > 0).sum(axis=1), 1)
        self.mean = (sums[:, 0] / count)[:, None]
        by_level = np.array([c.weights.by_priority.get(int(p), 1.0) for p in levels])
        self.importance = np.tile(by_level, len(c.gpu_types))
        self.per_byte = c.weight / c.size_bytes.sum()
        self.capacity_share = c.capacity_bytes / c.capacity_bytes.sum()
        order = np.argsort(c.job_table, kind="stable")
        self.table_job = np.repeat(np.arange(len(c.kind)), np.diff(c.job_start))[order]
        self.table_start = np.searchsorted(c.job_table[order], np.arange(len(c.home) + 1))

    def best(self, table: int) -> tuple[int, float]:
        """Returns the best region for a table, and the change of the objective if the table moves there."""
        c, w = self.c, self.c.weights
        regions = len(c.regions)
        jobs = self.table_job[self.table_start[table] : self.table_start[table + 1]]
        length = c.job_start[jobs + 1] - c.job_start[jobs]
        row = np.repeat(np.arange(len(jobs)), length)
        begin = np.repeat(c.job_start[jobs] - (np.cumsum(length) - length), length)
        edges = c.job_table[begin + np.arange(len(row))]
        homes, sizes = self.home[edges], c.size_bytes[edges]
        # Each candidate region has its own copy of the jobs, numbered after those of the region before.
        world = np.arange(regions)[:, None]
        there = np.where(edges == table, world, homes).ravel()
        numbers = (row + world * len(jobs)).ravel()
        region, here = self._regions(
            numbers, there, np.tile(sizes, regions), regions * len(jobs), np.tile(c.kind[jobs], regions)
        )
        region, here = region.reshape(regions, -1), here.reshape(regions, -1)
        at = int(self.home[table])
        read = -(self.per_byte[jobs] * (here - here[at])).sum(axis=1)
        touched, slot = np.unique(self.key[jobs], return_inverse=True)
        change = np.zeros((regions, len(touched), regions + 1))
        hours = np.where(self.key[jobs] == NONE, 0.0, c.gpu_h[jobs])
        np.add.at(change, (world, slot[None, :], region), hours)
        change -= change[at].copy()
        kept = touched != NONE
        demand = self.demand[touched[kept]] + change[:, kept, :regions]
        gpu = self._gpu(demand, touched[kept]).sum(axis=1)
        stored = self.stored + c.size_bytes[table] * (np.eye(regions) - np.eye(regions)[at])
        part = stored / stored.sum(axis=1, keepdims=True)
        storage = ((part - self.capacity_share) ** 2).sum(axis=1)
        total = w.read * read + w.gpu * (gpu - gpu[at]) + w.storage * (storage - storage[at])
        best = int(np.argmin(total))
        return best, float(total[best])

    def _regions(
        self, job: Longs, home: Ints, size: Floats, jobs: int, kind: "np.ndarray[tuple[int], np.dtype[np.int8]]"
    ) -> tuple[Longs, Floats]:
        """Returns [jobs] each job's region, and the bytes that it reads there; by the rules of `tetris.problem`."""
        regions = len(self.c.regions)
        cell = job * regions + home
        count = np.bincount(cell, minlength=jobs * regions).reshape(jobs, regions)
        held = np.bincount(cell, weights=size, minlength=jobs * regions).reshape(jobs, regions)
        most = count.max(axis=1)
        first = np.where(count == most[:, None], held, -1.0).argmax(axis=1)
        apart = (most == 0) | ((kind == ML) & (most < count.sum(axis=1)))
        region = np.where(apart, NONE, first)
        return region, np.where(apart, 0.0, held[np.arange(jobs), first])

    def _gpu(self, demand: Floats, keys: Longs) -> Floats:
        """Returns [..., keys] the GPU term of each type and level."""
        sums = demand.sum(axis=-1, keepdims=True)
        part = np.divide(demand, sums, out=np.zeros_like(demand), where=sums > 0)
        over = np.maximum(demand - self.supply[keys], 0.0)
        strain = _sigmoid_less_half(over, self.mean[keys])
        cost = (part - self.share[keys]) ** 2 + self.c.weights.overload * strain
        return np.asarray(self.importance[keys] * cost.sum(axis=-1), np.float64)
