"""The fleets of the experiment: that of the Philly example, and nodes of the openb trace in five regions."""

import csv
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

ASSUMPTIONS: Mapping[str, Any] = {"tick_spacing_s": 30.0}
"""At most one pass every 30 s; all other settings are the live scheduler's defaults."""
REGIONS = ("central", "east", "north", "south", "west")
SPREAD = (0.45, 0.25, 0.15, 0.1, 0.05)
"""Fractions of a model's nodes by region. The order of regions rotates from model to model, so all regions differ."""
LEAST_NODES = 2
"""Fewest nodes of a kind that is kept, so that a gang of one node can be placed on two of them."""


def philly_regions(example: Path, machines: int | None = None) -> list[dict[str, Any]]:
    """Returns the regions of the fleet file of the Philly example, thinned to `machines` machines; None: all."""
    regions: list[dict[str, Any]] = yaml.safe_load(example.read_text())["regions"]
    entries = [
        (cluster, entry) for region in regions for cluster in region["clusters"] for entry in cluster["machines"]
    ]
    for cluster, _ in entries if machines is not None else ():
        cluster["machines"] = []
    for (cluster, entry), count in zip(
        entries, _parts(machines or 0, [entry["count"] for _, entry in entries]), strict=True
    ):
        if count:
            cluster["machines"].append({**entry, "count": count})
    for region in regions:
        region["clusters"] = [cluster for cluster in region["clusters"] if cluster["machines"]]
    return [region for region in regions if region["clusters"]]


def openb_regions(nodes: Path, machines: int, count: int = len(REGIONS)) -> list[dict[str, Any]]:
    """Returns regions with `machines` nodes in the proportions of openb; each model is a cluster in its regions.

    Kinds of nodes (model, GPUs, CPUs, memory) with fewer than `LEAST_NODES` nodes are left out.
    """
    with nodes.open(newline="") as file:
        kinds = Counter(
            (row["model"].lower(), int(row["gpu"]), int(row["cpu_milli"]) // 1000, int(row["memory_mib"]))
            for row in csv.DictReader(file)
        )
    total = sum(kinds.values())
    common = {kind: count for kind, count in sorted(kinds.items()) if round(machines * count / total) >= LEAST_NODES}
    kept = dict(zip(common, _parts(machines, list(common.values())), strict=True))
    regions: dict[str, dict[str, list[dict[str, Any]]]] = {region: {} for region in REGIONS[:count]}
    for turn, ((model, gpus, cpus, memory_mib), many) in enumerate(kept.items()):
        for region, nodes_here in zip(_rotated(turn, count), _parts(many, SPREAD[:count]), strict=True):
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
    """Returns the body of a fleet file. All tenants have level 1, so each workload keeps its own level."""
    tenants = {name: {"level": 1, "quota": dict(quota)} for name, quota in quotas.items()}
    return {"version": 1, "regions": list(regions), "tenants": tenants, "simulation": {**ASSUMPTIONS, **settings}}


def _rotated(by: int, count: int) -> tuple[str, ...]:
    by %= count
    return (*REGIONS[by:count], *REGIONS[:by])


def _parts(count: int, weights: Sequence[float]) -> list[int]:
    """Splits `count` in proportion to weights: rounds down, and gives the rest to the largest remainders."""
    exact = [count * weight / sum(weights) for weight in weights]
    parts = [int(part) for part in exact]
    order = sorted(range(len(exact)), key=lambda k: (parts[k] - exact[k], k))
    for k in order[: count - sum(parts)]:
        parts[k] += 1
    return parts
