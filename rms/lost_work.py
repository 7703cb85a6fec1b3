"""Lost work of an eviction: GPU-seconds since the victim's last checkpoint.

For a workload without reported checkpoints, the median checkpoint age of its cluster is imputed. So a workload gains no
protection by not reporting checkpoints. A replica of a service has no checkpoints; its eviction loses its cold start.
"""

import numpy as np

from rms.arrays import F8, I4, I8

NO_CLUSTER = -1
"""Home cluster of a workload that holds nothing on an open machine."""


def lost_gpu_ms(saved_at_s: F8, lost_s: F8, gpus: I8, now_s: float, home: I4, scan: I4, scanned: I4) -> I8:
    """Returns the GPU-milliseconds that each holder would lose, as integers, so that sums and comparisons are exact.

    `saved_at_s` is NaN for a holder that has reported no checkpoint. Its checkpoint age is then imputed from its `home`
    cluster, which is the cluster of its holding with the most GPUs (ties: the first by name). The imputed age is the
    median of the holders in that cluster that have reported a checkpoint, or the median of the region if there are none
    in the cluster, or 0 if there are none in the region. `scan` (clusters, positions) and `scanned` list the holders of
    each cluster. A checkpoint time in the future (clock skew) gives an age of 0.

    `lost_s` is the lost work in seconds of holders for which it does not depend on checkpoints, and NaN for the others.
    """
    reported_s = np.maximum(0.0, now_s - saved_at_s)
    age_s, silent = reported_s.copy(), np.isnan(reported_s)
    if not silent.all():
        usual_s = np.median(reported_s[~silent])
        for cluster in np.unique(home[silent]):
            there = reported_s[scan[cluster, : scanned[cluster]]] if cluster != NO_CLUSTER else reported_s[:0]
            there = there[~np.isnan(there)]
            age_s[silent & (home == cluster)] = np.median(there) if there.size else usual_s
    age_s[np.isnan(age_s)] = 0.0
    fixed = ~np.isnan(lost_s)
    age_s[fixed] = lost_s[fixed]
    return np.rint(gpus * age_s * 1000).astype(np.int64)
