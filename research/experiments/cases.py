"""The cells of the experiment: traces, levels, loads and seeds; the sizes of their scenes, and the policies."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

HOUR_S = 3600.0
LOADS = (0.85, 1.2)
"""GPU hours offered in the measured span, divided by those of the fleet."""
SEEDS = (0, 1, 2, 3, 4)
"""Each seed has its own window of the trace, and its own draws."""
HIGH_LEVELS = (1, 2)
HIGH_AT_MOST = 0.5
"""Upper bound on the load of levels 1 and 2, as a fraction of the fleet's GPU hours."""
OURS, MAST, BASELINE = "global", "mast", "baseline"
RIVALS = ("federated", "slurm", "slurm-qos", "kueue-best-effort", "kueue-fair", "kai", "volcano")
POLICIES = (OURS, MAST, *RIVALS)
BASELINE_COMMIT = "f5d138b"
"""The commit whose `global` is the baseline: before claims and the present reservations."""


@dataclass(frozen=True)
class TraceSource:
    """A trace, and the number of GPUs from which its workloads count as gangs."""

    name: str
    file: str
    """Empty: the trace is generated."""
    gang_gpus: int
    """Fewest GPUs of a gang. Windows are the spans in which the most GPUs of gangs are submitted."""


TRACES = {
    trace.name: trace
    for trace in (TraceSource("philly", "philly.csv", 8), TraceSource("openb", "openb_pod_list_default.csv", 2))
}
SYNTHETIC = TraceSource("synthetic", "", 8)
SOURCES = {**TRACES, SYNTHETIC.name: SYNTHETIC}
NODES = "openb_node_list_gpu_node.csv"
MIXED = "drawn"
"""Each tenant has workloads of all levels: the level of each workload is drawn from MAST's distribution."""
BY_TENANT = "tenants"
"""All workloads of a tenant have one level, so that at times no workload may be evicted."""
VARIANTS = (MIXED, BY_TENANT)


@dataclass(frozen=True)
class Sizes:
    """The lengths of the simulated spans, and the sizes of the fleets."""

    warm_up_s: float = 12 * HOUR_S
    measured_s: float = 12 * HOUR_S
    after_s: float = HOUR_S
    """Time after the measured span. It exceeds the longest objective, so all waits of the measured span are judged."""
    machines: int = 76
    """Nodes of the openb fleet."""
    regions: int = 5
    """Regions of the openb fleet."""
    philly_machines: int | None = None
    """Machines of the fleet of the Philly example, in its proportions; None: all."""
    tick_spacing_s: float = 30.0
    """Shortest time between two passes."""


THIN = Sizes(
    warm_up_s=5 * HOUR_S, measured_s=8 * HOUR_S, machines=18, regions=3, philly_machines=32, tick_spacing_s=60.0
)
"""Small enough that all cells run in minutes."""


@dataclass(frozen=True)
class ExperimentCase:
    """One cell: a trace, a load, a seed and a way to assign levels."""

    trace: str
    load: float
    seed: int
    variant: str = MIXED

    @property
    def name(self) -> str:
        """The name of the cell and of its folder."""
        return f"{self.trace}-{self.variant}-{self.load:g}-{self.seed}"

    def folder(self, out: Path) -> Path:
        """Returns the folder of the cell's files."""
        return out / self.name


def cases(
    traces: Sequence[str] = tuple(SOURCES),
    loads: Sequence[float] = LOADS,
    seeds: Sequence[int] = SEEDS,
    variants: Sequence[str] = VARIANTS,
) -> Iterator[ExperimentCase]:
    """Yields all cells, ordered by seed."""
    for seed, variant, load, trace in product(seeds, variants, loads, traces):
        yield ExperimentCase(trace, load, seed, variant)
