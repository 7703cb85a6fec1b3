"""Priority levels: 1 is the highest, 7 the lowest, everywhere (MAST 4.2).

A *rank* is what comparisons use: the level of a within-quota workload, or `OVER_QUOTA_RANK` for one that is
over-quota, which is below every level.
"""

HIGHEST_LEVEL = 1
LOWEST_LEVEL = 7
OVER_QUOTA_RANK = LOWEST_LEVEL + 1


def rank_of(level: int, over_quota: bool) -> int:
    """Rank (1..8, lower is served first) of a workload at `level` (1..7)."""
    return OVER_QUOTA_RANK if over_quota else level
