"""Replays cells with the policy `global` of commit `cases.BASELINE_COMMIT`, whose modules have other names.

PYTHONPATH=CHECKOUT python research/experiments/baseline.py FOLDER OUTCOME FOLDER OUTCOME ...
"""

import csv
import importlib
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path


def main(names: list[str]) -> None:
    """Writes the outcome of each cell."""
    replay = importlib.import_module("experiments.replay").replay
    columns = importlib.import_module("simulation.trace.reading").COLUMNS
    for folder, outcome in zip(names[::2], names[1::2], strict=True):
        path = Path(outcome)
        new = path.with_suffix(".new")
        with tempfile.TemporaryDirectory() as known:
            shutil.copytree(folder, known, dirs_exist_ok=True)
            _keep_columns(Path(known) / "trace.csv", columns)
            new.write_text(json.dumps(replay(Path(known), "global")))
        new.replace(path)


def _keep_columns(path: Path, columns: Sequence[str]) -> None:
    """Removes the columns of a trace that the commit does not know."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [name for name in columns if name in rows[0]], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main(sys.argv[1:])
