"""checkpoint: a state of 1 GiB saved to files and loaded, against plain writing and reading, and against torch.

The state is a model and an optimizer with 48 float32 tensors. A few values of every tensor change before each save, so
that no part is skipped as unchanged. All measurements take turns in one process, on the folder's own file system.
"Ours" is `mizzen.checkpoint`:

- `save`: the time of writing the same bytes to a new file with one fsync, divided by that of `Checkpointer.save` (which
  computes all checksums, syncs everything, and removes the previous checkpoint).
- `load, cold` and `load, warm`: the time of reading that file into memory, divided by that of `load_latest` with all
  checksums verified. Cold is after the kernel has dropped the files' pages; a host below may still cache them, for both
  alike. Each load runs in a new process, as in a resumed training; the host has provided its memory before.
- `stall`: the time for which `save_async` blocks the training, divided by that of the synchronous save. The first
  `save_async`, which allocates the memory for the copy, does not count.
- `load into a live model`: the same tensors are parameters of a model that is allocated before. The time of
  `torch.load` and `load_state_dict`, divided by that of `restore`, warm; and the peak memory growth during `restore`.
- `small tensors`: 10,000 of 4 KiB; `stall` is divided by the time of a synchronous save of the same tensors.
- `save, torch.save` and the other lines of this form: the other library's time divided by ours. `torch.save` does not
  sync its file, so an fsync is added, because ours and `torch.distributed.checkpoint` sync too. The absolute values
  also contain the time without fsync.
- The lines with `sha256` are ours with the standard library's checksum, which is used if xxhash is not installed.

The suite needs torch. If the current environment has none, it uses that of `make test-integrations`.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from bench.harness import Bench, Figure, InvalidBenchmark, Line, Suite

MEGABYTES = 1024
INTEGRATIONS = Path(".venv-integrations/bin/python")

LINES = (
    Line("save", 0.75, at_least=True),
    Line("load, cold", 0.75, at_least=True),
    Line("load, warm", 0.6, at_least=True),
    Line("stall", 0.2),
    Line("save, torch.save", 1.0, at_least=True),
    Line("save, DCP", 1.0, at_least=True),
    Line("load, cold, torch.load", 1.0, at_least=True),
    Line("load, cold, DCP", 1.0, at_least=True),
    Line("load, warm, torch.load", 1.0, at_least=True),
    Line("load, warm, DCP", 1.0, at_least=True),
    Line("load into a live model, torch.load", 1.0, at_least=True),
    Line("memory beside a live model, of 64 MiB", 1.0),
    Line("save of small tensors, torch.save", 1.0, at_least=True),
    Line("stall with small tensors", 0.25),
    Line("save, sha256", None),
    Line("load, warm, sha256", None),
)
_OF = {
    "save": ("save_plain_s", "save_ours_s"),
    "load, cold": ("load_plain_cold_s", "load_ours_cold_s"),
    "load, warm": ("load_plain_warm_s", "load_ours_warm_s"),
    "stall": ("stall_s", "save_ours_s"),
    "save, torch.save": ("save_torch_synced_s", "save_ours_s"),
    "save, DCP": ("save_dcp_s", "save_ours_s"),
    "load, cold, torch.load": ("load_torch_cold_s", "load_ours_cold_s"),
    "load, cold, DCP": ("load_dcp_cold_s", "load_ours_cold_s"),
    "load, warm, torch.load": ("load_torch_warm_s", "load_ours_warm_s"),
    "load, warm, DCP": ("load_dcp_warm_s", "load_ours_warm_s"),
    "load into a live model, torch.load": ("live_torch_s", "live_ours_s"),
    "memory beside a live model, of 64 MiB": ("live_ours_bytes", "live_most_bytes"),
    "save of small tensors, torch.save": ("small_torch_s", "small_ours_s"),
    "stall with small tensors": ("small_stall_s", "small_ours_s"),
    "save, sha256": ("save_plain_s", "save_sha256_s"),
    "load, warm, sha256": ("load_plain_warm_s", "load_sha256_warm_s"),
}
"""Numerator and denominator of each line's ratio, as names of a round's values."""
_BESIDE: dict[str, tuple[str, ...]] = {"save, torch.save": ("save_torch_s",), "stall": ("durable_s",)}


def python() -> str:
    """Returns the path of an interpreter with torch.

    Raises:
        InvalidBenchmark: there is none.
    """
    if importlib.util.find_spec("torch"):
        return sys.executable
    if INTEGRATIONS.exists():
        return str(INTEGRATIONS)
    raise InvalidBenchmark(f"torch is not installed: run `make {INTEGRATIONS.parts[0]}/.ready` to install it")


def run(bench: Bench) -> Iterator[Figure]:
    """Runs the suite, and yields the figures of all lines."""
    # Below the current folder, because a folder for temporary files may be in memory.
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=Path.cwd()) as folder:
        command = [python(), "-W", "ignore", "-m", "bench.checkpoint_rounds"]
        options = ["--rounds", str(bench.rounds), "--megabytes", str(MEGABYTES), "--folder", f"{folder}/checkpoints"]
        rounds: list[dict[str, float]] = []
        # MIZZEN_PLATFORM skips the search for a cloud's metadata server.
        environ = {**os.environ, "PYTHONPATH": "sdk", "MIZZEN_PLATFORM": "sigterm"}
        with subprocess.Popen([*command, *options], env=environ, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for said in process.stdout:
                rounds.append(json.loads(said) | {"live_most_bytes": 64 << 20})
                bench.say(f"round {len(rounds)} of {bench.rounds}")
        if process.returncode or len(rounds) != bench.rounds:
            raise InvalidBenchmark(
                f"the measuring process ended with code {process.returncode} after {len(rounds)} rounds"
            )
    for line in LINES:
        above, below = _OF[line.name]
        ratios = sorted(found[above] / found[below] for found in rounds)
        names = (above, below, *_BESIDE.get(line.name, ()))
        absolute = {name: median(found[name] for found in rounds) for name in names}
        # The quartiles of the ratio, which indicate how much the median may vary between runs.
        absolute |= {"ratio_quarter": ratios[len(ratios) // 4], "ratio_three_quarters": ratios[-1 - len(ratios) // 4]}
        yield Figure(SUITE.name, line, median(ratios), absolute, bench.rounds, {"megabytes": MEGABYTES})


SUITE = Suite("checkpoint", LINES, run)
