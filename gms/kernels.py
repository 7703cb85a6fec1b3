"""The scan pass's inner loops, compiled. Each says what it does in terms of columns; `gms.scan` says what it means.

Compiled because quota is a walk: whether a workload fits depends on those before it. (Plain Python takes 1.5 us a
workload for it, numpy cannot, and a million workloads would take more than a second. `bench/` has the figures.)
"""

import numpy as np
import numpy.typing as npt

from domain.compiled import compiled
from gms.demand import Demand, Held

F8 = npt.NDArray[np.float64]
I8 = npt.NDArray[np.int64]
I4 = npt.NDArray[np.int32]
I2 = npt.NDArray[np.int16]
I1 = npt.NDArray[np.int8]
B1 = npt.NDArray[np.bool_]

NO_PICK = -1
"""A workload that may be placed on every type that its jobs accept."""
_BUCKETS = 1 << 17
_LARGE = 64
"""A bucket larger than this is merge-sorted: equal times and caps can put any number into one."""


@compiled
def walk_placed(
    tenant: I4, wish: I1, holding: I4, holdings: Held,
    level: I1, quota_cpus: I8, quota_gpus: I8, used_cpus: I8, used_gpus: I8,
) -> I1:  # fmt: skip
    """Ranks of placed workloads, given oldest award first; `used_*` becomes what those within quota use.

    Shapes: `quota_gpus` and `used_gpus` are (tenants, types); `quota_cpus` is -1 where there is no limit.
    """
    cpus, at, gpu_type, gpus = holdings
    ranks = np.empty(tenant.size, np.int8)
    for row in range(tenant.size):
        t, h = tenant[row], holding[row]
        fits = quota_cpus[t] < 0 or used_cpus[t] + cpus[h] <= quota_cpus[t]
        for k in range(at[h], at[h + 1]):
            fits = fits and used_gpus[t, gpu_type[k]] + gpus[k] <= quota_gpus[t, gpu_type[k]]
        if not fits:
            ranks[row] = 8
            continue
        used_cpus[t] += cpus[h]
        for k in range(at[h], at[h + 1]):
            used_gpus[t, gpu_type[k]] += gpus[k]
        ranks[row] = max(level[t], wish[row])
    return ranks


@compiled
def walk_pending(
    tenant: I4, submitted_at_s: F8, wish: I1, held: B1, gang: I4, demand: Demand,
    level: I1, fair: F8, quota_cpus: I8, quota_gpus: I8, used_cpus: I8, used_gpus: I8,
    now_s: float, w_age: float, age_cap_s: float,
) -> tuple[I1, F8, I4, I4, I2, I8, I8]:  # fmt: skip
    """Rank and credit of pending workloads, given in the order (submitted, id).

    That is the order of credit within each tenant, and no other tenant's workloads matter to it, so one pass over all
    tenants together judges each tenant's in the order of their credit.

    Returns columns by row: rank (0: held), credit, where its picked types begin (`NO_PICK`: all); the picked types (the
    index in each job's list, in the order of the jobs); and for those over quota the resource that lacks (a type's
    number, or the number of types for CPUs), what of it is used and what is needed. `used_*` is changed on the way.
    """
    cpus, envelope_at, envelope_type, envelope_gpus, job_at, job_gpus, type_at, type_of = demand
    n, types = tenant.size, quota_gpus.shape[1]
    rank = np.zeros(n, np.int8)
    credit = np.empty(n, np.float64)
    pick_at = np.full(n, NO_PICK, np.int32)
    picks = np.empty(1024, np.int32)
    picked = 0
    lacks = np.zeros(n, np.int16)
    used = np.zeros(n, np.int64)
    needed = np.zeros(n, np.int64)
    need = np.zeros(types, np.int64)
    for row in range(n):
        t, g = tenant[row], gang[row]
        age_s = min(max(now_s - submitted_at_s[row], 0.0), age_cap_s)
        credit[row] = w_age * age_s + fair[t]
        if held[row]:
            continue
        has_cpus = quota_cpus[t] < 0 or used_cpus[t] + cpus[g] <= quota_cpus[t]
        fits = has_cpus
        for k in range(envelope_at[g], envelope_at[g + 1]):
            fits = fits and used_gpus[t, envelope_type[k]] + envelope_gpus[k] <= quota_gpus[t, envelope_type[k]]
        if fits:
            used_cpus[t] += cpus[g]
            for k in range(envelope_at[g], envelope_at[g + 1]):
                used_gpus[t, envelope_type[k]] += envelope_gpus[k]
            rank[row] = max(level[t], wish[row])
            continue
        # Not all types: for each job in turn the first of its types with quota left after the jobs before it.
        jobs = job_at[g + 1] - job_at[g]
        if picked + jobs > picks.size:
            larger = np.empty(2 * picks.size + jobs, np.int32)
            for k in range(picked):  # A slice would have numba compile the check of shapes and its message: a second.
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
            lacks[row], used[row], needed[row] = kind, used_gpus[t, kind], need[kind] + job_gpus[without]
            rank[row] = 8
        elif not has_cpus:
            lacks[row], used[row], needed[row] = types, used_cpus[t], cpus[g]
            rank[row] = 8
        else:
            used_cpus[t] += cpus[g]
            for k in range(envelope_at[g], envelope_at[g + 1]):
                used_gpus[t, envelope_type[k]] += need[envelope_type[k]]
            pick_at[row] = picked
            picked += jobs
            rank[row] = max(level[t], wish[row])
        for k in range(envelope_at[g], envelope_at[g + 1]):
            need[envelope_type[k]] = 0
    return rank, credit, pick_at, picks[:picked].copy(), lacks, used, needed


@compiled
def order_queue(rank: I1, credit: F8) -> I4:
    """Rows with a rank above 0 in the order (rank, more credit, row): a bucket sort on rank and rounded credit.

    Within a bucket rows are put in order by their exact credit, so the rounding decides nothing.
    """
    n = rank.size
    low, high = np.inf, -np.inf
    waiting = 0
    for row in range(n):
        if rank[row]:
            low, high = min(low, credit[row]), max(high, credit[row])
            waiting += 1
    out = np.empty(waiting, np.int32)
    if waiting == 0:
        return out
    buckets = min(_BUCKETS, max(16, waiting))
    scale = (buckets - 1) / (high - low) if high > low else 0.0
    if not np.isfinite(scale):
        scale = 0.0  # Credits so close together that one bucket must do.
    ends = np.zeros(8 * buckets + 1, np.int32)
    key = np.empty(n, np.int32)
    for row in range(n):
        if rank[row]:
            key[row] = (rank[row] - 1) * buckets + int((high - credit[row]) * scale)
            ends[key[row] + 1] += 1
    for k in range(1, ends.size):
        ends[k] += ends[k - 1]
    for row in range(n):
        if rank[row]:
            out[ends[key[row]]] = row
            ends[key[row]] += 1
    start = 0
    for k in range(8 * buckets):
        end = ends[k]
        if end - start > _LARGE:
            rows = out[start:end].copy()
            by_credit = np.argsort(-credit[rows], kind="mergesort")
            for i in range(rows.size):
                out[start + i] = rows[by_credit[i]]
        else:
            for i in range(start + 1, end):
                row, place = out[i], i
                while place > start and credit[out[place - 1]] < credit[row]:
                    out[place] = out[place - 1]
                    place -= 1
                out[place] = row
        start = end
    return out
