"""What moving one table would change, for every region at once, without moving it.

A job's hours flow in one of three ways when the table moves to a region b: wherever b is (`left`), only if it is that b
(`come`, `cross`), or along with the table (`follow`). Flows are summed by channel first, so that a region costs a few
operations for each channel, however many jobs read the table.
"""

from domain.compiled import compiled
from tetris.kernels.layout import (
    ALL_BYTES,
    APP,
    BYTES,
    CAPACITY2,
    COUNT,
    CPU_H,
    GPU_H,
    GPU_WEIGHT,
    HOME_H,
    HOURS,
    HOURS2,
    HOURS_SHARE,
    KEY,
    KIND,
    MOVE_QUOTA,
    MOVED,
    NONE,
    OVERLOAD,
    READ_PER_BYTE,
    READ_WEIGHT,
    STORAGE_WEIGHT,
    STORED,
    STORED2,
    STORED_SCALE,
    STORED_SHARE,
    STRAIN,
)
from tetris.kernels.moves import clear_tally, holds, leads, tally
from tetris.kernels.terms import key_cost, over, short_of_home, storage_cost, strain

_ML = 0
_COST = 4
"""Column of `Work.base` beside those of `State.sums`."""


@compiled
def weigh(fixed, state, work, table):  # type: ignore[no-untyped-def]
    """Fill `work.total`, `work.lack` and `work.broken` for a table."""
    channels = _gather(fixed, state, work, table)
    _weigh_storage(fixed, state, work, table)
    _weigh_flows(fixed, state, work, channels)
    at = state.home[table]
    work.total[at], work.lack[at], work.broken[at] = 0.0, 0.0, 0.0
    for index in range(channels):
        channel = work.channels[index]
        work.flags[channel] = False
        work.follow[channel] = 0.0
        work.left[channel, :] = 0.0
        work.come[channel, :] = 0.0
        for region in range(work.total.shape[0]):
            if work.crossed[region, channel]:
                work.crossed[region, channel] = False
                work.cross[region, channel, :] = 0.0


@compiled
def _touch(work, channel, count):  # type: ignore[no-untyped-def]
    if not work.flags[channel]:
        work.flags[channel] = True
        work.channels[count] = channel
        return count + 1
    return count


@compiled
def _gather(fixed, state, work, table):  # type: ignore[no-untyped-def]
    """Sum the flows and the read term over the table's jobs; returns how many channels have flows."""
    regions = work.total.shape[0]
    keys = state.sums.shape[0]
    at = state.home[table]
    size = fixed.size[table]
    channels = 0
    always = 0.0
    work.read[:] = 0.0
    for entry in range(fixed.table_start[table], fixed.table_start[table + 1]):
        job = fixed.table_job[entry]
        count = fixed.job[job, COUNT]
        key, app = fixed.job[job, KEY], fixed.job[job, APP]
        per_byte, job_bytes = fixed.job_amount[job, READ_PER_BYTE], fixed.job_amount[job, BYTES]
        if key != NONE:
            channels = _touch(work, key, channels)
        if app != NONE:
            channels = _touch(work, keys + app, channels)
        gpu_h, cpu_h = fixed.job_amount[job, GPU_H], fixed.job_amount[job, CPU_H]
        if count == 1:
            if key != NONE:
                work.left[key, at] -= gpu_h
                work.follow[key] += gpu_h
            if app != NONE:
                work.left[keys + app, at] -= cpu_h
                work.follow[keys + app] += cpu_h
        elif fixed.job[job, KIND] == _ML:
            first, second = state.homes[job, 0] - at, state.homes[job, 1] - at * at
            if (count - 1) * second != first * first:
                continue
            common = first // (count - 1)
            cost = per_byte * job_bytes
            if common == at:
                always += cost
                if key != NONE:
                    work.left[key, at] -= gpu_h
                if app != NONE:
                    work.left[keys + app, at] -= cpu_h
            else:
                work.read[common] -= cost
                if key != NONE:
                    work.come[key, common] += gpu_h
                if app != NONE:
                    work.come[keys + app, common] += cpu_h
        else:
            was = state.region[job]
            tally(fixed, state, work, job, table)
            top = NONE
            for region in range(regions):
                if work.count[region] > 0 and (top == NONE or leads(work, region, top, 0, 0.0)):
                    top = region
            here = work.bytes[was] + (size if was == at else 0.0)
            always += per_byte * (here - work.bytes[top])
            if top != was:
                if key != NONE:
                    work.left[key, was] -= gpu_h
                    work.left[key, top] += gpu_h
                if app != NONE:
                    work.left[keys + app, was] -= cpu_h
                    work.left[keys + app, top] += cpu_h
            for region in range(regions):
                if region == top:
                    work.read[region] -= per_byte * size
                elif leads(work, region, top, 1, size):
                    work.read[region] += per_byte * (work.bytes[top] - work.bytes[region] - size)
                    if key != NONE:
                        work.come[key, region] += gpu_h
                        work.crossed[region, key] = True
                        work.cross[region, key, top] -= gpu_h
                    if app != NONE:
                        work.come[keys + app, region] += cpu_h
                        work.crossed[region, keys + app] = True
                        work.cross[region, keys + app, top] -= cpu_h
            clear_tally(fixed, state, work, job)
    for region in range(regions):
        work.total[region] = fixed.number[READ_WEIGHT] * (always + work.read[region])
    return channels


@compiled
def _weigh_storage(fixed, state, work, table):  # type: ignore[no-untyped-def]
    """Add the storage term, and set the excess of storage and of moved bytes."""
    number, now = fixed.number, state.now
    at = state.home[table]
    size = fixed.size[table]
    stored, stored2, stored_share, moved = now[STORED], now[STORED2], now[STORED_SHARE], now[MOVED]
    before = storage_cost(stored, stored2, stored_share, number[CAPACITY2])
    far = over(moved, number[MOVE_QUOTA], number[ALL_BYTES])
    lack_left, broken_left = 0.0, 0.0
    if not holds(fixed, table, at):
        amount = state.stored[at]
        rest = amount - size
        stored -= size
        stored2 += rest * rest - amount * amount
        stored_share -= size * fixed.capacity_share[at]
        capacity, allowed, scale = fixed.capacity[at], fixed.capacity_allowed[at], number[STORED_SCALE]
        lack_left = over(rest, capacity, scale) - over(amount, capacity, scale)
        broken_left = over(rest, allowed, scale) - over(amount, allowed, scale)
        if at != fixed.start[table]:
            moved -= size
    for region in range(work.total.shape[0]):
        lack, broken, copied = lack_left, broken_left, moved
        all_bytes, all_bytes2, all_share = stored, stored2, stored_share
        if not holds(fixed, table, region):
            amount = state.stored[region]
            more = amount + size
            all_bytes += size
            all_bytes2 += more * more - amount * amount
            all_share += size * fixed.capacity_share[region]
            capacity, allowed, scale = fixed.capacity[region], fixed.capacity_allowed[region], number[STORED_SCALE]
            lack += over(more, capacity, scale) - over(amount, capacity, scale)
            broken += over(more, allowed, scale) - over(amount, allowed, scale)
            if region != fixed.start[table]:
                copied += size
        after = storage_cost(all_bytes, all_bytes2, all_share, number[CAPACITY2])
        work.total[region] += number[STORAGE_WEIGHT] * (after - before)
        farther = over(copied, number[MOVE_QUOTA], number[ALL_BYTES]) - far
        work.lack[region] = lack + farther
        work.broken[region] = broken + farther


@compiled
def _weigh_flows(fixed, state, work, channels):  # type: ignore[no-untyped-def]
    """Add the GPU term, and the excess of CPU hours and of hours away from home."""
    keys, regions = state.demand.shape
    number = fixed.number
    base_cost, base_home, base_lack, base_broken = 0.0, 0.0, 0.0, 0.0
    for index in range(channels):
        channel = work.channels[index]
        if channel < keys:
            base_home += _base_key(fixed, state, work, channel)
            base_cost += work.base[channel, _COST]
        else:
            app = channel - keys
            for region in range(regions):
                if work.left[channel, region] != 0.0:
                    lack, broken = _app_change(fixed, state, app, region, 0.0, work.left[channel, region])
                    base_lack += lack
                    base_broken += broken
    short = short_of_home(state.now[HOME_H], number)
    for to in range(regions):
        cost, home, lack, broken = base_cost, base_home, base_lack, base_broken
        for index in range(channels):
            channel = work.channels[index]
            more = work.come[channel, to] + work.follow[channel]
            crossed = work.crossed[to, channel]
            if more == 0.0 and not crossed:
                continue
            if channel < keys:
                home += more * fixed.at_home[channel, to]
                if crossed:
                    for region in range(regions):
                        home += work.cross[to, channel, region] * fixed.at_home[channel, region]
                cost += _key_change(fixed, state, work, channel, to, more, crossed)
            else:
                app = channel - keys
                gone = work.left[channel, to]
                if crossed:
                    for region in range(regions):
                        cross = work.cross[to, channel, region]
                        if cross != 0.0:
                            left = work.left[channel, region]
                            changed, changed_broken = _app_change(fixed, state, app, region, left, cross)
                            lack += changed
                            broken += changed_broken
                changed, changed_broken = _app_change(fixed, state, app, to, gone, more)
                lack += changed
                broken += changed_broken
        shorter = short_of_home(state.now[HOME_H] + home, number) - short
        work.total[to] += number[GPU_WEIGHT] * cost
        work.lack[to] += lack + shorter
        work.broken[to] += broken + shorter


@compiled
def _base_key(fixed, state, work, key):  # type: ignore[no-untyped-def]
    """What `left` makes of a key's sums and cost; returns the change of hours at home."""
    sums = state.sums[key]
    hours, hours2, hours_share, strained = sums[HOURS], sums[HOURS2], sums[HOURS_SHARE], sums[STRAIN]
    before = _cost(fixed, key, hours, hours2, hours_share, strained)
    home = 0.0
    for region in range(state.demand.shape[1]):
        change = work.left[key, region]
        if change != 0.0:
            demand = state.demand[key, region]
            after = demand + change
            hours += change
            hours2 += after * after - demand * demand
            hours_share += change * fixed.share[key, region]
            strained += _strain(fixed, key, region, after) - _strain(fixed, key, region, demand)
            home += change * fixed.at_home[key, region]
    base = work.base[key]
    base[HOURS], base[HOURS2], base[HOURS_SHARE], base[STRAIN] = hours, hours2, hours_share, strained
    base[_COST] = _cost(fixed, key, hours, hours2, hours_share, strained) - before
    return home


@compiled
def _key_change(fixed, state, work, key, to, more, crossed):  # type: ignore[no-untyped-def]
    """What it changes of a key's cost after `left` that hours come to a region, and others leave some."""
    base = work.base[key]
    hours, hours2, hours_share, strained = base[HOURS], base[HOURS2], base[HOURS_SHARE], base[STRAIN]
    before = _cost(fixed, key, hours, hours2, hours_share, strained)
    if crossed:
        for region in range(state.demand.shape[1]):
            change = work.cross[to, key, region]
            if change != 0.0:
                demand = state.demand[key, region] + work.left[key, region]
                after = demand + change
                hours += change
                hours2 += after * after - demand * demand
                hours_share += change * fixed.share[key, region]
                strained += _strain(fixed, key, region, after) - _strain(fixed, key, region, demand)
    demand = state.demand[key, to] + work.left[key, to]
    after = demand + more
    hours += more
    hours2 += after * after - demand * demand
    hours_share += more * fixed.share[key, to]
    strained += _strain(fixed, key, to, after) - _strain(fixed, key, to, demand)
    return _cost(fixed, key, hours, hours2, hours_share, strained) - before


@compiled
def _cost(fixed, key, hours, hours2, hours_share, strained):  # type: ignore[no-untyped-def]
    return key_cost(
        hours, hours2, hours_share, strained, fixed.share2[key], fixed.importance[key], fixed.number[OVERLOAD],
        fixed.tiny[key],
    )  # fmt: skip


@compiled
def _strain(fixed, key, region, demand):  # type: ignore[no-untyped-def]
    return strain(demand, fixed.supply[key, region], fixed.mean[key], fixed.tiny[key])


@compiled
def _app_change(fixed, state, app, region, already, more):  # type: ignore[no-untyped-def]
    """What `more` hours, after `already` more, change of an app's excess in a region."""
    before = state.cpu[app, region] + already
    after = before + more
    limit, allowed, scale = fixed.quota[app, region], fixed.quota_allowed[app, region], fixed.quota_scale[app]
    lack = over(after, limit, scale) - over(before, limit, scale)
    return lack, over(after, allowed, scale) - over(before, allowed, scale)
