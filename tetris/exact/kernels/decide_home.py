"""Decides a table's home: copies a level, and updates the copy for the decision."""

import math
from typing import NamedTuple

from domain.compiled import compiled
from tetris.exact.kernels.bounds import apart_bound, lack_bound, overload_bound
from tetris.exact.kernels.layout import (
    ALIVE,
    BOUND,
    CHANGED,
    F8,
    HOME_H,
    I8,
    LACK,
    MAY,
    MOVED,
    NONE,
    OPEN,
    READ,
    SLACK,
    SURE,
    ExactConstants,
    Levels,
    Tree,
)


class _Channel(NamedTuple):
    """The bounds of one channel on one level."""

    low: F8
    high: F8
    sums: F8
    counts: I8


@compiled
def _channel(levels: Levels, level: int, channel: int) -> _Channel:
    return _Channel(
        levels.low[level, channel], levels.high[level, channel], levels.sums[level, channel],
        levels.counts[level, channel],
    )  # fmt: skip


@compiled
def decide_home(
    fixed: ExactConstants, levels: Levels, tree: Tree, level: int, table: int, region: int, enough: float
) -> None:
    """Computes level `level` + 1 by deciding the table's home; sets `tree.home`. `enough` is as in `weigh`."""
    after = level + 1
    for entry in range(levels.floats.shape[1]):
        levels.floats[after, entry] = levels.floats[level, entry]
    for entry in range(levels.ints.shape[1]):
        levels.ints[after, entry] = levels.ints[level, entry]
    for channel in range(levels.counts.shape[1]):
        levels.counts[after, channel, CHANGED] = 0
    tree.home[table] = region
    held = (fixed.replicas[table] >> region) & 1
    if not held and region != fixed.start[table]:
        levels.now[after, MOVED] += fixed.size[table]
    if fixed.size[table] > 0.0:
        storage = fixed.supply.shape[0]
        was = (1 << fixed.supply.shape[1]) - 1 & ~fixed.replicas[table]
        target = 0 if held else 1 << region
        _shift(_channel(levels, after, storage), fixed.size[table], was, fixed.replicas[table] == 0, target, True)
    _regroup(fixed, levels, tree, after, table)
    weigh(fixed, levels, level, after, enough)


@compiled
def _shift(channel: _Channel, amount: float, was: int, was_sure: bool, mask: int, settled: bool) -> None:
    """Restricts the possible regions (bit masks) of an amount from `was` to `mask`.

    `was_sure`: the amount was already certain to be in some region. `settled`: its region, or that it has none, is
    final.
    """
    low, high, sums, counts = channel
    gone = was & ~mask
    region = 0
    while gone:
        if gone & 1:
            high[region] -= amount
        gone >>= 1
        region += 1
    counts[CHANGED] = 1
    if mask == 0:
        sums[MAY] -= amount
        counts[ALIVE] -= 1
    if not settled:
        return
    counts[OPEN] -= 1
    if mask == 0:
        return
    if not was_sure:
        sums[SURE] += amount
    region = 0
    while not (mask >> region) & 1:
        region += 1
    low[region] += amount


@compiled
def _regroup(fixed: ExactConstants, levels: Levels, tree: Tree, level: int, table: int) -> None:
    """Updates the possible regions and the read bounds of the table's groups after its home was decided."""
    now = levels.now[level]
    for index in range(fixed.table_start[table], fixed.table_start[table + 1]):
        group = fixed.table_group[index]
        was, was_settled, is_ml = levels.mask[level, group], levels.settled[level, group] == 1, fixed.is_ml[group]
        if was_settled and is_ml:
            continue
        tables = fixed.group_table[fixed.group_start[group] : fixed.group_start[group + 1]]
        if is_ml:
            mask, settled, bytes_away = _ml(tables, tree.home, fixed.size)
        else:
            mask, settled, bytes_away = _most(tables, tree.home, fixed.size, tree.room)
        read = fixed.per_byte[group] * bytes_away
        now[READ] += read - levels.read[level, group]
        levels.read[level, group] = read
        levels.mask[level, group] = mask
        levels.settled[level, group] = 1 if settled else 0
        if was_settled or (mask == was and not settled):
            continue
        was_sure = tables.shape[0] == 1 or not is_ml
        for entry in range(fixed.amount_start[group], fixed.amount_start[group + 1]):
            channel, amount = fixed.channel[entry], fixed.amount[entry]
            _shift(_channel(levels, level, channel), amount, was, was_sure, mask, settled)
            if channel < fixed.at_home.shape[0]:
                home = fixed.at_home[channel]
                if was & home and not mask & home:
                    now[HOME_H] -= amount


@compiled
def _ml(tables: I8, homes: I8, size: F8) -> tuple[int, bool, float]:
    """Returns possible regions, whether they are final, and the least remotely read bytes of an ML group."""
    common, left, all_bytes = NONE, 0, 0.0
    apart = False
    for table in tables:
        home = homes[table]
        all_bytes += size[table]
        if home == NONE:
            left += 1
        elif common == NONE:
            common = home
        elif home != common:
            apart = True
    if apart:
        return 0, True, all_bytes
    return 1 << common, left == 0, 0.0


@compiled
def _most(tables: I8, homes: I8, sizes: F8, room: F8) -> tuple[int, bool, float]:
    """Returns the same values for a group that runs where most of its tables are (ties: more bytes, then name).

    A region is possible if it wins when all undecided tables go there. The remotely read bytes are at least those of
    the tables that were decided to be in other regions.
    """
    count, size = room[0], room[1]
    for region in range(count.shape[0]):
        count[region], size[region] = 0.0, 0.0
    left, left_bytes, decided_bytes = 0.0, 0.0, 0.0
    for table in tables:
        home = homes[table]
        if home == NONE:
            left += 1.0
            left_bytes += sizes[table]
        else:
            count[home] += 1.0
            size[home] += sizes[table]
            decided_bytes += sizes[table]
    mask, wins = 0, 0
    here = 0.0
    for region in range(count.shape[0]):
        if _can_win(count, size, region, left, left_bytes):
            mask |= 1 << region
            wins += 1
            here = max(here, size[region])
    return mask, wins == 1, max(0.0, decided_bytes - here)


@compiled
def _can_win(count: F8, size: F8, region: int, left: float, left_bytes: float) -> bool:
    mine, bytes_mine = count[region] + left, size[region] + left_bytes
    if mine == 0.0:
        return False
    # Sums in a different order differ by rounding, so possible ties are kept until all tables are decided.
    unsure = SLACK * bytes_mine if left > 0.0 else 0.0
    for other in range(count.shape[0]):
        if other == region or count[other] < mine:
            continue
        if count[other] > mine or size[other] > bytes_mine + unsure:
            return False
        if left == 0.0 and size[other] == bytes_mine and other < region:
            return False
    return True


@compiled
def weigh(fixed: ExactConstants, levels: Levels, before: int, level: int, enough: float) -> None:
    """Computes the lower bounds at a level of the search tree, from those at level `before` and the changed channels.

    If `before` equals `level`, all channels are computed. The function returns early if the bound reaches `enough`, or
    if a limit on moves or demand is violated, because the search then prunes this node.
    """
    now, keys = levels.now[level], fixed.supply.shape[0]
    if now[HOME_H] < fixed.wanted_h or now[MOVED] > fixed.move_quota:
        now[LACK] = math.inf
        return
    at_least = levels.now[before, BOUND] + now[READ] - levels.now[before, READ]
    for channel in range(levels.low.shape[1]):
        if before != level:
            if at_least >= enough:
                now[BOUND] = at_least
                return
            if levels.counts[level, channel, CHANGED] == 0:
                continue
        low, high, slack = levels.low[level, channel], levels.high[level, channel], SLACK * fixed.whole[channel]
        sure, may = levels.sums[level, channel, SURE], levels.sums[level, channel, MAY]
        is_empty, is_settled = levels.counts[level, channel, ALIVE] == 0, levels.counts[level, channel, OPEN] == 0
        if channel <= keys:
            cost = apart_bound(low, high, fixed.share[channel], sure, may, slack, is_empty, is_settled)
            if channel < keys:
                supply, mean = fixed.supply[channel], fixed.mean[channel]
                cost += fixed.overload * overload_bound(low, high, supply, mean, sure, slack, is_settled)
            levels.cost[level, channel] = fixed.weight[channel] * cost
            at_least += levels.cost[level, channel] - levels.cost[before, channel]
        if channel >= keys:
            row = channel - keys
            over = lack_bound(low, high, fixed.limit[row], fixed.allowed[row], sure, slack, is_settled)
            levels.lack[level, row] = over / fixed.scale[row]
            if over == math.inf:
                now[LACK] = math.inf
                return
    # Sums are computed from scratch, because differences would accumulate rounding errors.
    bound, lack = now[READ], 0.0
    for channel in range(keys + 1):
        bound += levels.cost[level, channel]
    for row in range(levels.lack.shape[1]):
        lack += levels.lack[level, row]
    now[BOUND], now[LACK] = bound, lack
