"""How much work an eviction would lose: GPU-seconds since the victim's last checkpoint.

A workload that reports no checkpoints is imputed what is usual where it runs, so that silence never pays.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from domain.scheduling import RegionSnapshot, RunningWorkload


@dataclass(frozen=True)
class LostWork:
    """The region's usual times since a checkpoint, by which silent workloads are judged."""

    now_s: float
    cluster_of: Mapping[str, str]
    """Machine to cluster."""
    usual_s: Mapping[str, float]
    """Cluster to the median over workloads that report and hold something there."""
    usual_in_region_s: float
    """The median over all that report, for clusters where nobody does; 0 if nobody does anywhere."""

    @classmethod
    def of(cls, snapshot: RegionSnapshot) -> "LostWork":
        """Learns what is usual from every running workload of the snapshot that reports."""
        cluster_of = {machine.id: machine.cluster for machine in snapshot.machines}
        ages_s: dict[str, list[float]] = defaultdict(list)
        all_ages_s: list[float] = []
        for workload in snapshot.running:
            if workload.last_checkpoint_at_s is None:
                continue
            age_s = max(0.0, snapshot.now_s - workload.last_checkpoint_at_s)
            all_ages_s.append(age_s)
            for cluster in {cluster_of[h.machine] for h in workload.holdings if h.machine in cluster_of}:
                ages_s[cluster].append(age_s)
        usual_s = {cluster: median(ages) for cluster, ages in ages_s.items()}
        return cls(snapshot.now_s, cluster_of, usual_s, median(all_ages_s) if all_ages_s else 0.0)

    def gpu_ms(self, workload: RunningWorkload) -> int:
        """GPU-milliseconds that the workload would lose, rounded, so that sums and comparisons are exact.

        A checkpoint in the future (another machine's clock) loses nothing.
        """
        if workload.last_checkpoint_at_s is None:
            age_s = self._usual_s(workload)
        else:
            age_s = max(0.0, self.now_s - workload.last_checkpoint_at_s)
        return round(workload.gpus * age_s * 1000)

    def _usual_s(self, workload: RunningWorkload) -> float:
        """The usual of the cluster of its holding with the most GPUs; of equal ones, the first cluster by name."""
        homes = [(-h.gpus, self.cluster_of[h.machine]) for h in workload.holdings if h.machine in self.cluster_of]
        return self.usual_s.get(min(homes)[1], self.usual_in_region_s) if homes else self.usual_in_region_s
