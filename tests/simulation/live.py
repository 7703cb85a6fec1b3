"""A snapshot of a live installation."""

from datetime import UTC, datetime, timedelta
from typing import Any

from domain.live import LiveSnapshot
from tests.simulation.scenarios import GIB

NOW = datetime(2026, 1, 2, 3, tzinfo=UTC)


def machine(region: str, number: int) -> dict[str, Any]:
    """Returns a machine of 8 GPUs."""
    amounts = {"gpus": 8, "cpus_milli": 64_000, "memory_bytes": 512 * GIB}
    return {
        "id": f"{region}/c1/m{number}",
        "region": region,
        "cluster": "c1",
        "rack": "r1",
        "gpu_type": "a100",
        **amounts,
    }


def workload(name: str, region: str | None = None, **more: Any) -> dict[str, Any]:
    """Returns a one-machine gang, submitted an hour ago; with a region, it has run there for 1000 s."""
    job = {
        "name": "main", "tasks": 1, "gpus_per_task": 8, "gpu_types": ["a100"], "cpus_milli_per_task": 8000,
        "memory_bytes_per_task": GIB,
    }  # fmt: skip
    placement = None
    if region is not None:
        began = NOW - timedelta(seconds=1000)
        held = {"machine": f"{region}/c1/m1", "gpus": 8, "cpus_milli": 8000, "memory_bytes": GIB}
        placement = {
            "region": region,
            "awarded_at": began,
            "started_at": began,
            "gpus": {"a100": 8},
            "holdings": [held],
        }
    body = {
        "id": name, "tenant": "vision", "submitted_at": NOW - timedelta(hours=1), "held": False, "jobs": [job],
        "regions": None, "ran_s": 1000.0 if region else 0.0, "max_runtime_s": 3000.0, "placement": placement,
    }  # fmt: skip
    return {**body, **more}


def snapshot(*workloads: dict[str, Any], regions: tuple[str, ...] = ("east", "west"), quota: int = 16) -> LiveSnapshot:
    """Returns a snapshot with one machine per region and one tenant."""
    tenant = {"name": "vision", "level": 2, "quota_gpus": {"a100": quota}, "quota_cpus_milli": None}
    machines = [machine(region, 1) for region in regions]
    body = {"taken_at": NOW, "machines": machines, "tenants": [tenant], "workloads": list(workloads)}
    return LiveSnapshot.model_validate(body)
