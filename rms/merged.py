"""The columns of a region with its clusters merged into one, for jobs whose tasks may span clusters."""

from collections.abc import Iterator

import numpy as np

from domain.scheduling import JobRequest
from domain.spread import SpreadLevel
from rms.arrays import B1, I4
from rms.holders import Holders
from rms.machines import Machines
from rms.region import RegionColumns


def merged(region: RegionColumns, allowed: B1) -> tuple[Machines, Holders, I4]:
    """Returns columns with a single cluster, and the region's row for each merged row. Racks are not merged.

    `allowed` selects the clusters whose machines are included. A rack with machines of several dynamic clusters counts
    as one for each of them, as in the region's own columns, whose rows are in the order of these clusters.
    """
    machines, holders = region.machines, region.holders
    kind_type, among = machines.kind_type[machines.kind], machines.kind_cluster[machines.kind]
    rows = np.lexsort((machines.by_id, among, machines.rack, kind_type)).astype(np.int32)
    rows = rows[allowed[among[rows]]]
    _, rack = np.unique(np.stack((machines.rack[rows], among[rows])), axis=1, return_inverse=True)
    types, first, kind = np.unique(kind_type[rows], return_index=True, return_inverse=True)
    kinds = np.flatnonzero(allowed[machines.kind_cluster])
    to_kind = np.searchsorted(types, machines.kind_type[kinds])
    kind_free = np.zeros((3, len(types)), np.int64)
    kind_held = np.zeros((len(holders.kind_held), 3, len(types)), np.int64)
    for old, new in zip(kinds.tolist(), to_kind.tolist(), strict=True):
        kind_free[:, new] += machines.kind_free[:, old]
        kind_held[:, :, new] += holders.kind_held[:, :, old]
    one = Machines(
        free=np.ascontiguousarray(machines.free[:, rows]),
        coarse=np.ascontiguousarray(machines.coarse[:, rows]),
        total=np.ascontiguousarray(machines.total[:, rows]),
        rack=rack.reshape(-1).astype(np.int32),
        by_id=machines.by_id[rows],
        kind=kind.astype(np.int32),
        kind_at=np.append(first, len(rows)).astype(np.int32),
        kind_free=kind_free,
        kind_type=types.astype(np.int32),
        kind_cluster=np.zeros(len(types), np.int32),
        cluster_at=np.array([0, len(types)], np.int32),
        version=np.zeros(1, np.int64),
        clock=np.zeros(1, np.int64),
    )
    # Holdings on excluded machines get a row number beyond the last row, which no group of machines contains.
    to_row = np.full(len(machines.rack), len(rows), np.int32)
    to_row[rows] = np.arange(len(rows))
    there = np.flatnonzero(holders.last > holders.first)
    keys = (*holders.words[there].T[::-1], holders.started_at_s[there], -holders.rank[there].astype(np.int64))
    scan = there[np.lexsort(keys)].astype(np.int32)
    return (
        one,
        holders._replace(
            machine=to_row[holders.machine] if len(to_row) else holders.machine,
            kind_held=kind_held,
            scan=scan.reshape(1, -1),
            scanned=np.array([len(scan)], np.int32),
        ),
        rows,
    )


def scopes(region: RegionColumns, job: JobRequest, anywhere: B1) -> Iterator[B1]:
    """Yields masks of the clusters that the tasks of a job may span: all `anywhere`, and those of each zone."""
    required = job.topology.required is SpreadLevel.ZONE
    if not required:
        yield anywhere
    if required or job.topology.preferred is SpreadLevel.ZONE:
        zones = np.array(region.zones)
        for zone in sorted(set(region.zones)):
            if (there := anywhere & (zones == zone)).any():
                yield there
