"""Compiled inner loops of the scan. `gms.scan.scan_queue` documents the rules that they implement.

The quota check is sequential: whether a workload fits depends on the workloads before it, so numpy cannot vectorise it.
Plain Python takes 1.5 us per workload, more than a second for a million workloads. `bench/` has the measurements.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from domain.compiled import compiled
from gms.demand import DemandColumns, HoldingColumns
from gms.queue_order import take_places

F8 = npt.NDArray[np.float64]
I8 = npt.NDArray[np.int64]
I4 = npt.NDArray[np.int32]
I2 = npt.NDArray[np.int16]
I1 = npt.NDArray[np.int8]
B1 = npt.NDArray[np.bool_]

NO_PICK = -1
"""Marks a workload that may be placed on every GPU type that its jobs accept."""


class PlacedColumns(NamedTuple):
    """The placed workloads, sorted by award time, oldest first; `holding` is a number in `holdings`."""

    tenant: I4
    requested_level: I1
    holding: I4
    holdings: HoldingColumns


class PendingColumns(NamedTuple):
    """The pending workloads, sorted by (submission time, id); `gang` is a number in `demand`."""

    tenant: I4
    submitted_at_s: F8
    requested_level: I1
    held: B1
    gang: I4
    demand: DemandColumns
    user: I4
    size: I1


class TenantAmounts(NamedTuple):
    """CPUs in thousandths, shape (tenants,), and GPU slots, shape (tenants, types)."""

    cpus: I8
    gpus: I8


class CreditTerms(NamedTuple):
    """The credit of a workload: `w_age` times its age, which counts up to `age_cap_s`, plus `fair` of its tenant.

    `by_user` and `by_size` change the order among the workloads of a tenant and level (`take_places`).
    """

    fair: F8
    now_s: float
    w_age: float
    age_cap_s: float
    by_user: F8
    by_size: F8


class PendingRanks(NamedTuple):
    """The result of `walk_pending`; one entry for each workload unless stated otherwise."""

    rank: I1
    """0 for a held workload."""
    picks_at: I4
    """Within quota: the offset of the picked types in `picks`, or `NO_PICK`. Over quota: the row in `shortfalls`."""
    picks: I4
    """The picked types (flat): the index in the list of each job, in job order."""
    shortfalls: I8
    """The over-quota workloads, shape (n, 3): the lacking resource (a type number, or the number of types for CPUs),
    its usage, and the need for it."""
    displacing: I8
    """The workloads that are within quota only because less important placed workloads are counted after them, shape
    (n, 2 + types): the row, then the CPUs and GPUs used up to and including that row."""
    taker: I4
    """By place, the row that has it: the places of a tenant and level are given to its rows (`take_places`)."""
    place_rank: I1
    """By place, the rank of its row; 0 for the place of a held workload."""
    place_credit: F8
    """By place, its credit, which is that of its row."""


@compiled
def walk_placed(placed: PlacedColumns, level: I1, over: I1, quota: TenantAmounts, used: TenantAmounts) -> I1:
    """Returns the ranks of placed workloads. Each tenant's quota goes to the most important level first.

    `over` has the over-quota rank of each level, from level 0. `used` receives the usage of the within-quota workloads.
    `quota.cpus` is -1 for no limit.
    """
    tenant, requested_level, holding, holdings = placed
    cpus, at, gpu_type, gpus = holdings
    used_cpus, used_gpus = used
    ranks = np.empty(tenant.size, np.int8)
    for row in range(tenant.size):
        ranks[row] = max(level[tenant[row]], requested_level[row])
    for here in range(1, 8):
        for row in range(tenant.size):
            if ranks[row] != here:
                continue
            t, h = tenant[row], holding[row]
            if _holding_fits(t, h, holdings, quota, used):
                used_cpus[t] += cpus[h]
                for k in range(at[h], at[h + 1]):
                    used_gpus[t, gpu_type[k]] += gpus[k]
            else:
                ranks[row] = over[here]
    return ranks


@compiled
def _holding_fits(t: int, h: int, holdings: HoldingColumns, quota: TenantAmounts, used: TenantAmounts) -> bool:
    """Returns whether the unused quota of a tenant covers a holding."""
    cpus, at, gpu_type, gpus = holdings
    fits = cpus[h] == 0 or quota.cpus[t] < 0 or used.cpus[t] + cpus[h] <= quota.cpus[t]
    for k in range(at[h], at[h + 1]):
        fits = fits and used.gpus[t, gpu_type[k]] + gpus[k] <= quota.gpus[t, gpu_type[k]]
    return fits


@compiled
def displaced(
    t: int,
    its_level: int,
    below: int,
    placed: PlacedColumns,
    placed_rank: I1,
    quota: TenantAmounts,
    used: TenantAmounts,
) -> I4:
    """Returns the within-quota rows of a tenant's placed workloads that would become over-quota.

    Only levels less important than `below` are examined. `quota` and `used` are those of this tenant, with shapes (1,)
    and (1, types). `used` is the usage that is counted before these rows; it is modified.
    """
    tenant, requested_level, holding, holdings = placed
    cpus, at, gpu_type, gpus = holdings
    used_cpus, used_gpus = used
    out = np.empty(tenant.size, np.int32)
    found = 0
    for here in range(below + 1, 8):
        for row in range(tenant.size):
            if tenant[row] != t or max(its_level, requested_level[row]) != here:
                continue
            h = holding[row]
            if _holding_fits(0, h, holdings, quota, used):
                used_cpus[0] += cpus[h]
                for k in range(at[h], at[h + 1]):
                    used_gpus[0, gpu_type[k]] += gpus[k]
            elif placed_rank[row] == here:
                out[found] = row
                found += 1
    return out[:found]


@compiled
def walk_pending(
    placed: PlacedColumns, placed_rank: I1, pending: PendingColumns, level: I1, over: I1, terms: CreditTerms,
    quota: TenantAmounts, total: TenantAmounts,
) -> PendingRanks:  # fmt: skip
    """Computes rank and credit of pending workloads.

    Within a tenant, the order of the places is the order of descending credit, and quotas of different tenants are
    independent. So one pass over the places of each level checks each tenant's workloads in the order (level, credit).
    The usage that is checked against the quota is that of the tenant's placed workloads of this level and of more
    important levels, and of its pending workloads that were already accepted. `over` has the over-quota rank of each
    level, from level 0. `total` is the usage of all placed within-quota workloads (`walk_placed`); it is modified.
    """
    placed_tenant, _, holding, holdings = placed
    tenant, submitted_at_s, requested_level, held, gang, demand, user, size = pending
    fair, now_s, w_age, age_cap_s, by_user, by_size = terms
    quota_cpus, quota_gpus = quota
    total_cpus, total_gpus = total
    cpus, envelope_at, envelope_type, envelope_gpus, job_at, job_gpus, type_at, type_of = demand
    held_cpus, held_at, held_type, held_gpus = holdings
    n, types = tenant.size, quota_gpus.shape[1]
    rank, place_rank = np.zeros(n, np.int8), np.zeros(n, np.int8)
    credit, ordered_by = np.empty(n, np.float64), np.empty(n, np.float64)
    picks_at = np.full(n, NO_PICK, np.int32)
    picks = np.empty(1024, np.int32)
    picked = 0
    need = np.zeros(types, np.int64)
    used_cpus, used_gpus = np.zeros_like(total_cpus), np.zeros_like(total_gpus)
    displace = short = 0
    waiting = np.zeros(9, np.int64)
    for row in range(n):
        t = tenant[row]
        credit[row] = w_age * min(max(now_s - submitted_at_s[row], 0.0), age_cap_s) + fair[t]
        ordered_by[row] = credit[row] + (by_user[user[row]] + by_size[size[row]])
        if not held[row]:
            rank[row] = max(level[t], requested_level[row])
            waiting[rank[row]] += 1
    # Pages that are never written take no memory.
    displacing, shortfalls = np.empty((waiting.sum(), 2 + types), np.int64), np.empty((waiting.sum(), 3), np.int64)
    # The places of each level, in their order: a place and its taker have the same level.
    begin = np.zeros(9, np.int64)
    for here in range(1, 8):
        begin[here + 1] = begin[here] + waiting[here]
    ends = begin.copy()
    places = np.empty(begin[8], np.int32)
    for place in range(n):
        if rank[place]:
            places[ends[rank[place]]] = place
            ends[rank[place]] += 1
    taker = take_places(tenant, rank, ordered_by, level.size)
    for here in range(1, 8):
        for row in range(placed_tenant.size):
            if placed_rank[row] == here:
                t, h = placed_tenant[row], holding[row]
                used_cpus[t] += held_cpus[h]
                for k in range(held_at[h], held_at[h + 1]):
                    used_gpus[t, held_type[k]] += held_gpus[k]
        for at in range(begin[here], begin[here + 1]):
            place = places[at]
            row, t = taker[place], tenant[place]
            g = gang[row]
            has_cpus = cpus[g] == 0 or quota_cpus[t] < 0 or used_cpus[t] + cpus[g] <= quota_cpus[t]
            fits = has_cpus
            for k in range(envelope_at[g], envelope_at[g + 1]):
                fits = fits and used_gpus[t, envelope_type[k]] + envelope_gpus[k] <= quota_gpus[t, envelope_type[k]]
            if fits:
                for k in range(envelope_at[g], envelope_at[g + 1]):
                    need[envelope_type[k]] = envelope_gpus[k]
            else:
                # The envelope exceeds the quota: give each job its first type that has quota left after earlier jobs.
                jobs = job_at[g + 1] - job_at[g]
                if picked + jobs > picks.size:
                    larger = np.empty(2 * picks.size + jobs, np.int32)
                    for k in range(picked):  # A slice assignment would cost one second of compile time.
                        larger[k] = picks[k]
                    picks = larger
                without = -1
                for j in range(jobs):
                    job = job_at[g] + j
                    picks[picked + j] = 0
                    if job_gpus[job] == 0:
                        continue
                    found = False
                    for k in range(type_at[job], type_at[job + 1]):
                        kind = type_of[k]
                        if used_gpus[t, kind] + need[kind] + job_gpus[job] <= quota_gpus[t, kind]:
                            need[kind] += job_gpus[job]
                            picks[picked + j] = k - type_at[job]
                            found = True
                            break
                    if not found:
                        without = job
                        break
                if without >= 0:
                    kind = type_of[type_at[without]]
                    lack, has, wants = kind, used_gpus[t, kind], need[kind] + job_gpus[without]
                elif not has_cpus:
                    lack, has, wants = types, used_cpus[t], cpus[g]
                if without >= 0 or not has_cpus:
                    shortfalls[short, 0], shortfalls[short, 1], shortfalls[short, 2] = lack, has, wants
                    rank[row], picks_at[row] = over[here], short
                    short += 1
                else:
                    picks_at[row] = picked
                    picked += jobs
            if rank[row] == here:
                used_cpus[t] += cpus[g]
                total_cpus[t] += cpus[g]
                displaces = cpus[g] > 0 and 0 <= quota_cpus[t] < total_cpus[t]
                for k in range(envelope_at[g], envelope_at[g + 1]):
                    kind = envelope_type[k]
                    used_gpus[t, kind] += need[kind]
                    total_gpus[t, kind] += need[kind]
                    displaces = displaces or (need[kind] > 0 and total_gpus[t, kind] > quota_gpus[t, kind])
                if displaces:
                    displacing[displace, 0], displacing[displace, 1] = row, used_cpus[t]
                    for kind in range(types):
                        displacing[displace, 2 + kind] = used_gpus[t, kind]
                    displace += 1
            place_rank[place] = rank[row]
            for k in range(envelope_at[g], envelope_at[g + 1]):
                need[envelope_type[k]] = 0
    return PendingRanks(
        rank, picks_at, picks[:picked].copy(), shortfalls[:short], displacing[:displace], taker, place_rank, credit
    )
