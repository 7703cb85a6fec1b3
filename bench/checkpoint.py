"""checkpoint: a state of 1 GiB saved to files and loaded, against plain writing and reading, and against torch.

The state is a model and an optimiser, 48 float32 tensors; a few values of every tensor change before each save, so
that no part is found unchanged. All run in one process, in turns, on the folder's own file system:

- `save`: plain writing of the same bytes to a new file and one fsync, over `Checkpointer.save` (checksums of all bytes,
  everything durable, the checkpoint before removed).
- `load, cold` and `load, warm`: reading that file into memory, over `load_latest` with all checksums verified. Cold is
  after the kernel was told to drop the files' pages; a host below it may still have them, for both alike. Each load is
  in a process that has just started, as it is when a training goes on; its memory is provided by the host before.
- `stall`: how long `save_async` holds the training up, over the synchronous save; after the first one, which makes the
  memory for the copy.
- `load into a live model`: the same tensors are a model's parameters, whose memory is there before. `torch.load` and
  `load_state_dict` over `restore`, warm; and by how much memory grows at most while ours runs.
- `small tensors`: 10,000 of 4 KiB; `stall` is over a synchronous save of the same.
- `save, torch.save` and the others of that form: their time over ours. `torch.save` leaves its file to the kernel, so
  an fsync is added to it, as there is one in ours and in `torch.distributed.checkpoint`'s; without it is beside.
- the lines with `sha256` are ours with the standard library's checksum, where xxhash is not installed.

Needs torch, so it runs in the environment of `make test-integrations` where the current one has none.
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

from bench.harness import Bench, Figure, Line, Suite, Unfit

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
    Line("stall with small tensors", 0.3),
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
"""What each line's ratio is of, in each round."""
_BESIDE: dict[str, tuple[str, ...]] = {"save, torch.save": ("save_torch_s",), "stall": ("durable_s",)}


def python() -> str:
    """An interpreter that has torch.

    Raises:
        Unfit: there is none.
    """
    if importlib.util.find_spec("torch"):
        return sys.executable
    if INTEGRATIONS.exists():
        return str(INTEGRATIONS)
    raise Unfit(f"torch is not installed: make {INTEGRATIONS.parts[0]}/.ready brings it")


def run(bench: Bench) -> Iterator[Figure]:
    """All lines."""
    # Below the current folder: a temporary one may be in memory.
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=Path.cwd()) as folder:
        command = [python(), "-W", "ignore", "-m", "bench.checkpoint_rounds"]
        options = ["--rounds", str(bench.rounds), "--megabytes", str(MEGABYTES), "--folder", f"{folder}/checkpoints"]
        rounds: list[dict[str, float]] = []
        # Nobody is asked where this machine is.
        environ = {**os.environ, "PYTHONPATH": "sdk", "MIZZEN_PLATFORM": "sigterm"}
        with subprocess.Popen([*command, *options], env=environ, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for said in process.stdout:
                rounds.append(json.loads(said) | {"live_most_bytes": 64 << 20})
                bench.say(f"round {len(rounds)} of {bench.rounds}")
        if process.returncode or len(rounds) != bench.rounds:
            raise Unfit(f"the measuring process ended with code {process.returncode} after {len(rounds)} rounds")
    for line in LINES:
        above, below = _OF[line.name]
        ratios = sorted(found[above] / found[below] for found in rounds)
        names = (above, below, *_BESIDE.get(line.name, ()))
        absolute = {name: median(found[name] for found in rounds) for name in names}
        # Half of the rounds lie between these two: what a second run's median may well be.
        absolute |= {"ratio_quarter": ratios[len(ratios) // 4], "ratio_three_quarters": ratios[-1 - len(ratios) // 4]}
        yield Figure(SUITE.name, line, median(ratios), absolute, bench.rounds, {"megabytes": MEGABYTES})


SUITE = Suite("checkpoint", LINES, run)
