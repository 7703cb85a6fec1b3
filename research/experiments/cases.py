"""The cases of the experiment: traces, loads, seeds and policies, and the folders of their files."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

HOUR_S = 3600.0
LOADS = (0.8, 1.0, 1.3)
"""GPU hours offered in the measured span, divided by those of the fleet."""
SEEDS = (0, 1, 2, 3, 4)
"""Each seed has its own window of the trace."""
HIGH_LEVELS = (1, 2)
HIGH_AT_MOST = 0.5
"""Upper bound on the load of levels 1 and 2, as a fraction of the fleet's GPU hours."""
POLICIES = ("global", "global-joint", "federated", "cluster", "fifo", "slurm", "kueue", "kueue-best-effort")
BEFORE = "global-before"
"""Name of the outcome of `global` in an earlier checkout."""
DATA = ("global", "global-joint")
"""The policies of the variant in which data is in few regions."""


@dataclass(frozen=True)
class TraceSource:
    """A trace, and the number of GPUs from which its workloads count as gangs."""

    name: str
    file: str
    gang_gpus: int
    """Fewest GPUs of a gang. Windows are the spans in which the most GPUs of gangs are submitted."""


TRACES = {
    trace.name: trace
    for trace in (TraceSource("philly", "philly.csv", 8), TraceSource("openb", "openb_pod_list_default.csv", 2))
}
NODES = "openb_node_list_gpu_node.csv"
MIXED = "mixed"
"""Each tenant has workloads of all levels: the level of each workload is drawn from MAST's distribution."""
BY_TENANT = "tenants"
"""All workloads of a tenant have one level, so that at times no workload may be evicted."""
FEW_REGIONS = "data"
"""As `MIXED`, but the data of most workloads is in one to three regions; in the other variants it is in all."""
VARIANTS = (MIXED, BY_TENANT, FEW_REGIONS)


@dataclass(frozen=True)
class Sizes:
    """The lengths of the simulated spans, and the size of the openb fleet."""

    warm_up_s: float = 12 * HOUR_S
    measured_s: float = 12 * HOUR_S
    after_s: float = HOUR_S
    """Time after the measured span. It exceeds the longest objective, so all waits of the measured span are judged."""
    machines: int = 76
    """Nodes of the openb fleet; the Philly fleet is that of the example."""


@dataclass(frozen=True)
class ExperimentCase:
    """One comparison of policies: a trace, a load, a seed and a variant."""

    trace: str
    load: float
    seed: int
    variant: str = MIXED

    @property
    def name(self) -> str:
        """The name of the case and of its folder."""
        return f"{self.trace}-{self.variant}-{self.load:g}-{self.seed}"

    @property
    def policies(self) -> tuple[str, ...]:
        """The policies that are run on the case."""
        return DATA if self.variant == FEW_REGIONS else POLICIES

    def folder(self, out: Path) -> Path:
        """Returns the folder of the case's files."""
        return out / self.name


def case_of(name: str) -> ExperimentCase:
    """Returns the case with a name.

    Raises:
        ValueError: the name is malformed.
    """
    trace, variant, load, seed = name.split("-")
    return ExperimentCase(trace, float(load), int(seed), variant)


def cases(
    loads: Sequence[float] = LOADS, seeds: Sequence[int] = SEEDS, variants: Sequence[str] = VARIANTS
) -> Iterator[ExperimentCase]:
    """Yields all cases, ordered by seed."""
    for seed in seeds:
        for variant in variants:
            for load in loads:
                yield from (ExperimentCase(trace, load, seed, variant) for trace in TRACES)
