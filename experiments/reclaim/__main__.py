"""Prints the measured tables of docs/reclaim.md as Markdown; about five minutes on one core."""

import argparse

from experiments.reclaim import p1


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sites", type=int, default=8, help="number of synthetic sites for the estimates of hazards")
    given = parser.parse_args()
    for section in p1.sections(given.sites):
        print(section, end="\n\n", flush=True)


if __name__ == "__main__":
    main()
