"""The scenario of the demo: three regions, three tenants, tables with few replicas, and a dozen gangs."""

from dataclasses import dataclass
from typing import Any

from infra.config.scheduling import LifecycleSettings, SchedulerSettings
from infra.stack.fleet import ClusterEntry, Fleet, MachineEntry, RegionEntry

SCHEDULER = SchedulerSettings(scan_interval_s=5.0, min_runtime_s=2.0, bid_timeout_s=15.0)
LIFECYCLE = LifecycleSettings(heartbeat_timeout_s=5.0, node_lost_after_s=5.0, collect_interval_s=1.0)


def _machine(name: str, gpu_type: str, count: int | None = None) -> MachineEntry:
    return MachineEntry(
        name=name, count=count, gpus=4, gpu_type=gpu_type, cpus=8, memory=8 << 30, rack=f"rack-{gpu_type}"
    )


def _region(name: str, a: MachineEntry, b: MachineEntry) -> RegionEntry:
    return RegionEntry(
        name=name, clusters=(ClusterEntry(name="a", machines=(a,)), ClusterEntry(name="b", machines=(b,)))
    )


FLEET = Fleet(
    regions=(
        _region("east", _machine("a100", "a100", 3), _machine("v100", "v100")),
        _region("north", _machine("h100", "h100"), _machine("v100", "v100")),
        _region("west", _machine("v100", "v100"), _machine("v100", "v100")),
    )
)

TENANTS: dict[str, tuple[int, dict[str, int]]] = {
    # name: (priority level, quota by GPU type)
    "vision": (2, {"a100": 12, "h100": 4}),
    "speech": (4, {"a100": 4, "v100": 12}),
    "research": (6, {"a100": 8, "v100": 8}),
}

TABLES: dict[str, tuple[str, tuple[str, ...]]] = {
    # name: (home region, regions with another complete replica)
    "digits": ("east", ("west",)),
    "scans": ("west", ()),
}


STEP_S = 0.05
"""Minimum duration of a training step, so that a viewer can follow the events."""


@dataclass(frozen=True)
class DemoWorkload:
    """One workload of the demo: `tasks` processes with `accelerators` each; empty means no GPUs."""

    name: str
    tenant: str
    tasks: int
    accelerators: tuple[str, ...]
    steps: int
    seed: int
    table: str = "digits"
    helper: bool = False
    """Whether the workload has a second job without GPUs, which lists the data during the training."""

    def document(self) -> dict[str, Any]:
        """Returns the workload document, as a user would write it."""
        run = (
            f'exec "${{MIZZEN_PYTHON:-python3}}" train.py --table {self.table} --steps {self.steps}'
            f" --step-s {STEP_S} --seed {self.seed} --silence-s 20"
        )
        jobs: list[dict[str, Any]] = [
            {
                "name": "trainer",
                "role": "trainer",
                "tasks": self.tasks,
                "resources": {"cpus": 1, "memory": "256MiB"}
                | ({"accelerators": list(self.accelerators)} if self.accelerators else {}),
                "run": run,
            }
        ]
        if self.helper:
            look = f'ls -l "${{MIZZEN_TABLE_{self.table.upper()}#file://}}" && sleep 1'
            jobs.append({"name": "look", "role": "preprocessing", "tasks": 1, "resources": {"cpus": 1}, "run": look})
        return {
            "version": 1,
            "name": self.name,
            "tenant": self.tenant,
            "labels": {"demo": "main-job"},
            "tables": [self.table],
            "checkpoint": {"interval": "2s", "grace": "10s", "keep": 2},
            "limits": {"max_runtime": "10m", "max_silence": "60s", "retries": 1},
            "jobs": jobs,
        }


FIRST = (
    # These fill 12 a100 and 12 v100 in the regions that have the data.
    DemoWorkload("translate", "speech", 2, ("a100:2",), steps=420, seed=1),
    DemoWorkload("ablation-1", "research", 2, ("a100:2", "v100:2"), steps=600, seed=2),
    DemoWorkload("ablation-2", "research", 2, ("a100:2", "v100:2"), steps=600, seed=3),
    DemoWorkload("dictation", "speech", 4, ("v100:1",), steps=800, seed=4),
    DemoWorkload("wakeword", "speech", 2, ("v100:2",), steps=200, seed=5),
    DemoWorkload("denoise", "speech", 1, ("v100:4",), steps=420, seed=6, helper=True),
)
THEN = (
    # There is no room for these: they wait in the queue, with a reason.
    DemoWorkload("ablation-3", "research", 1, ("a100:2",), steps=120, seed=7),
    DemoWorkload("ablation-4", "research", 2, ("a100:1",), steps=100, seed=8),
    # This one needs no GPUs and is placed immediately.
    DemoWorkload("ocr", "vision", 2, (), steps=150, seed=9),
)
FAR_DATA = DemoWorkload("radiology", "vision", 2, ("h100:1",), steps=160, seed=10, table="scans")
"""A workload whose table is only in region west, and whose GPUs (h100) are only in region north."""
OVER_QUOTA = DemoWorkload("accents", "speech", 1, ("h100:2",), steps=120, seed=11, table="scans")
"""A workload whose tenant has no quota for h100: it runs only while these GPUs are otherwise unused."""
URGENT = DemoWorkload("frontier", "vision", 2, ("a100:4",), steps=220, seed=12)
"""A workload that needs two whole machines while the fleet is full, so it evicts other workloads."""

ALL = (*FIRST, *THEN, FAR_DATA, OVER_QUOTA, URGENT)
