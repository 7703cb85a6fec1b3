"""The fleets: that of the Philly example, and nodes of openb over five regions."""

import csv
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

ASSUMPTIONS: Mapping[str, Any] = {"tick_spacing_s": 30.0}
"""A pass every 30 s at most; all else is the live scheduler's default."""
REGIONS = ("central", "east", "north", "south", "west")
SPREAD = (0.45, 0.25, 0.15, 0.1, 0.05)
"""A model's parts by region, another region first for each model: no region is like another."""
LEAST_NODES = 2
"""Of a model that is there at all: a gang of one node has two places."""


def philly_regions(example: Path) -> list[dict[str, Any]]:
    """The regions of the fleet file of the Philly example."""
    regions: list[dict[str, Any]] = yaml.safe_load(example.read_text())["regions"]
    return regions


def openb_regions(nodes: Path, machines: int) -> list[dict[str, Any]]:
    """`machines` nodes in the proportions of openb's, each model a cluster of each of its regions.

    Of the kinds of nodes (model, GPUs, CPUs, memory) those are left out that would have fewer than `LEAST_NODES`.
    """
    with nodes.open(newline="") as file:
        kinds = Counter(
            (row["model"].lower(), int(row["gpu"]), int(row["cpu_milli"]) // 1000, int(row["memory_mib"]))
            for row in csv.DictReader(file)
        )
    total = sum(kinds.values())
    common = {kind: count for kind, count in sorted(kinds.items()) if round(machines * count / total) >= LEAST_NODES}
    kept = dict(zip(common, _parts(machines, list(common.values())), strict=True))
    regions: dict[str, dict[str, list[dict[str, Any]]]] = {region: {} for region in REGIONS}
    for turn, ((model, gpus, cpus, memory_mib), count) in enumerate(kept.items()):
        for region, nodes_here in zip(_rotated(turn), _parts(count, SPREAD), strict=True):
            if nodes_here:
                name = f"{model}-{gpus}g{cpus}c-{region}"
                regions[region].setdefault(model, []).append(
                    {
                        "name": name, "count": nodes_here, "rack": name, "gpus": gpus, "gpu_type": model, "cpus": cpus,
                        "memory": f"{memory_mib}MiB",
                    }
                )  # fmt: skip
    return [
        {
            "name": region,
            "clusters": [{"name": model, "machines": machines} for model, machines in sorted(clusters.items())],
        }
        for region, clusters in regions.items()
        if clusters
    ]


def fleet_body(
    regions: Sequence[Mapping[str, Any]], quotas: Mapping[str, Mapping[str, int]], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """A fleet file of the simulator. Levels are the workloads' own: every tenant may have the highest."""
    tenants = {name: {"level": 1, "quota": dict(quota)} for name, quota in quotas.items()}
    return {"version": 1, "regions": list(regions), "tenants": tenants, "simulation": {**ASSUMPTIONS, **settings}}


def _rotated(by: int) -> tuple[str, ...]:
    by %= len(REGIONS)
    return (*REGIONS[by:], *REGIONS[:by])


def _parts(count: int, weights: Sequence[float]) -> list[int]:
    """`count` in proportion to weights: what rounding down leaves goes to the largest remainders."""
    exact = [count * weight / sum(weights) for weight in weights]
    parts = [int(part) for part in exact]
    order = sorted(range(len(exact)), key=lambda k: (parts[k] - exact[k], k))
    for k in order[: count - sum(parts)]:
        parts[k] += 1
    return parts
