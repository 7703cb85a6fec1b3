"""Over-quota work of a tenant that the tenant's within-quota workloads do not evict."""

from dataclasses import replace

from domain.priority import OVER_QUOTA_RANK, level_of
from domain.scheduling import PlacementRequest
from rms.region import RegionColumns


def sparing(region: RegionColumns, request: PlacementRequest) -> PlacementRequest:
    """Returns the request without the right to evict over-quota work of its own tenant of an equal or better level.

    Which workloads of a tenant are within quota depends on their sizes. So without this rule a workload of 8 GPUs that
    fits into the quota would evict one of 32 GPUs that was awarded before it, has the same level, and does not fit.
    """
    own = region.over_quota_of(request.tenant)
    if not own or request.rank >= OVER_QUOTA_RANK or region.flat_over_quota:
        return request
    spares = frozenset(id_ for id_ in own if level_of(region.workload(id_).rank) <= request.rank)
    return replace(request, may_not_evict=request.may_not_evict | spares, spares=spares) if spares else request
