"""Who is immune to whom: no chain of evictions comes back to where it began before something else has changed.

Ranks follow from what is submitted and placed, from levels and quotas: when these change, a workload may outrank one
that evicted it. Evictions change what is placed, and so ranks, too: A evicts B, its award makes A over-quota, and B
would evict A, although nothing new was submitted. So an eviction counts until the next submission, end of a
workload, or change of a level or quota. Afterwards ranks alone decide, and a workload that was evicted fares like one
that was just submitted.
"""

from collections.abc import Collection, Mapping


def immune_to(workload: str, evictors: Mapping[str, Collection[str]]) -> frozenset[str]:
    """The workloads that one may not evict: its evictors, their evictors, and so on.

    `evictors` has each workload's evictors since the last submission, end, or change of a level or quota.
    """
    found: set[str] = set()
    left = [workload]
    while left:
        more = set(evictors.get(left.pop(), ())) - found
        found |= more
        left += more
    return frozenset(found - {workload})
