"""The fleets that are compared on one case: static ones, and half of the mean demand plus spot or on-demand pools."""

import csv
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import yaml

from research.experiments.cases import ExperimentCase, Sizes
from research.experiments.replay import fitting, scene_of
from research.experiments.scenes import build
from research.traces.trace_readers import COLUMNS
from simulation.hardware import Hardware
from simulation.workloads import SimulatedWorkload

PEAK, MEAN, SPOT, BOTH = "static-peak", "static-mean", "half-spot", "half-spot-on-demand"
FLEETS = {
    PEAK: "static, for the peak",
    MEAN: "static, for the mean",
    SPOT: "half of the mean, and spot",
    BOTH: "half of the mean, spot, else on demand",
}
"""Description of each fleet in the report, by the name of the fleet file."""
SEEDS = (0, 1, 2)
LOAD = 1.0
"""At this load, the case's own fleet is as large as the mean demand in the measured span."""
ZONES = ("AWS1", "AWS2")
"""Groups of spot traces. Each region has one spot zone from each group."""
PRICED_AS = {"v100m16": "V100", "v100m32": "V100", "g2": "V100", "g3": "V100"}
"""Price list entries for models that the list lacks; the anonymous models of openb are priced as V100."""
IDLE_S = 600.0
START_S = 120.0
NOTICE_S = 120.0
FLUSH_SUCCEEDS = 0.95
"""Fraction of gangs that save within the notice; the others lose the work since their last checkpoint."""


@dataclass(frozen=True)
class Prices:
    """On-demand prices of GPUs in US dollars per hour, by type; and the ratio of spot to on-demand prices."""

    usd_per_h: Mapping[str, float]
    spot_factor: float


def read_prices(path: Path, types: Sequence[str]) -> Prices:
    """Reads the prices of GPU types from a list of a cloud's accelerators; the cheapest zone counts.

    Raises:
        KeyError: the list lacks a type.
    """
    on_demand: dict[str, float] = {}
    spot: dict[str, float] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["AcceleratorCount"] in ("1", "1.0") and row["Price"] and row["SpotPrice"]:
                name = row["AcceleratorName"].upper()
                on_demand[name] = min(on_demand.get(name, float("inf")), float(row["Price"]))
                spot[name] = min(spot.get(name, float("inf")), float(row["SpotPrice"]))
    names = {gpu_type: PRICED_AS.get(gpu_type, gpu_type).upper() for gpu_type in types}
    ratios = [spot[name] / on_demand[name] for name in names.values()]
    return Prices({gpu_type: on_demand[name] for gpu_type, name in names.items()}, sum(ratios) / len(ratios))


def build_fleets(case: ExperimentCase, data: Path, out: Path, sizes: Sizes) -> Path:
    """Writes a case with the files of all fleets into a folder of `out`; returns the folder.

    The rows of the written trace contain all values that would be drawn, so every fleet has the same workloads. These
    are the workloads that fit on all fleets.
    """
    build(case, data / "ml-jobs", out, sizes)
    folder = case.folder(out)
    facts, scene = scene_of(folder)
    scene = fitting(scene)
    body = yaml.safe_load((folder / "fleet.yaml").read_text())
    types = sorted({machine["gpu_type"] for _, machine in _entries(body["regions"])})
    prices = read_prices(data / "prices" / "gcp-2022-06-24.csv", types)
    peak = _peak(scene.workloads, facts) / facts["gpus"]
    facts["peak"] = peak
    # Over-quota workloads do not launch machines, so quotas are shares of the peak fleet for all fleets.
    facts["quotas"] = {t: {k: ceil(n * peak) for k, n in quota.items()} for t, quota in facts["quotas"].items()}
    for tenant, quota in facts["quotas"].items():
        body["tenants"][tenant]["quota"] = quota
    body["simulation"]["flush_succeeds"] = FLUSH_SUCCEEDS
    static = {PEAK: peak, MEAN: 1.0, SPOT: 0.5, BOTH: 0.5}
    for name, times in static.items():
        regions = _scaled(body["regions"], times, prices)
        more = {} if name in (PEAK, MEAN) else _pools(body["regions"], regions, peak, case, data, prices, name == BOTH)
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({**body, "regions": regions, **more}, sort_keys=False))
    able = [
        Hardware(scenario.sources.possible(scenario.machines))
        for scenario in (scene_of(folder, f"{name}.yaml")[1] for name in (PEAK, SPOT))
    ]
    kept = [w for w in scene.workloads if all(hardware.regions_for(job) for hardware in able for job in w.jobs)]
    first_s = min(w.submit_s for w in kept)
    _write_rows(folder / "trace.csv", kept, first_s)
    # Times are relative to the first row.
    shift_s = -first_s - facts["from_s"]
    for name in ("from_s", "measure_from_s", "measure_to_s", "until_s"):
        facts[name] += shift_s
    (folder / "case.json").write_text(json.dumps(facts, indent=1))
    return folder


def _entries(regions: Sequence[Mapping[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Returns (region, machine entry) for all machine entries."""
    return [
        (region["name"], machine)
        for region in regions
        for cluster in region["clusters"]
        for machine in cluster["machines"]
    ]


def _peak(workloads: Sequence[SimulatedWorkload], facts: Mapping[str, Any]) -> float:
    """Returns the peak of held GPUs in the measured span if each workload started at its arrival."""
    changes = []
    from_s, to_s = (facts[name] - facts["from_s"] for name in ("measure_from_s", "measure_to_s"))
    for w in workloads:
        since_s, until_s = max(from_s, w.arrives_s), min(to_s, w.arrives_s + w.duration_s)
        if since_s < until_s:
            changes += [(since_s, w.gpus), (until_s, -w.gpus)]
    held = most = 0
    for _, gpus in sorted(changes):
        held += gpus
        most = max(most, held)
    return float(most)


def _scaled(regions: Sequence[Mapping[str, Any]], times: float, prices: Prices) -> list[dict[str, Any]]:
    """Returns the regions with machine counts times `times` (at least 1 per entry), and prices on their clusters."""
    return [
        {
            "name": region["name"],
            "clusters": [
                {
                    **cluster,
                    "prices": {m["gpu_type"]: prices.usd_per_h[m["gpu_type"]] for m in cluster["machines"]},
                    "machines": [
                        {**machine, "count": max(1, round(machine["count"] * times))} for machine in cluster["machines"]
                    ],
                }
                for cluster in region["clusters"]
            ],
        }
        for region in regions
    ]


def _pools(
    base: Sequence[Mapping[str, Any]],
    static: Sequence[Mapping[str, Any]],
    peak: float,
    case: ExperimentCase,
    data: Path,
    prices: Prices,
    on_demand: bool,
) -> dict[str, Any]:
    """Returns the clouds and pools of a fleet: a pool per region and machine type, up to what is missing for the peak.

    Pools launch machines in the region's zones, whose spot capacity replays traces.
    """
    wanted = Counter({key: ceil(count * peak) for key, count in _counts(base).items()})
    missing = wanted - _counts(static)
    pools = [
        {"region": region, "name": name.lower(), "machine_types": [name], "max_size": most, "idle_s": IDLE_S}
        for (region, name), most in sorted(missing.items())
    ]
    zones: dict[str, Any] = {}
    for number, region in enumerate(sorted({region for region, _ in missing})):
        most = sum(count for (where, _), count in missing.items() if where == region)
        for group in ZONES:
            files = sorted((data / "spot-availability" / group).glob("*.json"))
            counts = _window(files[number % len(files)], case.seed, number)
            zones[f"{region}-{group.lower()}"] = {
                "region": region, "counts": counts, "gap_s": 300.0, "times": ceil(most / max(*counts, 1)),
                "price_factor": round(prices.spot_factor, 4),
            }  # fmt: skip
        if on_demand:
            zones[f"{region}-od"] = {"region": region, "kind": "on_demand", "most": most}
    types = {}
    for _, m in _entries(base):
        of = {key: m[key] for key in ("gpus", "gpu_type", "cpus", "memory")}
        types[_type_of(m)] = {**of, "usd_per_h": m["gpus"] * prices.usd_per_h[m["gpu_type"]]}
    cloud = {"zones": zones, "machine_types": types, "start_median_s": START_S, "notice_s": NOTICE_S, "seed": case.seed}
    return {"providers": {"cloud": cloud}, "pools": pools}


def _type_of(machine: Mapping[str, Any]) -> str:
    return f"{machine['gpu_type']}-{machine['gpus']}"


def _counts(regions: Sequence[Mapping[str, Any]]) -> Counter[tuple[str, str]]:
    """Returns the number of machines by region and type."""
    out: Counter[tuple[str, str]] = Counter()
    for region, machine in _entries(regions):
        out[region, _type_of(machine)] += machine["count"]
    return out


def _window(path: Path, seed: int, number: int) -> list[int]:
    """Returns two days of a trace's intervals, with a different start for each seed and region."""
    counts: list[int] = json.loads(path.read_text())["data"]
    begin = (1009 * seed + 311 * number) % len(counts)
    return (counts + counts)[begin : begin + 576]


def _write_rows(path: Path, workloads: Sequence[SimulatedWorkload], first_s: float) -> None:
    """Writes the workloads in the simulator's own format, with all drawn values; the first is submitted at 0."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for w in sorted(workloads, key=lambda w: (w.submit_s, w.id)):
            (job,) = w.jobs
            cpus, memory = job.cpus_milli_per_task / 1000, job.memory_bytes_per_task
            # `duration_s` of a workload from before the span is the rest of its work at `arrives_s`.
            duration_s = w.duration_s + w.arrives_s - w.submit_s
            types = "|".join(job.gpu_types) or "-"
            amounts = job.tasks, job.gpus_per_task, types, cpus, memory
            writer.writerow((w.id, w.submit_s - first_s, w.tenant, w.level, duration_s, *amounts, ""))
