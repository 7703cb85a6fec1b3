"""Which of several plans for one workload is the best: regions' plans by all criteria, choices of victims by theirs."""

from collections.abc import Iterable, Sequence
from math import inf

import numpy as np

from domain.priority import OVER_QUOTA_RANK
from domain.scheduling import Plan
from rms.holders import Holders

_NO_VICTIMS = (0,) * OVER_QUOTA_RANK


def best(plans: Iterable[Plan]) -> Plan | None:
    """The plan that comes first by `Plan.key`, which is a total order over the plans of different regions."""
    return min(plans, default=None, key=lambda plan: plan.key)


def cost(holders: Holders, victims: Sequence[int]) -> tuple[tuple[int, ...], int, float]:
    """The criteria that are about victims, in order: numbers at ranks 1..8, lost GPU-milliseconds, the latest start."""
    if not victims:
        return _NO_VICTIMS, 0, -inf
    numbers = list(victims)
    by_rank = tuple(np.bincount(holders.rank[numbers], minlength=OVER_QUOTA_RANK + 1)[1:].tolist())
    return by_rank, int(holders.lost_gpu_ms[numbers].sum()), float(holders.started_at_s[numbers].max())
