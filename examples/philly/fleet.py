"""Writes `fleet.yaml`: a fleet of five uneven regions, sized for the busiest hours of the Philly trace.

    python examples/philly/fleet.py --trace philly:philly.csv > examples/philly/fleet.yaml

The busiest hours are those in which the workloads would hold the most GPUs if there were always room. The number of
machines is found by simulating these hours under the policy `global`, so that held and queued GPUs average `--load`
times the supply. The file begins with comments: the result, and the command that repeats the experiment.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import yaml

from research.traces.fleet import SimulatedFleet
from research.traces.rows import TraceRow, refuse_bad
from research.traces.scenario import parse_scale, scenario_of
from research.traces.settings import TraceSettings
from research.traces.trace_readers import read_trace
from research.traces.workloads import scaled, started_at_s
from simulation.policies import POLICIES
from simulation.run import Run, Span

HOUR_S = 3600.0
TYPES = {"a100": 0.3, "p100": 0.3, "v100": 0.4}
"""The share of each GPU type in all machines."""
REGIONS = {
    "central": {"a100": 0.04, "p100": 0.42, "v100": 0.08},
    "east": {"a100": 0.45, "p100": 0.04, "v100": 0.17},
    "north": {"a100": 0.08, "p100": 0.32, "v100": 0.43},
    "south": {"a100": 0.11, "p100": 0.15, "v100": 0.28},
    "west": {"a100": 0.32, "p100": 0.07, "v100": 0.04},
}
"""The share of each region in the machines of a GPU type.

For each type, two regions can hold any gang, and one region has only a few machines.
"""
LARGEST_GANG = 16
"""The machines of the largest gang. At least two regions have a cluster of this size for each GPU type."""
ASSUMPTIONS = {"candidate_regions_percent": {}, "tick_spacing_s": 30.0}
"""All data is in all regions, and passes are at least 30 s apart."""


def fleet_body(machines: int) -> dict[str, object]:
    """Returns a fleet of about `machines` machines with 8 GPUs each. Each GPU type of a region is a cluster."""
    regions = []
    for region, parts in REGIONS.items():
        clusters = []
        for gpu_type, part in parts.items():
            count = max(1, round(machines * TYPES[gpu_type] * part))
            if part in sorted(other[gpu_type] for other in REGIONS.values())[-2:]:
                count = max(LARGEST_GANG, count)
            amounts = {"gpus": 8, "gpu_type": gpu_type, "cpus": 64, "memory": "512GiB"}
            entries = [
                {"name": f"{gpu_type}-r{rack}", "count": min(16, count - first), "rack": f"r{rack}", **amounts}
                for rack, first in enumerate(range(0, count, 16), start=1)
            ]
            clusters.append({"name": gpu_type, "machines": entries})
        regions.append({"name": region, "clusters": clusters})
    return {
        "version": 1,
        "regions": regions,
        "quotas": {"in_proportion_to": "gpu_hours", "of_supply": 0.9},
        "simulation": ASSUMPTIONS,
    }


def busiest_s(rows: Sequence[TraceRow], hours: int) -> tuple[float, float]:
    """Returns the start of the busiest `hours`, in seconds since the first submission, and their mean of held GPUs."""
    first_s = started_at_s(rows)
    last_s = max(row.submit_s for row in rows)
    held = np.zeros(int((last_s - first_s) // HOUR_S) + 2)
    for row in rows:
        begin, end = (row.submit_s - first_s) / HOUR_S, (row.submit_s + row.duration_s - first_s) / HOUR_S
        end = min(end, len(held) - 1.0)
        first, last = int(begin), int(end)
        if first == last:
            held[first] += row.gpus * (end - begin)
            continue
        held[first] += row.gpus * (first + 1 - begin)
        held[first + 1 : last] += row.gpus
        held[last] += row.gpus * (end - last)
    means = np.convolve(held, np.ones(hours) / hours, "valid")
    return float(np.argmax(means)) * HOUR_S, float(means.max())


def next_try(found: Mapping[int, float], load: float) -> int:
    """Returns the next number of machines to try, by linear interpolation of the two tries nearest to `load`.

    After a single try, the number is scaled by the ratio of the loads.
    """
    near = sorted(found, key=lambda machines: abs(found[machines] - load))[:2]
    if len(near) == 1 or found[near[0]] == found[near[1]]:
        return round(near[0] * found[near[0]] / load)
    slope = (near[1] - near[0]) / (found[near[1]] - found[near[0]])
    return round(near[0] + slope * (load - found[near[0]]))


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", required=True, help="the Philly trace, such as philly:philly.csv")
    parser.add_argument("--scale", type=parse_scale, default="2", help="as for `mizzen simulate`")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--load", type=float, default=1.1, help="held and queued GPUs divided by the supply")
    parser.add_argument("--hours", type=int, default=8)
    parser.add_argument("--days-before", type=float, default=2.0, help="days to simulate before the busiest hours")
    parser.add_argument("--tries", type=int, default=6)
    parser.add_argument("--machines", type=int, help="use this number of machines instead of searching for it")
    args = parser.parse_args()

    trace = read_trace(args.trace)
    refuse_bad(args.trace, trace.bad)
    settings = TraceSettings.model_validate(ASSUMPTIONS)
    copies = scaled(trace.rows, args.scale, args.seed, settings.copy_days, settings.copy_jitter_s)
    peak_s, peak_gpus = busiest_s(copies, args.hours)
    span = Span(max(0.0, peak_s - args.days_before * 86400), peak_s + args.hours * HOUR_S)
    found: dict[int, float] = {}
    machines = args.machines or round(peak_gpus / args.load / 8)
    while machines not in found and len(found) < (1 if args.machines else args.tries):
        fleet = SimulatedFleet.model_validate(fleet_body(machines))
        scene = scenario_of(
            fleet, trace.rows, seed=args.seed, scale=args.scale, span=span, measured=Span(peak_s, span.to_s),
            until_s=span.to_s,
        )  # fmt: skip
        found[machines] = Run(scene, POLICIES["global"]).go().to_json()["run"]["demand_over_supply"]
        print(f"{machines} machines: load {found[machines]:.3f}", file=sys.stderr)
        machines = next_try(found, args.load)
    machines = min(found, key=lambda tried: abs(found[tried] - args.load))
    load = found[machines]
    scale = ",".join(f"{gpus}+={number:g}" if gpus else f"{number:g}" for gpus, number in args.scale.items())
    times = f"--from {span.from_s / HOUR_S:g}h --to {span.to_s / HOUR_S:g}h --until {span.to_s / HOUR_S:g}h"
    print(f"# Written by examples/philly/fleet.py: {machines} machines; held and queued GPUs over supply: {load:.3f}.")
    name = Path(args.trace.partition(":")[2] or args.trace).name
    print(f"# mizzen simulate --fleet examples/philly/fleet.yaml --trace philly:{name} --seed {args.seed} \\")
    print(f"#   --scale {scale} {times} --measure {peak_s / HOUR_S:g}h..{span.to_s / HOUR_S:g}h \\")
    print("#   --policy all --json philly.json --report philly.html")
    print(yaml.safe_dump(fleet_body(machines), sort_keys=False, width=120), end="")


if __name__ == "__main__":
    main()
