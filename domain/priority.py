"""Priority levels: 1 is the highest and 7 the lowest (MAST 4.2).

Workloads are compared by *rank*: the level of a within-quota workload, or `OVER_QUOTA_RANK`, which is below every
level, for an over-quota workload.
"""

HIGHEST_LEVEL = 1
LOWEST_LEVEL = 7
OVER_QUOTA_RANK = LOWEST_LEVEL + 1
