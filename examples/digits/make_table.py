"""Writes the table `digits`: scikit-learn's handwritten digits as one numpy file with reproducible bytes.

    python make_table.py FOLDER

The file `digits.npz` holds `images` (1797, 64) float64 in 0..1 and `labels` (1797,) int64.
"""

import argparse
import gzip
import importlib.util
import os
import sys
from pathlib import Path

import numpy as np

_PACKAGED = "datasets/data/digits.csv.gz"


def packaged_data() -> Path:
    """Returns the data file in the scikit-learn package, without importing the package, which would take a second.

    Raises:
        FileNotFoundError: scikit-learn is not installed, or it does not contain the file.
    """
    spec = importlib.util.find_spec("sklearn")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(folder) / _PACKAGED).is_file():
            return path
    raise FileNotFoundError(f"sklearn/{_PACKAGED}: not found; install scikit-learn, which contains this file")


def make_table(folder: Path) -> Path:
    """Writes `digits.npz` into `folder`, which is created if needed. Returns the path of the file."""
    with gzip.open(packaged_data(), "rt") as file:
        rows = np.loadtxt(file, delimiter=",")
    folder.mkdir(parents=True, exist_ok=True)
    path, temporary = folder / "digits.npz", folder / f".digits.{os.getpid()}.npz"
    np.savez(temporary, images=rows[:, :-1] / 16.0, labels=rows[:, -1].astype(np.int64))
    temporary.replace(path)
    return path


def main(argv: list[str] | None = None) -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description="Writes the table 'digits'.")
    parser.add_argument("folder", type=Path)
    print(make_table(parser.parse_args(argv).folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
