"""A published queue, as a scan leaves it."""

from math import nan

import numpy as np

from domain.priority import OVER_QUOTA_RANK
from domain.reasons import Reason, ReasonCode
from infra.db import published_queue
from tests.api.calls import T0
from tests.api.world import ApiWorld

FULL = Reason(
    ReasonCode.INSUFFICIENT_CAPACITY,
    {"region": "north", "placeable": 1, "tasks": 2, "job": "trainer", "evictable": 0},
).to_json()

EVICTED = Reason(ReasonCode.EVICTED, {"evictor": "wl-x", "evictor_rank": 1, "rank": 3})


def publish(
    world: ApiWorld,
    *items: tuple[str, int, float] | tuple[str, int, float, str],
    starts_s: tuple[float, float] = (nan, nan),
    preference: tuple[float] = (0.0,),
) -> None:
    """Publishes a scan: workloads in queue order, each with rank, credit and tenant (default: `vision`).

    `starts_s` is the interval of each expected start, in seconds since the scan. All have the same `preference`.
    """
    ids, ranks, credit, *_ = zip(*(item[:3] for item in items), strict=True)
    tenant = np.array([item[3:] == ("speech",) for item in items], np.int32)
    quotas = [
        published_queue.PublishedQuota("vision", {"a100": 8}, None),
        published_queue.PublishedQuota("speech", {}, None),
    ]
    over = sum(rank >= OVER_QUOTA_RANK for rank in ranks)
    queue = published_queue.PublishedQueue(
        1, T0.timestamp(), quotas, ["a100"], np.array(ids, "S"), np.array(ranks, np.int8), np.array(credit),
        np.array(preference * len(ids)), tenant, np.zeros(over, np.int16),
        np.full(over, 8), np.full(over, 2), np.array(starts_s * len(ids), np.float32),
    )  # fmt: skip
    with world.session() as session:
        published_queue.publish(session, queue, {"scans": 2, "scan_us": 5000})
