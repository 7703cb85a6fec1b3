"""Replays cells with the policy `global` of commit `cases.BASELINE_COMMIT`, whose modules have other names.

PYTHONPATH=CHECKOUT python research/experiments/baseline.py FOLDER OUTCOME FOLDER OUTCOME ...
"""

import importlib
import json
import sys
from pathlib import Path


def main(names: list[str]) -> None:
    """Writes the outcome of each cell."""
    replay = importlib.import_module("experiments.replay").replay
    for folder, outcome in zip(names[::2], names[1::2], strict=True):
        path = Path(outcome)
        new = path.with_suffix(".new")
        new.write_text(json.dumps(replay(Path(folder), "global")))
        new.replace(path)


if __name__ == "__main__":
    main(sys.argv[1:])
