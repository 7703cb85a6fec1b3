"""Deciding a table's home: a level is copied, and what follows from the decision is changed in the copy."""

import math

from domain.compiled import compiled
from tetris.exact.kernels.bounds import apart_bound, lack_bound, overload_bound
from tetris.exact.kernels.layout import BOUND, F8, HOME_H, LACK, MOVED, NONE, READ, SLACK, Fixed, Levels, Tree


@compiled
def place(fixed: Fixed, levels: Levels, tree: Tree, level: int, table: int, region: int, enough: float) -> None:
    """Make level + 1 of `level` and of the table's home; sets `tree.home`. `enough` is as in `weigh`."""
    after = level + 1
    for entry in range(levels.floats.shape[1]):
        levels.floats[after, entry] = levels.floats[level, entry]
    for entry in range(levels.ints.shape[1]):
        levels.ints[after, entry] = levels.ints[level, entry]
    now, storage = levels.now[after], fixed.supply.shape[0]
    tree.home[table] = region
    held = (fixed.replicas[table] >> region) & 1
    if not held and region != fixed.start[table]:
        now[MOVED] += fixed.size[table]
    if fixed.size[table] > 0.0:
        every = (1 << levels.low.shape[2]) - 1
        target = 0 if held else 1 << region
        replicas = fixed.replicas[table]
        _shift(levels, after, storage, fixed.size[table], every & ~replicas, replicas == 0, target, True)
    for entry in range(fixed.table_start[table], fixed.table_start[table + 1]):
        _regroup(fixed, levels, tree, after, fixed.table_group[entry])
    weigh(fixed, levels, level, after, enough)


@compiled
def _shift(
    levels: Levels, level: int, channel: int, amount: float, was: int, was_sure: bool, mask: int, settled: bool
) -> None:
    """An amount that could be in the regions `was` can be in those of `mask` only."""
    high = levels.high[level, channel]
    gone = was & ~mask
    region = 0
    while gone:
        if gone & 1:
            high[region] -= amount
        gone >>= 1
        region += 1
    if mask == 0:
        levels.may[level, channel] -= amount
        levels.alive[level, channel] -= 1
    if not settled:
        return
    levels.open[level, channel] -= 1
    if mask == 0:
        return
    if not was_sure:
        levels.sure[level, channel] += amount
    region = 0
    while not (mask >> region) & 1:
        region += 1
    levels.low[level, channel, region] += amount


@compiled
def _regroup(fixed: Fixed, levels: Levels, tree: Tree, level: int, group: int) -> None:
    """Where a group may run, after one of its tables was decided."""
    was = levels.mask[level, group]
    if levels.settled[level, group]:
        if not fixed.is_ml[group]:
            _read_at(fixed, levels, tree, level, group)
        return
    single = fixed.group_start[group + 1] - fixed.group_start[group] == 1
    was_sure = single or not fixed.is_ml[group]
    if fixed.is_ml[group]:
        mask, settled, read = _ml(fixed, tree, group)
    else:
        mask, settled, read = _most(fixed, tree, group)
    levels.now[level, READ] += read - levels.read[level, group]
    levels.read[level, group] = read
    levels.mask[level, group] = mask
    levels.settled[level, group] = 1 if settled else 0
    if mask == was and not settled:
        return
    for entry in range(fixed.amount_start[group], fixed.amount_start[group + 1]):
        channel, amount = fixed.channel[entry], fixed.amount[entry]
        _shift(levels, level, channel, amount, was, was_sure, mask, settled)
        if channel < fixed.at_home.shape[0]:
            home = fixed.at_home[channel]
            if was & home and not mask & home:
                levels.now[level, HOME_H] -= amount


@compiled
def _ml(fixed: Fixed, tree: Tree, group: int) -> tuple[int, bool, float]:
    """The regions, whether that is settled, and the least read of a group that needs all its tables in one region."""
    common, left, all_bytes = NONE, 0, 0.0
    apart = False
    for entry in range(fixed.group_start[group], fixed.group_start[group + 1]):
        table = fixed.group_table[entry]
        home = tree.home[table]
        all_bytes += fixed.size[table]
        if home == NONE:
            left += 1
        elif common == NONE:
            common = home
        elif home != common:
            apart = True
    if apart:
        return 0, True, fixed.per_byte[group] * all_bytes
    return 1 << common, left == 0, 0.0


@compiled
def _most(fixed: Fixed, tree: Tree, group: int) -> tuple[int, bool, float]:
    """The same of a group that runs where most of its tables are (a tie: more bytes, then the first name).

    A region can win if it does when all that is undecided goes there. What is read there is at least what was decided
    to be elsewhere.
    """
    count, size = tree.room[0], tree.room[1]
    for region in range(count.shape[0]):
        count[region], size[region] = 0.0, 0.0
    left, left_bytes, decided_bytes = 0.0, 0.0, 0.0
    for entry in range(fixed.group_start[group], fixed.group_start[group + 1]):
        table = fixed.group_table[entry]
        home = tree.home[table]
        if home == NONE:
            left += 1.0
            left_bytes += fixed.size[table]
        else:
            count[home] += 1.0
            size[home] += fixed.size[table]
            decided_bytes += fixed.size[table]
    mask, wins = 0, 0
    here = 0.0
    for region in range(count.shape[0]):
        if _can_win(count, size, region, left, left_bytes):
            mask |= 1 << region
            wins += 1
            here = max(here, size[region])
    return mask, wins == 1, fixed.per_byte[group] * max(0.0, decided_bytes - here)


@compiled
def _can_win(count: F8, size: F8, region: int, left: float, left_bytes: float) -> bool:
    mine, bytes_mine = count[region] + left, size[region] + left_bytes
    if mine == 0.0:
        return False
    # Sums in another order differ by rounding: what could be a tie stays possible until all is decided.
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
def _read_at(fixed: Fixed, levels: Levels, tree: Tree, level: int, group: int) -> None:
    """The least read of a group whose region is settled while some of its tables are not."""
    here = levels.mask[level, group]
    away = 0.0
    for entry in range(fixed.group_start[group], fixed.group_start[group + 1]):
        table = fixed.group_table[entry]
        home = tree.home[table]
        if home != NONE and not (here >> home) & 1:
            away += fixed.size[table]
    read = fixed.per_byte[group] * away
    levels.now[level, READ] += read - levels.read[level, group]
    levels.read[level, group] = read


@compiled
def weigh(fixed: Fixed, levels: Levels, before: int, level: int, enough: float) -> None:
    """The bounds of a level; unless it is its own `before`, only of channels in which something changed.

    It ends early once the objective is `enough` for certain, or more is broken than is allowed: the level is of no use.
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
            if not _differs(levels, before, level, channel):
                continue
        low, high, slack = levels.low[level, channel], levels.high[level, channel], SLACK * fixed.whole[channel]
        sure, may = levels.sure[level, channel], levels.may[level, channel]
        is_empty, is_settled = levels.alive[level, channel] == 0, levels.open[level, channel] == 0
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
    # Summed up anew: differences would add up their rounding.
    bound, lack = now[READ], 0.0
    for channel in range(keys + 1):
        bound += levels.cost[level, channel]
    for row in range(levels.lack.shape[1]):
        lack += levels.lack[level, row]
    now[BOUND], now[LACK] = bound, lack


@compiled
def _differs(levels: Levels, before: int, level: int, channel: int) -> bool:
    if levels.open[before, channel] != levels.open[level, channel]:
        return True
    if levels.alive[before, channel] != levels.alive[level, channel]:
        return True
    for region in range(levels.high.shape[2]):
        if levels.high[before, channel, region] != levels.high[level, channel, region]:
            return True
    return False
