"""Evaluates moving one table to each region, without moving it.

When the table moves to region b, the hours of a job change in one of three ways: independently of b (`left`), only for
a certain b (`come`, `cross`), or always towards b (`follow`). These flows are first summed by channel. After that, each
region needs only a few operations per channel, regardless of the number of jobs.
"""

from domain.compiled import compiled
from tetris.kernels.layout import (
    ALL_BYTES,
    APP,
    BYTES,
    CAPACITY2,
    COUNT,
    CPU_H,
    F8,
    GPU_H,
    GPU_WEIGHT,
    HOME_H,
    HOURS,
    HOURS2,
    HOURS_SHARE,
    I4,
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
    Fixed,
    PlanState,
    Work,
)
from tetris.kernels.moves import clear_tally, holds, leads, tally, top_region
from tetris.kernels.terms import key_cost, over, short_of_home, storage_cost, strain

_ML = 0
_COST = 4
"""Additional column of `Work.base`, after the columns of `PlanState.sums`."""
Flow = tuple[float, float, float, float]
"""The sums over regions of a key: hours, squares of hours, hours times share, and overload."""


@compiled
def weigh(fixed: Fixed, state: PlanState, work: Work, table: int) -> None:
    """Computes `work.total`, `work.lack` and `work.broken` for a table."""
    channels = _gather(fixed, state, work, table)
    _weigh_storage(fixed, state, work, table)
    _weigh_flows(fixed, state, work, channels)
    at = state.home[table]
    work.total[at], work.lack[at], work.broken[at] = 0.0, 0.0, 0.0
    left, come, follow, cross, crossed = work.left, work.come, work.follow, work.cross, work.crossed
    flags, touched = work.flags, work.channels
    regions = left.shape[1]
    for index in range(channels):
        channel = touched[index]
        flags[channel] = False
        follow[channel] = 0.0
        for region in range(regions):
            left[channel, region] = 0.0
            come[channel, region] = 0.0
            if crossed[region, channel]:
                crossed[region, channel] = False
                for other in range(regions):
                    cross[region, channel, other] = 0.0


@compiled
def _gather(fixed: Fixed, state: PlanState, work: Work, table: int) -> int:
    """Sums the flows and the read term over the table's jobs; returns the number of channels with flows."""
    left, come, follow, cross, crossed = work.left, work.come, work.follow, work.cross, work.crossed
    flags, touched, read, count, tallied, total = (
        work.flags, work.channels, work.read, work.tables, work.tallied, work.total,
    )  # fmt: skip
    jobs, amounts, table_job, size_of = fixed.job, fixed.job_amount, fixed.table_job, fixed.size
    job_start, job_table = fixed.job_start, fixed.job_table
    homes, home_of, region_of = state.homes, state.home, state.region
    regions, keys = total.shape[0], state.sums.shape[0]
    at, size = home_of[table], size_of[table]
    channels = 0
    always = 0.0
    read[:] = 0.0
    for entry in range(fixed.table_start[table], fixed.table_start[table + 1]):
        job = table_job[entry]
        tables = jobs[job, COUNT]
        per_byte, job_bytes = amounts[job, READ_PER_BYTE], amounts[job, BYTES]
        ml = jobs[job, KIND] == _ML
        common = NONE
        if ml and tables > 1:
            first, second = homes[job, 0] - at, homes[job, 1] - at * at
            if (tables - 1) * second != first * first:
                # The other tables have different homes, so the job has no region in any case.
                continue
            common = first // (tables - 1)
        top, was = NONE, region_of[job]
        if not ml and tables > 1:
            begin, end = job_start[job], job_start[job + 1]
            tally(begin, end, table, home_of, job_table, size_of, count, tallied)
            top = top_region(count, tallied)
        for gpu in (True, False):
            channel, hours = _channel(job, gpu, jobs, amounts, keys)
            if channel == NONE:
                continue
            if not flags[channel]:
                flags[channel] = True
                touched[channels] = channel
                channels += 1
            if tables == 1:
                left[channel, at] -= hours
                follow[channel] += hours
            elif ml:
                if common == at:
                    left[channel, at] -= hours
                else:
                    come[channel, common] += hours
            else:
                if top != was:
                    left[channel, was] -= hours
                    left[channel, top] += hours
                for region in range(regions):
                    if region != top and leads(count, tallied, region, top, 1, size):
                        come[channel, region] += hours
                        crossed[region, channel] = True
                        cross[region, channel, top] -= hours
        if ml and tables > 1:
            if common == at:
                always += per_byte * job_bytes
            else:
                read[common] -= per_byte * job_bytes
        elif tables > 1:
            here = tallied[was] + (size if was == at else 0.0)
            always += per_byte * (here - tallied[top])
            for region in range(regions):
                if region == top:
                    read[region] -= per_byte * size
                elif leads(count, tallied, region, top, 1, size):
                    read[region] += per_byte * (tallied[top] - tallied[region] - size)
            clear_tally(begin, end, home_of, job_table, count, tallied)
    weight = fixed.number[READ_WEIGHT]
    for region in range(regions):
        total[region] = weight * (always + read[region])
    return channels


@compiled
def _channel(job: int, gpu: bool, jobs: I4, amounts: F8, keys: int) -> tuple[int, float]:
    """Returns the channel of a job's GPU or CPU hours, and the hours."""
    if gpu:
        return jobs[job, KEY], amounts[job, GPU_H]
    app = jobs[job, APP]
    return (NONE if app == NONE else keys + app), amounts[job, CPU_H]


@compiled
def _weigh_storage(fixed: Fixed, state: PlanState, work: Work, table: int) -> None:
    """Adds the change of the storage term, and sets the changes of the excess of storage and of moved bytes."""
    number, now, stored_in = fixed.number, state.now, state.stored
    capacity, allowed, capacity_share = fixed.capacity, fixed.capacity_allowed, fixed.capacity_share
    replica_start, replica = fixed.replica_start, fixed.replica
    total, lacks, breaks = work.total, work.lack, work.broken
    at, start, size = state.home[table], fixed.start[table], fixed.size[table]
    stored, stored2, stored_share, moved = now[STORED], now[STORED2], now[STORED_SHARE], now[MOVED]
    capacity2, scale, weight = number[CAPACITY2], number[STORED_SCALE], number[STORAGE_WEIGHT]
    quota, all_bytes = number[MOVE_QUOTA], number[ALL_BYTES]
    before = storage_cost(stored, stored2, stored_share, capacity2)
    far = over(moved, quota, all_bytes)
    lack_left, broken_left = 0.0, 0.0
    if not holds(table, at, replica_start, replica):
        amount = stored_in[at]
        rest = amount - size
        stored -= size
        stored2 += rest * rest - amount * amount
        stored_share -= size * capacity_share[at]
        lack_left = over(rest, capacity[at], scale) - over(amount, capacity[at], scale)
        broken_left = over(rest, allowed[at], scale) - over(amount, allowed[at], scale)
        if at != start:
            moved -= size
    for region in range(total.shape[0]):
        lack, broken, copied = lack_left, broken_left, moved
        sum1, sum2, sum_share = stored, stored2, stored_share
        if not holds(table, region, replica_start, replica):
            amount = stored_in[region]
            more = amount + size
            sum1 += size
            sum2 += more * more - amount * amount
            sum_share += size * capacity_share[region]
            lack += over(more, capacity[region], scale) - over(amount, capacity[region], scale)
            broken += over(more, allowed[region], scale) - over(amount, allowed[region], scale)
            if region != start:
                copied += size
        total[region] += weight * (storage_cost(sum1, sum2, sum_share, capacity2) - before)
        farther = over(copied, quota, all_bytes) - far
        lacks[region] = lack + farther
        breaks[region] = broken + farther


@compiled
def _weigh_flows(fixed: Fixed, state: PlanState, work: Work, channels: int) -> None:
    """Adds the changes of the GPU term, and of the excess of CPU hours and of hours not at home."""
    number, keys = fixed.number, state.demand.shape[0]
    gpu_weight, hours_home = number[GPU_WEIGHT], state.now[HOME_H]
    touched, total, lacks, breaks = work.channels, work.total, work.lack, work.broken
    left_cost, left_home, left_lack, left_broken = 0.0, 0.0, 0.0, 0.0
    for index in range(channels):
        channel = touched[index]
        if channel < keys:
            change, left_home = _leave_gpu(fixed, state, work, channel, left_home)
            left_cost += change
        else:
            left_lack, left_broken = _leave_cpu(fixed, state, work, channel, channel - keys, left_lack, left_broken)
    short = short_of_home(hours_home, number)
    for to in range(total.shape[0]):
        cost, home, lack, broken = left_cost, left_home, left_lack, left_broken
        for index in range(channels):
            channel = touched[index]
            if work.come[channel, to] + work.follow[channel] == 0.0:
                # `cross` has entries only for regions with `come`.
                continue
            if channel < keys:
                change, home = _come_gpu(fixed, state, work, channel, to, home)
                cost += change
            else:
                lack, broken = _come_cpu(fixed, state, work, channel, channel - keys, to, lack, broken)
        shorter = short_of_home(hours_home + home, number) - short
        total[to] += gpu_weight * cost
        lacks[to] += lack + shorter
        breaks[to] += broken + shorter


@compiled
def _leave_gpu(fixed: Fixed, state: PlanState, work: Work, key: int, home: float) -> tuple[float, float]:
    """Applies the flows `left` of a key; returns the change of its cost, and `home` plus the change of hours at home.

    The resulting sums and cost are stored in `work.base`.
    """
    demand, sums, left, base = state.demand, state.sums, work.left, work.base
    flow = sums[key, HOURS], sums[key, HOURS2], sums[key, HOURS_SHARE], sums[key, STRAIN]
    before = _cost_of(fixed, key, flow)
    for region in range(left.shape[1]):
        change = left[key, region]
        if change != 0.0:
            flow = _add(fixed, key, region, flow, demand[key, region], change)
            home += change * fixed.at_home[key, region]
    base[key, HOURS], base[key, HOURS2], base[key, HOURS_SHARE], base[key, STRAIN] = flow
    base[key, _COST] = _cost_of(fixed, key, flow)
    return base[key, _COST] - before, home


@compiled
def _come_gpu(fixed: Fixed, state: PlanState, work: Work, key: int, to: int, home: float) -> tuple[float, float]:
    """Applies the flows `come`, `follow` and `cross` of a key for the target `to`, after `_leave_gpu`; same results."""
    demand, left, cross, base = state.demand, work.left, work.cross, work.base
    flow = base[key, HOURS], base[key, HOURS2], base[key, HOURS_SHARE], base[key, STRAIN]
    if work.crossed[to, key]:
        for region in range(left.shape[1]):
            change = cross[to, key, region]
            if change != 0.0:
                flow = _add(fixed, key, region, flow, demand[key, region] + left[key, region], change)
                home += change * fixed.at_home[key, region]
    more = work.come[key, to] + work.follow[key]
    flow = _add(fixed, key, to, flow, demand[key, to] + left[key, to], more)
    home += more * fixed.at_home[key, to]
    return _cost_of(fixed, key, flow) - base[key, _COST], home


@compiled
def _add(fixed: Fixed, key: int, region: int, flow: Flow, before: float, more: float) -> Flow:
    """Returns the sums of a key after adding `more` hours in a region that had `before` hours."""
    hours, hours2, hours_share, strained = flow
    supply, mean, tiny = fixed.supply[key, region], fixed.mean[key], fixed.tiny[key]
    return (
        hours + more,
        hours2 + more * (2.0 * before + more),
        hours_share + more * fixed.share[key, region],
        strained + (strain(before + more, supply, mean, tiny) - strain(before, supply, mean, tiny)),
    )


@compiled
def _cost_of(fixed: Fixed, key: int, flow: Flow) -> float:
    hours, hours2, hours_share, strained = flow
    overload, importance = fixed.number[OVERLOAD], fixed.importance[key]
    return key_cost(hours, hours2, hours_share, strained, fixed.share2[key], importance, overload, fixed.tiny[key])


@compiled
def _leave_cpu(
    fixed: Fixed, state: PlanState, work: Work, channel: int, app: int, lack: float, broken: float
) -> tuple[float, float]:
    """Applies the flows `left` of an app: adds the changes of the excess over quotas and over the allowed limits."""
    for region in range(work.left.shape[1]):
        change = work.left[channel, region]
        if change != 0.0:
            lacking, breaking = _over_quota(fixed, app, region, state.cpu[app, region], change)
            lack += lacking
            broken += breaking
    return lack, broken


@compiled
def _come_cpu(
    fixed: Fixed, state: PlanState, work: Work, channel: int, app: int, to: int, lack: float, broken: float
) -> tuple[float, float]:
    """Applies the flows `come`, `follow` and `cross` of an app for the target `to`, after `_leave_cpu`."""
    cpu, left, cross = state.cpu, work.left, work.cross
    if work.crossed[to, channel]:
        for region in range(left.shape[1]):
            change = cross[to, channel, region]
            if change != 0.0:
                before = cpu[app, region] + left[channel, region]
                lacking, breaking = _over_quota(fixed, app, region, before, change)
                lack += lacking
                broken += breaking
    more = work.come[channel, to] + work.follow[channel]
    lacking, breaking = _over_quota(fixed, app, to, cpu[app, to] + left[channel, to], more)
    return lack + lacking, broken + breaking


@compiled
def _over_quota(fixed: Fixed, app: int, region: int, before: float, more: float) -> tuple[float, float]:
    """Returns the changes of the excess over a quota and over the allowed limit when `more` hours are added."""
    quota, allowed, scale = fixed.quota[app, region], fixed.quota_allowed[app, region], fixed.quota_scale[app]
    after = before + more
    lack = over(after, quota, scale) - over(before, quota, scale)
    return lack, over(after, allowed, scale) - over(before, allowed, scale)
