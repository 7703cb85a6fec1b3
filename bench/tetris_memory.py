"""tetris-memory: the memory growth of a search, on 1,000,000 tables, 30 regions and 10,000,000 edges.

It is compared with the bytes of the input's arrays (`tetris.columns.Columns`). Each round is a new process: it reads
the instance from Parquet, reads its resident memory, builds the problem and runs a pass over all tables, and reads its
peak resident memory.
"""

import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from bench.harness import Bench, Figure, Line, Suite, interleave, medians
from bench.tetris_moves import REGIONS, SHARED, TABLES
from research.tetris.generate import generate
from tetris.climb import load, one_pass
from tetris.columns import Columns
from tetris.folders import read_folder, write_folder
from tetris.kernels import search
from tetris.problem import PlacementProblem


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def main(folder: str) -> None:
    """Measures in this process, and prints the growth and the bytes of the input as JSON."""
    load()
    columns = read_folder(Path(folder))
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # Resets VmHWM, the peak.
    before = _status_bytes("VmRSS")
    problem = PlacementProblem(columns)
    one_pass(problem, np.zeros(search.N_TALLY))
    print(json.dumps({"grown": _status_bytes("VmHWM") - before, "input": _bytes_of(columns)}))


def _bytes_of(columns: Columns) -> int:
    """Returns the size of all arrays."""
    return sum(value.nbytes for name in columns.__slots__ if hasattr(value := getattr(columns, name), "nbytes"))


def _in_a_process(folder: str) -> Mapping[str, float]:
    command = [sys.executable, "-c", "import sys; from bench.tetris_memory import main; main(sys.argv[1])", folder]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, start_new_session=True)
    found = json.loads(done.stdout)
    return {"grown_mb": found["grown"] / 1e6, "input_mb": found["input"] / 1e6}


def run(bench: Bench) -> Iterator[Figure]:
    """Runs the suite, and yields its figure."""
    bench.say(f"generating {TABLES:,} tables")
    columns = generate(TABLES, REGIONS, seed=1, jobs_of_table=SHARED)
    sizes = {"tables": TABLES, "regions": REGIONS, "jobs": len(columns.kind), "edges": len(columns.job_table)}
    with tempfile.TemporaryDirectory() as folder:
        write_folder(columns, Path(folder))
        del columns
        rounds = Bench(min(bench.rounds, 3), bench.say)
        found = medians(interleave(rounds, {"process": lambda: _in_a_process(folder)}, warm_ups=0))
    yield Figure(SUITE.name, SUITE.lines[0], found["grown_mb"] / found["input_mb"], found, rounds.rounds, sizes)


SUITE = Suite("tetris-memory", (Line("growth over the input", 6),), run)
