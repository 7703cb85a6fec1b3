"""Prints the measured tables of docs/reclaim.md as Markdown; about ten minutes on one core."""

import argparse
from pathlib import Path

from research.experiments.reclaim import p1
from research.experiments.reclaim.traces import scores


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(prog="python -m research.experiments.reclaim", description=__doc__)
    parser.add_argument("--sites", type=int, default=6, help="number of synthetic sites for the estimates of hazards")
    parser.add_argument("--data", type=Path, help="the folder campus-availability, for the test on real machines")
    given = parser.parse_args()
    for section in p1.sections(given.sites):
        print(section, end="\n\n", flush=True)
    if given.data is not None:
        head = "site | from day | departures | dispersion | gain | expected / counted"
        print(f"Real machines\n\n{p1.table(head, scores(given.data / 'event_trace.tab.xz'))}")


if __name__ == "__main__":
    main()
