"""Converts an instance for the branch and bound (`tetris.exact.kernels.layout`), and finds symmetries to break."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from tetris.columns import ML, NONE, Columns, Longs
from tetris.exact.kernels.layout import (
    ALIVE,
    HOME_H,
    MAY,
    N_NOW,
    N_NUMBERS,
    OPEN,
    ROUNDING,
    SURE,
    ExactConstants,
    Levels,
    Tree,
)
from tetris.kernels import layout
from tetris.kernels.layout import Fixed as GivenFixed


@dataclass(frozen=True, slots=True)
class JobGroup:
    """Jobs that read the same tables in the same way, so that all of them always run in the same region, or in none."""

    is_ml: bool
    """Whether the jobs need all tables in one region. Other jobs run where most of their tables are."""
    tables: tuple[int, ...]
    per_byte: float
    """Cost of a remotely read byte in the objective."""
    hours: tuple[tuple[int, float], ...]
    """(channel, hours) pairs: the channel is the key for GPU hours, and K + 1 + app for CPU hours."""


def groups_of(columns: Columns, given: GivenFixed) -> list[JobGroup]:
    """Returns the groups that have a cost or use resources, sorted by their tables."""
    c, apps_from = columns, len(given.supply) + 1
    per_byte: dict[tuple[bool, tuple[int, ...]], float] = defaultdict(float)
    hours: dict[tuple[bool, tuple[int, ...]], dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for job in range(len(c.kind)):
        tables = tuple(c.job_table[c.job_start[job] : c.job_start[job + 1]].tolist())
        if not tables:
            continue
        is_ml = bool(c.kind[job] == ML) or len(tables) == 1
        group = (is_ml, tuple(sorted(tables)) if is_ml else tables)
        per_byte[group] += float(given.number[layout.READ_WEIGHT] * given.job_amount[job, layout.READ_PER_BYTE])
        key, app = int(given.job[job, layout.KEY]), int(given.job[job, layout.APP])
        if key != NONE:
            hours[group][key] += float(c.gpu_h[job])
        if app != NONE:
            hours[group][apps_from + app] += float(c.cpu_h[job])
    return [
        JobGroup(*group, per_byte[group], tuple(sorted(hours[group].items())))
        for group in sorted(per_byte)
        if hours[group] or (len(group[1]) > 1 and per_byte[group] > 0)
    ]


def fixed_of(columns: Columns, given: GivenFixed, groups: Sequence[JobGroup]) -> ExactConstants:
    """Returns the constants for the compiled code. Those of terms and limits are taken from `tetris.problem`."""
    c, keys, number = columns, len(given.supply), given.number
    regions = len(c.regions)
    replicas = np.zeros(len(c.home), np.int64)
    replica_of = np.repeat(np.arange(len(c.home)), np.diff(c.replica_start))
    np.bitwise_or.at(replicas, replica_of, 1 << c.replica.astype(np.int64))
    base = np.zeros(regions)
    np.add.at(base, c.replica, c.size_bytes[replica_of])
    whole = np.zeros(keys + 1 + len(c.apps))
    for group in groups:
        for channel, amount in group.hours:
            whole[channel] += amount
    whole[keys] = base.sum() + c.size_bytes.sum()
    groups_of_table: list[list[int]] = [[] for _ in c.home]
    for index, group in enumerate(groups):
        for table in group.tables:
            groups_of_table[table].append(index)
    return ExactConstants(
        size=c.size_bytes.copy(),
        start=c.home.astype(np.int64),
        replicas=replicas,
        twin=_twins(c, replicas, [[groups[g] for g in found] for found in groups_of_table]),
        table_start=_starts([len(found) for found in groups_of_table]),
        table_group=_flat(groups_of_table),
        group_start=_starts([len(g.tables) for g in groups]),
        group_table=_flat([g.tables for g in groups]),
        is_ml=np.array([g.is_ml for g in groups], np.bool_),
        per_byte=np.array([g.per_byte for g in groups], np.float64),
        amount_start=_starts([len(g.hours) for g in groups]),
        amount=np.array([amount for g in groups for _, amount in g.hours], np.float64),
        channel=np.array([channel for g in groups for channel, _ in g.hours], np.int64),
        whole=whole,
        base=base,
        share=np.vstack((given.share, given.capacity_share)),
        supply=given.supply,
        mean=given.mean,
        weight=np.append(number[layout.GPU_WEIGHT] * given.importance, number[layout.STORAGE_WEIGHT]),
        overload=float(number[layout.OVERLOAD]),
        at_home=given.at_home.astype(np.int64) @ (1 << np.arange(regions, dtype=np.int64)),
        limit=np.vstack((given.capacity, given.quota)),
        allowed=np.vstack((given.capacity_allowed, given.quota_allowed)),
        scale=np.append(number[layout.STORED_SCALE], given.quota_scale),
        wanted_h=float(number[layout.WANTED_H] - ROUNDING * number[layout.ALL_H]),
        move_quota=float(number[layout.MOVE_QUOTA] * (1 + ROUNDING)),
    )


def cells_of(columns: Columns, given: GivenFixed, groups: Sequence[JobGroup]) -> int:
    """Returns the number of values that `levels_of` needs for all tables."""
    regions, channels = len(columns.regions), len(given.supply) + 1 + len(columns.apps)
    return (len(columns.home) + 1) * (2 * channels * (regions + 3) + 3 * len(groups) + N_NOW)


def levels_of(fixed: ExactConstants, depth: int) -> Levels:
    """Allocates levels 0 to `depth`, and fills level 0, which has no decisions."""
    keys, regions = fixed.supply.shape
    channels, groups, tables = len(fixed.whole), len(fixed.is_ml), len(fixed.size)
    some = max(1, groups)
    float_shapes = {
        "low": (channels, regions),
        "high": (channels, regions),
        "sums": (channels, 2),
        "cost": (keys + 1,),
        "lack": (channels - keys,),
        "read": (some,),
        "now": (N_NOW,),
    }
    int_shapes = {"counts": (channels, 3), "mask": (some,), "settled": (some,)}
    floats, float_views = _views(np.dtype(np.float64), depth + 1, float_shapes)
    ints, int_views = _views(np.dtype(np.int64), depth + 1, int_shapes)
    levels = Levels(floats=floats, ints=ints, **float_views, **int_views)
    levels.mask[0] = (1 << regions) - 1
    for group in range(groups):
        is_sure = not fixed.is_ml[group] or fixed.group_start[group + 1] - fixed.group_start[group] == 1
        for entry in range(fixed.amount_start[group], fixed.amount_start[group + 1]):
            channel, amount = fixed.channel[entry], fixed.amount[entry]
            levels.high[0, channel] += amount
            levels.sums[0, channel, MAY] += amount
            levels.sums[0, channel, SURE] += amount if is_sure else 0.0
            levels.counts[0, channel, ALIVE] += 1
            levels.counts[0, channel, OPEN] += 1
            if channel < keys and fixed.at_home[channel]:
                levels.now[0, HOME_H] += amount
    levels.low[0, keys] = levels.high[0, keys] = fixed.base
    levels.sums[0, keys] = fixed.base.sum()
    levels.counts[0, keys, ALIVE] = int(fixed.base.sum() > 0)
    for table in range(tables):
        size, replicas = fixed.size[table], int(fixed.replicas[table])
        if size > 0:
            levels.high[0, keys] += [0.0 if replicas >> r & 1 else size for r in range(regions)]
            levels.sums[0, keys, MAY] += size
            levels.sums[0, keys, SURE] += 0.0 if replicas else size
            levels.counts[0, keys, ALIVE] += 1
            levels.counts[0, keys, OPEN] += 1
    return levels


def tree_of(fixed: ExactConstants, depth: int) -> Tree:
    """Creates the tree of a new search."""
    tables, regions = len(fixed.size), len(fixed.base)
    return Tree(
        home=np.full(tables, NONE, np.int64),
        domain=np.full((depth + 1, tables), (1 << regions) - 1, np.int64),
        table=np.zeros(depth + 1, np.int64),
        child=np.zeros((depth + 1, regions), np.int64),
        bound=np.zeros((depth + 1, regions)),
        children=np.full(depth + 1, NONE, np.int64),
        next=np.zeros(depth + 1, np.int64),
        tried=np.zeros(regions),
        room=np.zeros((2, regions)),
        best_home=fixed.start.copy(),
        best=np.zeros(1),
        number=np.zeros(N_NUMBERS, np.int64),
    )


def _views(
    kind: np.dtype[Any], depth: int, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[npt.NDArray[Any], dict[str, npt.NDArray[Any]]]:
    """Returns an array of `depth` + 1 rows, and views of its columns by name and shape.

    There is an extra column and an extra row, so that all views are non-contiguous: the compiled code is specialised
    for views with gaps between rows.
    """
    whole = np.zeros((depth + 1, 1 + sum(math.prod(shape) for shape in shapes.values())), kind)
    views, at = {}, 0
    for name, shape in shapes.items():
        columns = whole[:, at : at + math.prod(shape)]
        views[name] = np.lib.stride_tricks.as_strided(
            columns, (depth + 1, *shape), (columns.strides[0], *np.empty(shape, kind).strides)
        )
        at += math.prod(shape)
    return whole, views


def _twins(columns: Columns, replicas: Longs, groups: Sequence[Sequence[JobGroup]]) -> Longs:
    """Returns [T, 2] the previous and next table among interchangeable tables (symmetry breaking).

    Interchangeable tables have the same size, home and replicas, and equivalent jobs. `groups` has the groups of each
    table.
    """
    c = columns
    alike: dict[object, list[list[int]]] = defaultdict(list)
    for t, found in enumerate(groups):
        jobs = tuple(sorted((g.is_ml, len(g.tables), g.per_byte, g.hours) for g in found))
        classes = alike[float(c.size_bytes[t]), int(c.home[t]), int(replicas[t]), jobs]
        for members in classes:
            if _exchangeable(groups, members[0], t):
                members.append(t)
                break
        else:
            classes.append([t])
    twin = np.full((len(c.home), 2), NONE, np.int64)
    for members in (m for classes in alike.values() for m in classes):
        for before, after in pairwise(members):
            twin[before, 1], twin[after, 0] = after, before
    return twin


def _exchangeable(groups: Sequence[Sequence[JobGroup]], one: int, other: int) -> bool:
    """Returns whether the groups of jobs stay the same if the two tables (of equal size) are swapped."""

    def seen(table: int) -> list[tuple[bool, list[int], float, tuple[tuple[int, float], ...]]]:
        swap = {one: NONE, other: NONE}
        return sorted((g.is_ml, sorted(swap.get(t, t) for t in g.tables), g.per_byte, g.hours) for g in groups[table])

    return seen(one) == seen(other)


def _starts(lengths: Sequence[int]) -> Longs:
    return np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))).astype(np.int64)


def _flat(lists: Sequence[Sequence[int]]) -> Longs:
    return np.array([entry for entries in lists for entry in entries], np.int64)
