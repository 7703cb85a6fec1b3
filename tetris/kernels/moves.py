"""Computes the state of a plan from scratch, and updates it when one table moves.

An update only visits the jobs of the table and their regions. Arrays are read from the named tuples once, before a
loop, and passed to small functions as arguments: an attribute access inside a loop updates reference counts, which
costs more than the arithmetic.
"""

from domain.compiled import compiled
from tetris.kernels.layout import (
    APP,
    BYTES,
    COUNT,
    CPU_H,
    F8,
    GPU_H,
    HOME_H,
    HOURS,
    HOURS2,
    HOURS_SHARE,
    I4,
    I8,
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
    Fixed,
    PlanState,
    Work,
)
from tetris.kernels.terms import strain

_ML = 0


@compiled
def recompute(fixed: Fixed, state: PlanState, work: Work) -> None:
    """Computes the whole state from the tables' homes."""
    home_of, region_of, reads, homes = state.home, state.region, state.read, state.homes
    now, stored = state.now, state.stored
    size_of, start, replica_start, replica = fixed.size, fixed.start, fixed.replica_start, fixed.replica
    job_start, job_table, jobs, amounts = fixed.job_start, fixed.job_table, fixed.job, fixed.job_amount
    demand, cpu, at_home, tiny = state.demand, state.cpu, fixed.at_home, fixed.tiny
    demand[:] = 0.0
    cpu[:] = 0.0
    stored[:] = 0.0
    now[:] = 0.0
    for table in range(home_of.shape[0]):
        home, size = home_of[table], size_of[table]
        copied = home != start[table]
        stored[home] += size
        for entry in range(replica_start[table], replica_start[table + 1]):
            if replica[entry] != home:
                stored[replica[entry]] += size
            else:
                copied = False
        if copied:
            now[MOVED] += size
    for job in range(region_of.shape[0]):
        if jobs[job, KIND] == _ML:
            first, second = 0, 0
            for entry in range(job_start[job], job_start[job + 1]):
                home = home_of[job_table[entry]]
                first += home
                second += home * home
            homes[job, 0] = first
            homes[job, 1] = second
        region, cost = job_at(
            job, jobs, amounts, homes, home_of, job_start, job_table, size_of, work.tables, work.tallied
        )  # fmt: skip
        region_of[job] = region
        reads[job] = cost
        now[READ] += cost
        if region != NONE:
            _flow(job, region, 1.0, jobs, amounts, demand, cpu, now, at_home, tiny)
    for key in range(demand.shape[0]):
        _sum_key(key, demand, state.sums, fixed.share, fixed.supply, fixed.mean, tiny)
    _sum_stored(stored, fixed.capacity_share, now)


@compiled
def job_at(
    job: int, jobs: I4, amounts: F8, homes: I8, home_of: I4, job_start: I8, job_table: I4, size_of: F8, count: I4,
    size: F8,
) -> tuple[int, float]:  # fmt: skip
    """Returns the region where a job runs for the current homes (or NONE), and its read term."""
    tables = jobs[job, COUNT]
    if tables == 0:
        return NONE, 0.0
    per_byte, job_bytes = amounts[job, READ_PER_BYTE], amounts[job, BYTES]
    if jobs[job, KIND] == _ML:
        first, second = homes[job, 0], homes[job, 1]
        if tables * second == first * first:
            return first // tables, 0.0
        return NONE, per_byte * job_bytes
    begin, end = job_start[job], job_start[job + 1]
    tally(begin, end, NONE, home_of, job_table, size_of, count, size)
    best = top_region(count, size)
    here = size[best]
    clear_tally(begin, end, home_of, job_table, count, size)
    return best, per_byte * (job_bytes - here)


@compiled
def tally(begin: int, end: int, without: int, home_of: I4, job_table: I4, size_of: F8, count: I4, size: F8) -> None:
    """Counts the tables of a job and their bytes by home region, except the table `without`."""
    for entry in range(begin, end):
        table = job_table[entry]
        if table != without:
            home = home_of[table]
            count[home] += 1
            size[home] += size_of[table]


@compiled
def clear_tally(begin: int, end: int, home_of: I4, job_table: I4, count: I4, size: F8) -> None:
    """Resets the counts of `tally`."""
    for entry in range(begin, end):
        home = home_of[job_table[entry]]
        count[home] = 0
        size[home] = 0.0


@compiled
def top_region(count: I4, size: F8) -> int:
    """Returns the region that `leads` all others, among those with at least one table; NONE if there are none."""
    top = NONE
    for region in range(count.shape[0]):
        if count[region] > 0 and (top == NONE or leads(count, size, region, top, 0, 0.0)):
            top = region
    return top


@compiled
def leads(count: I4, size: F8, region: int, other: int, more: int, more_bytes: float) -> bool:
    """Returns whether a region with `more` more tables precedes another: most tables, then most bytes, then name."""
    tables = count[region] + more
    if tables != count[other]:
        return tables > count[other]
    all_bytes = size[region] + more_bytes
    if all_bytes != size[other]:
        return all_bytes > size[other]
    return region < other


@compiled
def holds(table: int, region: int, replica_start: I8, replica: I4) -> bool:
    """Returns whether the region has a replica of the table at the start."""
    for entry in range(replica_start[table], replica_start[table + 1]):  # noqa: SIM110 (it is compiled)
        if replica[entry] == region:
            return True
    return False


@compiled
def apply(fixed: Fixed, state: PlanState, work: Work, table: int, to: int) -> None:
    """Moves a table to the region `to` and updates the state."""
    home_of, region_of, reads, homes = state.home, state.region, state.read, state.homes
    now, stored = state.now, state.stored
    at = home_of[table]
    if at == to:
        return
    size_of, replica_start, replica, start = fixed.size, fixed.replica_start, fixed.replica, fixed.start
    job_start, job_table, jobs, amounts = fixed.job_start, fixed.job_table, fixed.job, fixed.job_amount
    table_job, count, tallied = fixed.table_job, work.tables, work.tallied
    demand, cpu, at_home, tiny = state.demand, state.cpu, fixed.at_home, fixed.tiny
    flags, channels = work.flags, work.channels
    size = size_of[table]
    if not holds(table, at, replica_start, replica):
        stored[at] -= size
        if at != start[table]:
            now[MOVED] -= size
    if not holds(table, to, replica_start, replica):
        stored[to] += size
        if to != start[table]:
            now[MOVED] += size
    _sum_stored(stored, fixed.capacity_share, now)
    begin, end = fixed.table_start[table], fixed.table_start[table + 1]
    home_of[table] = to
    read, touched = 0.0, 0
    for entry in range(begin, end):
        job = table_job[entry]
        if jobs[job, KIND] == _ML:
            homes[job, 0] += to - at
            homes[job, 1] += to * to - at * at
        region, after = job_at(job, jobs, amounts, homes, home_of, job_start, job_table, size_of, count, tallied)
        read += after - reads[job]
        reads[job] = after
        was = region_of[job]
        if region != was:
            if was != NONE:
                _flow(job, was, -1.0, jobs, amounts, demand, cpu, now, at_home, tiny)
            if region != NONE:
                _flow(job, region, 1.0, jobs, amounts, demand, cpu, now, at_home, tiny)
            region_of[job] = region
            key = jobs[job, KEY]
            if key != NONE and not flags[key]:
                flags[key] = True
                channels[touched] = key
                touched += 1
    now[READ] += read
    for index in range(touched):
        key = channels[index]
        flags[key] = False
        _sum_key(key, demand, state.sums, fixed.share, fixed.supply, fixed.mean, tiny)


@compiled
def _flow(
    job: int, region: int, sign: float, jobs: I4, amounts: F8, demand: F8, cpu: F8, now: F8, at_home: F8, tiny: F8,
) -> None:  # fmt: skip
    """Adds a job's hours to a region (sign 1) or subtracts them (-1)."""
    key, app = jobs[job, KEY], jobs[job, APP]
    if key != NONE:
        hours = sign * amounts[job, GPU_H]
        after = demand[key, region] + hours
        # A tiny remainder is a rounding error. It must be 0, because any demand without supply counts as overload.
        demand[key, region] = after if after > tiny[key] else 0.0
        now[HOME_H] += hours * at_home[key, region]
    if app != NONE:
        cpu[app, region] += sign * amounts[job, CPU_H]


@compiled
def _sum_key(key: int, demand: F8, sums: F8, share: F8, supply: F8, mean: F8, tiny: F8) -> None:
    hours, hours2, hours_share, strained = 0.0, 0.0, 0.0, 0.0
    for region in range(demand.shape[1]):
        here = demand[key, region]
        if here > 0.0:
            hours += here
            hours2 += here * here
            hours_share += here * share[key, region]
            strained += strain(here, supply[key, region], mean[key], tiny[key])
    sums[key, HOURS], sums[key, HOURS2], sums[key, HOURS_SHARE], sums[key, STRAIN] = (
        hours, hours2, hours_share, strained,
    )  # fmt: skip


@compiled
def _sum_stored(stored: F8, capacity_share: F8, now: F8) -> None:
    all_bytes, all_bytes2, all_share = 0.0, 0.0, 0.0
    for region in range(stored.shape[0]):
        amount = stored[region]
        all_bytes += amount
        all_bytes2 += amount * amount
        all_share += amount * capacity_share[region]
    now[STORED], now[STORED2], now[STORED_SHARE] = all_bytes, all_bytes2, all_share
