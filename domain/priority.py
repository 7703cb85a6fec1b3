"""Priority levels: 1 is the highest and 7 the lowest (MAST 4.2).

Workloads are compared by *rank*; a smaller rank is more important. A within-quota workload has the rank of its level, 1
to 7. An over-quota workload has one of the ranks 8 to 14, in the order of the levels: it is below all within-quota
workloads, and keeps its level among over-quota workloads. MAST has one rank for all of them (`OVER_QUOTA_RANK`).
"""

HIGHEST_LEVEL = 1
LOWEST_LEVEL = 7
OVER_QUOTA_RANK = LOWEST_LEVEL + 1
"""The most important over-quota rank: a workload is over-quota if its rank is at least this."""
LOWEST_RANK = LOWEST_LEVEL + LOWEST_LEVEL


def over_quota_rank(level: int, *, flat: bool = False) -> int:
    """Returns the rank of an over-quota workload of a level; `flat`: the one rank that MAST has for all levels."""
    return OVER_QUOTA_RANK if flat else LOWEST_LEVEL + level


def level_of(rank: int) -> int:
    """Returns the level of a workload from its rank, which is not flat."""
    return rank if rank < OVER_QUOTA_RANK else rank - LOWEST_LEVEL
