"""Merges all clusters of a region into one, for jobs whose tasks may span clusters (an extension of MAST; see 4.6).

The merged columns are needed only if no single cluster can take the job without evictions, and again for the plan with
evictions. They are rebuilt each time, which costs about as much as a few bids, so no state has to be maintained.
"""

import numpy as np

from rms.arrays import B1, I4
from rms.holders import Holders
from rms.machines import Machines
from rms.region import RegionColumns


def merged(region: RegionColumns, allowed: B1) -> tuple[Machines, Holders, I4]:
    """Returns columns with a single cluster, and the region's row for each merged row. Racks are not merged.

    `allowed` selects the clusters whose machines are included.
    """
    machines, holders = region.machines, region.holders
    kind_type = machines.kind_type[machines.kind]
    rows = np.lexsort((machines.by_id, machines.rack, kind_type)).astype(np.int32)
    rows = rows[allowed[machines.kind_cluster[machines.kind[rows]]]]
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
        rack=machines.rack[rows],
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
