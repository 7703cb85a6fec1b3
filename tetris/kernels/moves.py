"""A plan's state: made from scratch, and after one table moved. Only the table's jobs and their regions are touched."""

from domain.compiled import compiled
from tetris.kernels.layout import (
    APP,
    BYTES,
    COUNT,
    CPU_H,
    GPU_H,
    HOME_H,
    HOURS,
    HOURS2,
    HOURS_SHARE,
    KEY,
    KIND,
    MOVED,
    NONE,
    READ,
    READ_PER_BYTE,
    STORED,
    STORED2,
    STORED_SHARE,
    STRAIN,
)
from tetris.kernels.terms import strain

_ML = 0


@compiled
def holds(fixed, table, region):  # type: ignore[no-untyped-def]
    """Whether the region had a replica of the table at the start."""
    for entry in range(fixed.replica_start[table], fixed.replica_start[table + 1]):
        if fixed.replica[entry] == region:
            return True
    return False


@compiled
def settle(fixed, state, work):  # type: ignore[no-untyped-def]
    """Work everything out from the tables' homes."""
    state.demand[:] = 0.0
    state.cpu[:] = 0.0
    state.stored[:] = 0.0
    state.now[:] = 0.0
    for table in range(state.home.shape[0]):
        home, size = state.home[table], fixed.size[table]
        copied = home != fixed.start[table]
        state.stored[home] += size
        for entry in range(fixed.replica_start[table], fixed.replica_start[table + 1]):
            if fixed.replica[entry] != home:
                state.stored[fixed.replica[entry]] += size
            else:
                copied = False
        if copied:
            state.now[MOVED] += size
    for job in range(state.region.shape[0]):
        first, second = 0, 0
        if fixed.job[job, KIND] == _ML:
            for entry in range(fixed.job_start[job], fixed.job_start[job + 1]):
                home = state.home[fixed.job_table[entry]]
                first += home
                second += home * home
        state.homes[job, 0] = first
        state.homes[job, 1] = second
        region, cost = job_at(fixed, state, work, job)
        state.region[job] = region
        state.now[READ] += cost
        if region != NONE:
            _flow(fixed, state, job, region, 1.0)
    for key in range(state.sums.shape[0]):
        _sum_key(fixed, state, key)
    _sum_stored(fixed, state)


@compiled
def job_at(fixed, state, work, job):  # type: ignore[no-untyped-def]
    """Where a job runs with its tables where they are, and its read term."""
    count = fixed.job[job, COUNT]
    if count == 0:
        return NONE, 0.0
    per_byte, size = fixed.job_amount[job, READ_PER_BYTE], fixed.job_amount[job, BYTES]
    if fixed.job[job, KIND] == _ML:
        first, second = state.homes[job, 0], state.homes[job, 1]
        if count * second == first * first:
            return first // count, 0.0
        return NONE, per_byte * size
    tally(fixed, state, work, job, NONE)
    best = NONE
    for region in range(work.count.shape[0]):
        if work.count[region] > 0 and (best == NONE or leads(work, region, best, 0, 0.0)):
            best = region
    here = work.bytes[best]
    clear_tally(fixed, state, work, job)
    return best, per_byte * (size - here)


@compiled
def tally(fixed, state, work, job, without):  # type: ignore[no-untyped-def]
    """Count a job's tables and their bytes by home, one of them left out."""
    for entry in range(fixed.job_start[job], fixed.job_start[job + 1]):
        table = fixed.job_table[entry]
        if table != without:
            home = state.home[table]
            work.count[home] += 1
            work.bytes[home] += fixed.size[table]


@compiled
def clear_tally(fixed, state, work, job):  # type: ignore[no-untyped-def]
    """Undo `tally`."""
    for entry in range(fixed.job_start[job], fixed.job_start[job + 1]):
        home = state.home[fixed.job_table[entry]]
        work.count[home] = 0
        work.bytes[home] = 0.0


@compiled
def leads(work, region, other, more, more_bytes):  # type: ignore[no-untyped-def]
    """Whether a region, with that much more, comes before another: more tables, more bytes, the first name."""
    count = work.count[region] + more
    if count != work.count[other]:
        return count > work.count[other]
    size = work.bytes[region] + more_bytes
    if size != work.bytes[other]:
        return size > work.bytes[other]
    return region < other


@compiled
def apply(fixed, state, work, table, to):  # type: ignore[no-untyped-def]
    """Move a table."""
    at = state.home[table]
    if at == to:
        return
    size = fixed.size[table]
    if not holds(fixed, table, at):
        state.stored[at] -= size
        if at != fixed.start[table]:
            state.now[MOVED] -= size
    if not holds(fixed, table, to):
        state.stored[to] += size
        if to != fixed.start[table]:
            state.now[MOVED] += size
    _sum_stored(fixed, state)
    begin, end = fixed.table_start[table], fixed.table_start[table + 1]
    for entry in range(begin, end):
        job = fixed.table_job[entry]
        _, before = job_at(fixed, state, work, job)
        state.now[READ] -= before
    state.home[table] = to
    touched = 0
    for entry in range(begin, end):
        job = fixed.table_job[entry]
        if fixed.job[job, KIND] == _ML:
            state.homes[job, 0] += to - at
            state.homes[job, 1] += to * to - at * at
        region, after = job_at(fixed, state, work, job)
        state.now[READ] += after
        was = state.region[job]
        if region != was:
            if was != NONE:
                _flow(fixed, state, job, was, -1.0)
            if region != NONE:
                _flow(fixed, state, job, region, 1.0)
            state.region[job] = region
            key = fixed.job[job, KEY]
            if key != NONE and not work.flags[key]:
                work.flags[key] = True
                work.channels[touched] = key
                touched += 1
    for index in range(touched):
        key = work.channels[index]
        work.flags[key] = False
        _sum_key(fixed, state, key)


@compiled
def _flow(fixed, state, job, region, sign):  # type: ignore[no-untyped-def]
    """A job's hours come to a region (sign 1) or leave it (-1)."""
    key, app = fixed.job[job, KEY], fixed.job[job, APP]
    if key != NONE:
        hours = sign * fixed.job_amount[job, GPU_H]
        demand = state.demand[key, region] + hours
        # What is left of demand that has gone is rounding, and would count where there is no supply at all.
        state.demand[key, region] = demand if demand > fixed.tiny[key] else 0.0
        state.now[HOME_H] += hours * fixed.at_home[key, region]
    if app != NONE:
        state.cpu[app, region] += sign * fixed.job_amount[job, CPU_H]


@compiled
def _sum_key(fixed, state, key):  # type: ignore[no-untyped-def]
    hours, hours2, hours_share, strained = 0.0, 0.0, 0.0, 0.0
    for region in range(state.demand.shape[1]):
        demand = state.demand[key, region]
        if demand > 0.0:
            hours += demand
            hours2 += demand * demand
            hours_share += demand * fixed.share[key, region]
            strained += strain(demand, fixed.supply[key, region], fixed.mean[key], fixed.tiny[key])
    sums = state.sums[key]
    sums[HOURS], sums[HOURS2], sums[HOURS_SHARE], sums[STRAIN] = hours, hours2, hours_share, strained


@compiled
def _sum_stored(fixed, state):  # type: ignore[no-untyped-def]
    stored, stored2, stored_share = 0.0, 0.0, 0.0
    for region in range(state.stored.shape[0]):
        amount = state.stored[region]
        stored += amount
        stored2 += amount * amount
        stored_share += amount * fixed.capacity_share[region]
    state.now[STORED], state.now[STORED2], state.now[STORED_SHARE] = stored, stored2, stored_share
