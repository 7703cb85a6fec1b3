"""tetris-colocation: the fraction of workloads for which no region has both data and hardware, by simulated placement.

The instances have MAST's shape (`research.tetris.generate`) and the homes of V0, V1 and V2, without replicas and
with the replicas that `tetris.replicas` makes for these homes. The simulator schedules a day of their ML jobs
(`research.traces.instance_day`). A workload that is not colocated would wait for an on-demand copy (MAST 5.3); here it
waits to the end. Replicas for V2 are also made with short storage, most of which the homes fill. The absolute values
contain counts by priority, the allocation rate, and the missed objectives of level 1.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from bench.harness import Bench, Figure, Line, Suite
from research.tetris.generate import generate
from research.tetris.versions import v1
from research.traces.instance_day import Placement, day_of
from simulation.policies import POLICIES
from simulation.run import Run
from tetris.climb import climb
from tetris.columns import Columns, Ints
from tetris.replicas import ReplicaPolicy, replicate

TABLES, REGIONS, SEEDS = 1000, 6, 3
_SEARCH_S = 10.0
_FULL = 0.8


def without_replicas(columns: Columns, home: Ints) -> Placement:
    """Returns the placement of the homes alone."""
    held = np.zeros((len(home), len(columns.regions)), np.float32)
    held[np.arange(len(home)), home] = 1.0
    return Placement(held)


def with_replicas(columns: Columns, home: Ints) -> Placement:
    """Returns where each table is stored: its home, and the replicas that Tetris adds to the homes `home`."""
    return Placement(replicate(columns, home, ReplicaPolicy()).held)


def filled(columns: Columns, home: Ints, part: float) -> Columns:
    """Returns the instance with storage of which the homes fill `part` in each region."""
    stored = np.bincount(home, weights=columns.size_bytes, minlength=len(columns.regions))
    return replace(columns, capacity_bytes=stored / part)


def day(columns: Columns, placement: Placement, seed: int) -> Counter[str]:
    """Simulates a day, and returns counts and amounts that can be summed over instances."""
    run = Run(day_of(columns, placement, seed=seed), POLICIES["global"]).go().to_json()["run"]
    out: Counter[str] = Counter()
    for level, count in run["arrived"].items():
        out[f"arrived_{level}"] = count
        out[f"non_colocated_{level}"] = run["non_colocated"][level]
    out["held_gpu_h"], out["available_gpu_h"] = run["held_gpu_hours"], run["available_gpu_hours"]
    out["judged_1"] = run["objectives_judged"]["all"]["1"]
    out["missed_1"] = run["objectives_missed"]["all"]["1"]
    return out


def run(bench: Bench) -> Iterator[Figure]:
    """Yields the fraction of non-colocated workloads of each line."""
    found: dict[str, Counter[str]] = {line.name: Counter() for line in SUITE.lines}
    for seed in range(SEEDS):
        columns = generate(TABLES, REGIONS, seed)
        homes = {"V0": columns.home}
        for name, search in (("V1", v1), ("V2", climb)):
            bench.say(f"seed {seed}: {name}")
            homes[name] = search(columns, time_s=_SEARCH_S, seed=seed).home
        full = filled(columns, homes["V2"], _FULL)
        placements = {f"{name}, no replicas": without_replicas(columns, home) for name, home in homes.items()}
        placements |= {f"{name}, replicas": with_replicas(columns, home) for name, home in homes.items()}
        placements["V2, replicas, storage short"] = with_replicas(full, homes["V2"])
        for name, placement in placements.items():
            bench.say(f"seed {seed}: a day on {name}")
            found[name].update(day(columns, placement, seed))
    sizes = {"tables": TABLES, "regions": REGIONS, "seeds": SEEDS, "search_s": _SEARCH_S, "storage_short": _FULL}
    for line in SUITE.lines:
        sums = found[line.name]
        by_level = {name: float(count) for name, count in sums.items() if "arrived" in name or "colocated" in name}
        rates = {
            "allocated": sums["held_gpu_h"] / sums["available_gpu_h"],
            "level_1_missed": sums["missed_1"] / sums["judged_1"],
        }
        rate = sums["non_colocated_all"] / sums["arrived_all"]
        yield Figure(SUITE.name, line, rate, rates | {n: c for n, c in by_level.items() if c}, SEEDS, sizes)


SUITE = Suite(
    "tetris-colocation",
    (
        Line("V2, replicas", 0.001),
        Line("V2, replicas, storage short", 0.001),
        Line("V2, no replicas", None),
        Line("V1, replicas", None),
        Line("V1, no replicas", None),
        Line("V0, replicas", None),
        Line("V0, no replicas", None),
    ),
    run,
)
