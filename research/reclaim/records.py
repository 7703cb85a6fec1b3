"""The measurements of a run of one system."""

from dataclasses import dataclass, field
from math import inf, nan
from typing import Any

import numpy as np

HOUR_S = 3600.0


@dataclass
class Hit:
    """A departure that took the machine of a running job."""

    job: int
    node: int
    at_s: float
    """When the machine left."""
    notice_s: float
    gpus: int
    lost_s: float = 0.0
    """The work that is done again: from the newest complete checkpoint to the departure, or to the final checkpoint."""
    stopped_s: float = inf
    resumed_s: float = inf
    handed_over: bool = False
    """Whether the job moved with its final checkpoint before the machine left."""
    refused: str = ""
    """Why it did not, if P2 or P3 refused."""
    clairvoyant_s: float = 0.0
    """The work that is lost even if the newest checkpoint completed just before the departure."""

    def downtime_s(self, end_s: float) -> float:
        """Returns the time without computation; a job that never resumed counts until the end."""
        return min(self.resumed_s, end_s) - self.stopped_s

    def succeeded(self, within_s: float) -> bool:
        """Returns whether the job ran again at most `within_s` after its machine left."""
        return self.resumed_s <= self.at_s + within_s


@dataclass
class GpuTotals:
    """GPU seconds. `held` is measured apart from the others: held = useful + lost + overhead."""

    held: float = 0.0
    useful: float = 0.0
    """GPU seconds of work that has not been lost so far."""
    lost: float = 0.0
    saving: float = 0.0
    """Training stalled by checkpoints..."""
    moving: float = 0.0
    """...GPUs held for transfers and restarts..."""
    shadow: float = 0.0
    """...and computation beside the job's own."""

    @property
    def overhead(self) -> float:
        """GPU seconds of saves, transfers, restarts and shadow computation."""
        return self.saving + self.moving + self.shadow

    def minus(self, other: "GpuTotals") -> "GpuTotals":
        """Returns the difference."""
        return GpuTotals(*(getattr(self, name) - getattr(other, name) for name in self.__dataclass_fields__))


@dataclass
class SystemOutcome:
    """The result of one system on one scenario."""

    system: str
    seed: int
    end_s: float
    measured_from_s: float
    lent_gpu_s: float
    within_s: float
    whole: GpuTotals = field(default_factory=GpuTotals)
    measured: GpuTotals = field(default_factory=GpuTotals)
    """From `measured_from_s` on."""
    hits: list[Hit] = field(default_factory=list)
    """Only those after `measured_from_s`."""
    finished: int = 0
    jobs: int = 0
    early_moves: int = 0
    saves: int = 0
    intervals_s: list[float] = field(default_factory=list)
    """The time between the starts of two checkpoints of a job."""
    degradation: float = 0.0
    """The share of research traffic that is displaced, on links that carry any of the system's traffic."""
    migration_degradation: float = 0.0
    """The same on links that carry a migration."""
    migrated_bytes: float = 0.0
    written_bytes: float = 0.0
    local_share: float = nan
    """The share of migrations within a building."""
    wall_s: float = 0.0

    def row(self) -> dict[str, float]:
        """Returns the measured values by name."""
        hits = self.hits
        down = [hit.downtime_s(self.end_s) for hit in hits]
        emergencies = [hit for hit in hits if hit.notice_s == 0]
        planned = [hit for hit in hits if hit.notice_s > 0]
        return {
            "loss_gpu_h": sum(hit.lost_s * hit.gpus for hit in hits) / HOUR_S,
            "emergency_loss_gpu_h": sum(hit.lost_s * hit.gpus for hit in emergencies) / HOUR_S,
            "downtime_s": float(np.median(down)) if down else nan,
            "downtime_p99_s": float(np.percentile(down, 99)) if down else nan,
            "success": float(np.mean([hit.succeeded(self.within_s) for hit in hits])) if hits else nan,
            "handed_over": float(np.mean([hit.handed_over for hit in planned])) if planned else nan,
            "degradation": self.migration_degradation,
            "degradation_all": self.degradation,
            "utilization": self.measured.useful / self.lent_gpu_s if self.lent_gpu_s else nan,
            "overhead_gpu_h": self.measured.overhead / HOUR_S,
            "saving_gpu_h": self.measured.saving / HOUR_S,
            "useful_share": self.measured.useful / self.measured.held if self.measured.held else nan,
            "hits": float(len(hits)),
            "emergencies": float(len(emergencies)),
            "finished": float(self.finished),
            "early_moves": float(self.early_moves),
            "interval_s": float(np.median(self.intervals_s)) if self.intervals_s else nan,
            "written_tb": self.written_bytes / 1e12,
            "migrated_tb": self.migrated_bytes / 1e12,
            "local_share": self.local_share,
            "clairvoyant_gpu_h": sum(hit.clairvoyant_s * hit.gpus for hit in hits) / HOUR_S,
            "wall_s": self.wall_s,
        }

    def as_json(self) -> dict[str, Any]:
        """Returns the values, with null for those that do not exist, and the GPU hours of the whole run."""
        values = {name: None if value != value else value for name, value in self.row().items()}
        whole = {name: getattr(self.whole, name) / HOUR_S for name in self.whole.__dataclass_fields__}
        return {"system": self.system, "seed": self.seed, **values, "whole_gpu_h": whole}
