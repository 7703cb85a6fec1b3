"""How much work an eviction would lose: GPU-seconds since the victim's last checkpoint.

A workload that reports no checkpoints is imputed what is usual where it runs, so that silence never pays.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from domain.scheduling import RunningWorkload

I8 = npt.NDArray[np.int64]


def lost_gpu_ms(
    running: Sequence[RunningWorkload], now_s: float, cluster: I8, owner: I8, held: I8, clusters: int
) -> I8:
    """GPU-milliseconds that each workload would lose, rounded, so that sums and comparisons are exact.

    `cluster`, `owner` and `held` (shape (holdings, 3)) are by holding: where it is, whose, and how much. A checkpoint
    in the future (another machine's clock) loses nothing. What is usual in a cluster is the median over the workloads
    that report and hold something there; where nobody does, the region's median; 0 if nobody does anywhere. A silent
    workload is judged by the cluster of its holding with the most GPUs; of equal ones, the first by name.
    """
    saved_at_s = np.array([np.nan if w.last_checkpoint_at_s is None else w.last_checkpoint_at_s for w in running])
    age_s = np.maximum(0.0, now_s - saved_at_s)
    silent = np.isnan(saved_at_s)
    reports = age_s[~silent]
    if silent.any() and len(reports):
        usual_s = np.full(clusters, np.median(reports))
        there = np.unique(cluster * len(running) + owner)
        where, who = np.divmod(there, len(running))
        for number in range(clusters):
            ages_s = age_s[who[where == number]]
            if len(ages_s := ages_s[~np.isnan(ages_s)]):
                usual_s[number] = np.median(ages_s)
        age_s[silent] = np.median(reports)
        # By owner, then most GPUs, then cluster: the first of each owner is its home.
        order = np.lexsort((cluster, -held[:, 0], owner))
        owners, first = np.unique(owner[order], return_index=True)
        home = cluster[order][first]
        judged = silent[owners]
        age_s[owners[judged]] = usual_s[home[judged]]
    age_s[np.isnan(age_s)] = 0.0
    gpus = np.array([w.gpus for w in running], np.int64)
    return np.rint(gpus * age_s * 1000).astype(np.int64)
