"""How much work an eviction would lose: GPU-seconds since the victim's last checkpoint.

A workload that reports no checkpoints is imputed what is usual where it runs, so that silence never pays.
"""

import numpy as np

from rms.arrays import F8, I4, I8

NO_CLUSTER = -1
"""The home of a workload that holds nothing on a machine that is there."""


def lost_gpu_ms(saved_at_s: F8, gpus: I8, now_s: float, home: I4, scan: I4, scanned: I4) -> I8:
    """GPU-milliseconds that each holder would lose, rounded, so that sums and comparisons are exact.

    By holder: `saved_at_s` is NaN where it reports no checkpoint; then `home` is the cluster by which it is judged,
    that of its holding with the most GPUs, of equal ones the first by name. `scan` (clusters, places) and `scanned`
    list those who hold something in a cluster. A checkpoint in the future (another machine's clock) loses nothing.
    What is usual in a cluster is the median over those who report and hold something there; where nobody does, the
    region's median; 0 if nobody does anywhere.
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
    return np.rint(gpus * age_s * 1000).astype(np.int64)
