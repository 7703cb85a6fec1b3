"""Prints the results of `research.experiments.reclaim.systems` as the tables of docs/reclaim-experiments.md.

python -m research.experiments.reclaim.tables campus=rows.jsonl grid5000=rows.jsonl [--svg FILE]
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from infra.reports.tables import ReportTable
from research.reclaim.compare import figures, ratio
from research.reclaim.report import losses
from research.reclaim.systems import TABLE_3
from research.reclaim.tables import tables

_ORDER = (
    "slurm-pr", "slurm-pr-local", *TABLE_3[1:], "reclaimnet", "sdk", "joint", "joint-live", "none", "p1", "p2", "p3",
    "p2+p3",
)  # fmt: skip


def markdown(table: ReportTable) -> str:
    """Returns a table as Markdown; the header becomes lower case."""
    names = [one.lower().replace("gpu", "GPU").replace(" tb", " TB") for one in table.columns]
    return replace(table, columns=names).markdown()


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of a file, of the seeds for which every system has one."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    systems = {row["system"] for row in rows}
    seeds = {row["seed"] for row in rows}
    whole = {seed for seed in seeds if {row["system"] for row in rows if row["seed"] == seed} == systems}
    place = {name: n for n, name in enumerate(_ORDER)}
    kept = [row for row in rows if row["seed"] in whole]
    return sorted(kept, key=lambda row: (place.get(row["system"], len(place)), row["seed"]))


def sensitivity(rows: list[dict[str, Any]], base: list[dict[str, Any]]) -> ReportTable:
    """Returns the table of changed constants, relative to the defaults on the same seeds."""
    seeds = {row["seed"] for row in rows}
    was = figures([row for row in base if row["system"] == "published" and row["seed"] in seeds])["published"]
    found = figures([row for row in rows if row["seed"] in {one["seed"] for one in was.rows}])

    def cells(name: str) -> list[str]:
        one = found[name]
        return [
            name.replace("=", " "),
            *(f"{ratio(one, was, value)[0]:.2f}" for value in ("loss_gpu_h", "downtime_s")),
            f"{one.mean('success'):.1%}",
            f"{one.mean('degradation'):.1%}",
            f"{one.mean('saving_gpu_h'):.2f}",
        ]

    head = ["constant", "work loss", "downtime", "success", "degradation", "saving gpu-h"]
    default = ["defaults", "1", "1", f"{was.mean('success'):.1%}", f"{was.mean('degradation'):.1%}",
               f"{was.mean('saving_gpu_h'):.2f}"]  # fmt: skip
    return ReportTable(head, [default, *(cells(name) for name in found)])


def main() -> None:
    """Prints all tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="NAME=FILE")
    parser.add_argument("--sensitivity", type=Path, help="rows of --sensitivity, on the scenario of the first file")
    parser.add_argument("--svg", type=Path, help="writes the picture of the first file")
    given = parser.parse_args()
    for number, one in enumerate(given.files):
        name, _, path = one.partition("=")
        rows = rows_of(Path(path))
        found = figures(rows)
        print(f"### {name}\n\nSeeds: {len({row['seed'] for row in rows})}.\n")
        for table in tables(found).values():
            print(markdown(table), end="\n\n")
        if number == 0 and given.svg is not None:
            given.svg.write_text(losses(found).svg)
        if number == 0 and given.sensitivity is not None:
            changed = [json.loads(line) for line in given.sensitivity.read_text().splitlines()]
            print(markdown(sensitivity(changed, rows)), end="\n\n")


if __name__ == "__main__":
    main()
