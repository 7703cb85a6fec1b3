"""What is compared: traces, loads, seeds and policies, and where a case's files are."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

HOUR_S = 3600.0
LOADS = (0.8, 1.0, 1.3)
"""GPU hours offered in the measured span over those of the fleet."""
SEEDS = (0, 1, 2, 3, 4)
"""Each with a window of its own."""
HIGH_LEVELS = (1, 2)
HIGH_AT_MOST = 0.5
"""Of the fleet's GPU hours, what levels 1 and 2 offer at most."""
POLICIES = ("global", "global-joint", "federated", "cluster", "fifo", "slurm", "kueue", "kueue-best-effort")
BEFORE = "global-before"
"""`global` of another checkout."""
DATA = ("global", "global-joint")
"""Compared once more where data is in few regions."""


@dataclass(frozen=True)
class Trace:
    """A trace, and what is taken for a gang in it."""

    name: str
    file: str
    gang_gpus: int
    """Gangs have so many GPUs at least: windows are those in which most GPUs of gangs are submitted."""


TRACES = {
    trace.name: trace for trace in (Trace("philly", "philly.csv", 8), Trace("openb", "openb_pod_list_default.csv", 2))
}
NODES = "openb_node_list_gpu_node.csv"
MIXED = "mixed"
"""Each tenant has work of all levels: they are drawn for each workload, by MAST's distribution."""
BY_TENANT = "tenants"
"""All work of a tenant has one level: at times no workload may be evicted."""
FEW_REGIONS = "data"
"""As `MIXED`, and data is in one to three regions for most workloads; otherwise it is everywhere."""
VARIANTS = (MIXED, BY_TENANT, FEW_REGIONS)


@dataclass(frozen=True)
class Sizes:
    """How much is simulated."""

    warm_up_s: float = 12 * HOUR_S
    measured_s: float = 12 * HOUR_S
    after_s: float = HOUR_S
    """Longer than the longest objective: what waits at the end of the measured span is judged."""
    machines: int = 76
    """Nodes drawn for openb; Philly's fleet is that of its example."""


@dataclass(frozen=True)
class Case:
    """One fleet, one span of a trace."""

    trace: str
    load: float
    seed: int
    variant: str = MIXED

    @property
    def name(self) -> str:
        """Also its folder's name."""
        return f"{self.trace}-{self.variant}-{self.load:g}-{self.seed}"

    @property
    def policies(self) -> tuple[str, ...]:
        """What runs on it."""
        return DATA if self.variant == FEW_REGIONS else POLICIES

    def folder(self, out: Path) -> Path:
        """Where its files are."""
        return out / self.name


def case_of(name: str) -> Case:
    """The case of a name.

    Raises:
        ValueError: it is none.
    """
    trace, variant, load, seed = name.split("-")
    return Case(trace, float(load), int(seed), variant)


def cases(
    loads: Sequence[float] = LOADS, seeds: Sequence[int] = SEEDS, variants: Sequence[str] = VARIANTS
) -> Iterator[Case]:
    """All cases, those of the first seeds first."""
    for seed in seeds:
        for variant in variants:
            for load in loads:
                yield from (Case(trace, load, seed, variant) for trace in TRACES)
