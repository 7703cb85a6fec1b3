"""The results of `mizzen reclaim simulate`, and their form as JSON."""

from dataclasses import asdict, dataclass, field
from typing import Any

from research.reclaim.adaptivity import Adaptivity, adaptivity
from research.reclaim.scenario import EPOCH_S, STEP_S, LendingScenario


@dataclass
class Results:
    """The results of a command so far."""

    scenario: LendingScenario
    """The scenario of the first seed."""
    seeds: list[int]
    rows: list[dict[str, Any]] = field(default_factory=list)
    gap: Adaptivity | None = field(init=False)

    def __post_init__(self) -> None:
        self.gap = gap_of(self.scenario)

    def about(self) -> str:
        """Returns a paragraph about the scenario."""
        one = self.scenario
        departs = one.lending.departs
        without = (one.lending.notice_s[departs] == 0).mean() if departs.any() else 0.0
        said = (
            f"{one.name}: {len(one.machines)} machines with {int(one.machines.gpus.sum())} GPUs in "
            f"{len(one.buildings)} buildings, {one.length_s / 86400:g} days "
            f"({(one.length_s - one.measured_from_s) / 86400:g} measured); seed "
            f"{one.seed}: {int(departs.sum())} departures, {without:.0%} without notice, "
            f"{one.lent_gpu_s / 3600:,.0f} GPU hours lent in the measured days; {len(one.work)} jobs of "
            f"{float(one.work.gpus @ one.work.work_s) / 3600:,.0f} GPU hours; correlation of hazard and bandwidth "
            f"{one.correlation():.2f}"
        )
        return (
            said
            + ("" if self.gap is None else f"; adaptivity gap (theorem 2, one link): {self.gap.ratio - 1:.1%}")
            + "."
        )

    def document(self) -> dict[str, Any]:
        """Returns the results as JSON."""
        gap = None
        if self.gap is not None:
            gap = {name: None if value != value else value for name, value in asdict(self.gap).items()}
            gap["ratio"] = self.gap.ratio
        return {
            "scenario": self.scenario.name,
            "about": self.about(),
            "seeds": self.seeds,
            "gap": gap,
            "rows": self.rows,
        }


def gap_of(scenario: LendingScenario) -> Adaptivity | None:
    """Returns the adaptivity gap of theorem 2 for the scenario's mean hazard and the links within buildings; None if no
    epoch has a hazard.
    """
    per_epoch = round(EPOCH_S / STEP_S)
    epochs = scenario.links_bytes_s.shape[1] // per_epoch
    local = scenario.links_bytes_s[0, : epochs * per_epoch].reshape(epochs, per_epoch).mean(1)
    hazard = scenario.emergency_per_h.mean(0)[:epochs]
    good = hazard > 0
    return adaptivity(hazard[good], local[good], 1.0) if good.any() else None
