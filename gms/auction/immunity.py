"""Immunity prevents eviction cycles: a workload may not evict its direct or indirect evictors.

Ranks depend on the submitted and placed workloads, on levels and on quotas. Evictions change the placed workloads, and
thereby ranks. Example: A evicts B, the award makes A over-quota, and B could then evict A, although nothing was
submitted in between. Immunity lasts until the next submission, end of a workload, or change of a level or quota. After
that only ranks count again, and an evicted workload is treated like a newly submitted one.
"""

from collections.abc import Collection, Mapping


def immune_to(workload: str, evictors: Mapping[str, Collection[str]]) -> frozenset[str]:
    """Returns the workloads that a workload may not evict: its evictors, their evictors, and so on.

    `evictors` maps each workload to its evictors since the last submission, end, or change of a level or quota.
    """
    found: set[str] = set()
    left = [workload]
    while left:
        more = set(evictors.get(left.pop(), ())) - found
        found |= more
        left += more
    return frozenset(found - {workload})
