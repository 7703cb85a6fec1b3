"""Replays cells with the policy `global` of commit `cases.BASELINE_COMMIT`, whose modules have other names.

PYTHONPATH=CHECKOUT python research/experiments/baseline.py FOLDER OUTCOME FOLDER OUTCOME ...
"""

import csv
import importlib
import json
import shutil
import sys
import tempfile
from pathlib import Path

_UNKNOWN = {"user", "max_runtime_s", "recurring"}
"""Columns of traces that the commit does not have."""


def main(names: list[str]) -> None:
    """Writes the outcome of each cell."""
    replay = importlib.import_module("experiments.replay").replay
    for folder, outcome in zip(names[::2], names[1::2], strict=True):
        path = Path(outcome)
        new = path.with_suffix(".new")
        with tempfile.TemporaryDirectory() as known:
            shutil.copytree(folder, known, dirs_exist_ok=True)
            _drop_columns(Path(known) / "trace.csv")
            new.write_text(json.dumps(replay(Path(known), "global")))
        new.replace(path)


def _drop_columns(path: Path) -> None:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [name for name in rows[0] if name not in _UNKNOWN], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main(sys.argv[1:])
