"""gpu-saves: a state of 8 GiB on a GPU, saved in the background and loaded, against `torch.save` and `torch.load`.

The state is a model of 400 float32 tensors, all of which change between two saves. All measurements take turns in one
process. `Checkpointer` has its defaults.

- `stall`: the time for which `save_async` holds up the next step, on the host and on the GPU, divided by that of
  `torch.save`, which does not sync its file.
- `step beside a save`: the median time of 20 steps right after `save_async`, divided by that of 20 steps before.
- `pinned memory`: what the first save has pinned, divided by the setting `pinned_bytes`.
- `load, torch.load`: the time of `torch.load` to the GPU and `load_state_dict`, divided by that of `restore`, both from
  files in the page cache.

Afterwards a checkpoint is compared with the state at its save, after the training has gone on. The suite needs torch
and a GPU of CUDA.
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from bench.checkpoint import python
from bench.harness import Bench, Figure, InvalidBenchmark, Line, Suite

MEGABYTES = 8192
LINES = (
    Line("stall", 1 / 50),
    Line("step beside a save", 1.1),
    Line("pinned memory", 1.0),
    Line("load, torch.load", 1.0, at_least=True),
)
_OF = {
    "stall": ("stall_s", "torch_s"),
    "step beside a save": ("step_beside_s", "step_s"),
    "pinned memory": ("pinned_bytes", "pinned_limit_bytes"),
    "load, torch.load": ("torch_load_s", "load_s"),
}


def run(bench: Bench) -> Iterator[Figure]:
    """Runs the suite, and yields the figures of all lines."""
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=Path.cwd()) as folder:
        command = [python(), "-W", "ignore", "-m", "bench.gpu_rounds", "--rounds", str(bench.rounds)]
        options = ["--megabytes", str(MEGABYTES), "--folder", f"{folder}/checkpoints"]
        environ = {**os.environ, "PYTHONPATH": f"sdk:{os.environ.get('PYTHONPATH', '')}", "MIZZEN_PLATFORM": "sigterm"}
        ended = subprocess.run([*command, *options], env=environ, stdout=subprocess.PIPE, text=True)
    if ended.returncode:
        raise InvalidBenchmark(f"the measuring process ended with code {ended.returncode}")
    rounds = [json.loads(line) for line in ended.stdout.splitlines()]
    for line in LINES:
        above, below = _OF[line.name]
        ratio = median(found[above] / found[below] for found in rounds)
        absolute = {name: median(found[name] for found in rounds) for name in (above, below, "durable_s", "save_s")}
        yield Figure(SUITE.name, line, ratio, absolute, bench.rounds, {"megabytes": MEGABYTES})


SUITE = Suite("gpu-saves", LINES, run)
