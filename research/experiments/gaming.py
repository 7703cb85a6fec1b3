"""`make experiment-gaming`: what persons gain who try to get ahead of others, against honest use (docs/gaming.md).

In each cell a few persons (`strategies.persons`), each of another tenant, follow a strategy. Everybody states a
`max_runtime`: the runtime times a lognormal factor of median 2, at least 1. Outcomes are stored as those of `make
experiment`, so an interrupted run resumes.
"""

import argparse
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from math import inf
from pathlib import Path
from statistics import mean, stdev

from research.experiments.cases import HOUR_S, OURS, RIVALS, SEEDS, SOURCES, THIN, VARIANTS, ExperimentCase, cases
from research.experiments.persons import FIGURES, outcome_of
from research.experiments.replay import fitting, scene_of
from research.experiments.store import GAMING, OutcomeStore
from research.experiments.strategies import HONEST, STRATEGIES

SIZES = replace(THIN, warm_up_s=4 * HOUR_S, measured_s=8 * HOUR_S, after_s=16 * HOUR_S)
"""The run ends a day after the beginning of the measured span."""
PARAMS = ("limited_percent=100", "tick_spacing_s=180", "provisioning_p90_s=150", "provisioning_p99_s=150")
"""Provisioning always takes 150 s: random times of the parts of a piece would be noise."""
GAIN_AT_MOST = 5.0
"""The goal, in percent."""
ALL = {"honest": HONEST, **STRATEGIES}


def run_case(case: ExperimentCase, store: OutcomeStore, names: Sequence[str], policy: str) -> str:
    """Runs honest use and the strategies of a cell that have no outcome yet; returns what was done."""
    missing = [name for name in ("honest", *names) if not store.path(case, GAMING + name).exists()]
    if missing:
        facts, scene = scene_of(store.scene(case), params=PARAMS)
        scene = fitting(scene)
        for name in missing:
            store.write(case, GAMING + name, outcome_of(facts, scene, ALL[name], policy))
    return f"{case.name}: {len(missing)} runs"


def gains(cells: Sequence[ExperimentCase], store: OutcomeStore, name: str, figure: str) -> list[float]:
    """Returns the gain of each seed in percent: of the sum of a figure over the persons of its cells."""
    sums: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for case in cells:
        people, honest = store.read(case, GAMING + name), store.read(case, GAMING + "honest")
        if people is None or honest is None:
            continue
        for who in honest.keys() - {"cpu_s", "others_wait_h"}:
            sums[case.seed][0] += people[who][figure]
            sums[case.seed][1] += honest[who][figure]
    sign = 1 if figure == "worked_gpu_h" else -1
    return [sign * 100 * (own / honest - 1) for own, honest in sums.values() if honest]


def table(cells: Sequence[ExperimentCase], store: OutcomeStore, names: Sequence[str]) -> list[str]:
    """Returns the table of gains: by strategy, the mean over the seeds and its standard error."""
    lines = [
        "| strategy | seeds | wait | delay of the end | GPU hours | goal |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name in names:
        found = [gains(cells, store, name, figure) for figure in FIGURES]
        if not all(found):
            continue
        shown = [f"{mean(one):+.1f} ± {stdev(one) / len(one) ** 0.5 if len(one) > 1 else inf:.1f}" for one in found]
        met = all(mean(one) <= GAIN_AT_MOST for one in found)
        lines.append(f"| {name} | {len(found[0])} | {' | '.join(shown)} | {'met' if met else '**missed**'} |")
    return lines


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="gaming", description=__doc__)
    parser.add_argument("--data", type=Path, help="the folder with philly.csv; without it, only the generated trace")
    parser.add_argument("--out", type=Path, required=True, help="the folder for cells and outcomes")
    parser.add_argument("--traces", nargs="+", default=["philly", "synthetic"], choices=list(SOURCES))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS), choices=SEEDS)
    parser.add_argument("--loads", type=float, nargs="+", default=[1.2])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), choices=list(STRATEGIES))
    parser.add_argument("--policy", default=OURS, choices=(OURS, *RIVALS), help="the scheduler; default: mizzen's")
    parser.add_argument("--jobs", type=int, default=2, help="number of cells that run concurrently")
    args = parser.parse_args()
    traces = [name for name in args.traces if args.data is not None or not SOURCES[name].file]
    out = args.out.resolve() / ("gaming" if args.policy == OURS else f"gaming-{args.policy}")
    out.mkdir(parents=True, exist_ok=True)
    store = OutcomeStore(None if args.data is None else args.data.resolve(), out, SIZES)
    chosen = list(cases(traces, args.loads, args.seeds, args.variants))
    with ProcessPoolExecutor(args.jobs) as pool:
        for line in pool.map(
            run_case, chosen, [store] * len(chosen), [args.strategies] * len(chosen), [args.policy] * len(chosen)
        ):
            print(line, flush=True)
    for trace in traces:
        for variant in args.variants:
            part = [case for case in chosen if (case.trace, case.variant) == (trace, variant)]
            print("\n".join(["", f"{trace}, {variant}:", "", *table(part, store, args.strategies)]))
    print("\n".join(["", "all cells:", "", *table(chosen, store, args.strategies)]))


if __name__ == "__main__":
    main()
