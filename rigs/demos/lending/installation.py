"""The installation of the scenario: a campus with two buildings of lent machines, and the trainings on them."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.stack.ports import free_port
from tests.stack.harness import ROOT, Up

BUILDINGS = ("physics", "chemistry")
MACHINES = {f"campus/{building}/{name}": gpus for building in BUILDINGS for name, gpus in (("lab", 4), ("pc", 2))}
"""Number of GPUs of each machine."""
SAVE_S = 4.0
"""Longest time between two checkpoints."""
SETTINGS = f"reclaim: {{control_period_s: 5, loss_budget_s: {SAVE_S / 2}}}\n"
"""The coordinator of a region sets the intervals. L_max is half an interval."""
_STEP_S = 0.1
_EXAMPLE = ROOT / "examples" / "digits"
_ENVIRONMENT = {
    "PYTHONPATH": f"{ROOT / 'sdk'}:{_EXAMPLE}",
    # One thread: the sums must not depend on the number of cores.
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
}


@dataclass(frozen=True)
class DemoTraining:
    """A training that the scenario submits, with the GPUs that its tasks need."""

    name: str
    seed: int
    gpu_type: str
    tasks: int


TRAININGS = (
    DemoTraining("gang", 0, "pc", 2),
    *(DemoTraining(f"train-{number}", number, "lab", 1) for number in range(1, 5)),
)


def _fleet(folder: Path) -> str:
    def machine(name: str, gpus: int) -> str:
        shape = f"gpus: {gpus}, gpu_type: {name}, cpus: 8, memory: 8GiB"
        return f'{{name: {name}, {shape}, owner: "{os.getuid()}"}}'

    clusters = "".join(
        f"""
      - name: {building}
        capacity: voluntary
        store_url: {(folder / "stores" / building).as_uri()}
        machines: [{machine("lab", 4)}, {machine("pc", 2)}]"""
        for building in BUILDINGS
    )
    return f"version: 1\nregions:\n  - name: campus\n    clusters:{clusters}\n"


class DemoSite:
    """The stack, and the files that tasks write."""

    def __init__(self, folder: Path) -> None:
        self.up = Up(folder, _fleet(folder), settings=SETTINGS)
        self.folder, self.gate = folder, folder / "gate"
        self.steps, self.table = folder / "steps", folder / "table"
        self.steps.mkdir()
        for building in BUILDINGS:  # mizzen does not create the folder of a store.
            (folder / "stores" / building).mkdir(parents=True)
        table = [sys.executable, str(_EXAMPLE / "make_table.py"), str(self.table)]
        subprocess.run(table, check=True, stdout=subprocess.DEVNULL)

    def store(self, machine: str, workload: str) -> str:
        """Returns the folder with the checkpoints of a workload in the store of a machine's building."""
        return str(self.folder / "stores" / machine.split("/")[1] / "checkpoints" / workload)

    def document(self, training: DemoTraining) -> dict[str, Any]:
        """Returns the document of a training, which ends when the gate exists."""
        command = " ".join(f'"{word}"' for word in self._command(training, self.steps, str(_STEP_S), str(self.gate)))
        job = {
            "name": "trainer",
            "tasks": training.tasks,
            "resources": {"accelerators": f"{training.gpu_type}:1", "cpus": 0.2, "memory": "256MiB"},
            "env": _ENVIRONMENT,
            "run": f'exec "$MIZZEN_PYTHON" {command}',
        }
        return {
            "version": 1,
            "name": training.name,
            "tenant": "t",
            "capacity": ["voluntary"],
            "checkpoint": {"interval": f"{SAVE_S:.0f}s", "grace": "10s", "keep": 3},
            "jobs": [job],
        }

    def _command(self, training: DemoTraining, folder: Path, step_s: str, until: str) -> list[str]:
        job = Path(__file__).with_name("stepwise_training.py")
        return [str(job), str(folder / training.name), str(self.table), str(training.seed), step_s, until]

    def uninterrupted(self, steps: Mapping[str, int]) -> Path:
        """Runs all trainings again without mizzen, each for a number of steps; returns the folder with their files.

        Raises:
            AssertionError: a training failed.
        """
        folder = self.folder / "uninterrupted"
        folder.mkdir()
        for training in TRAININGS:
            environ = {
                **_ENVIRONMENT,
                "PATH": os.environ["PATH"],
                "WORLD_SIZE": str(training.tasks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(free_port()),
                "MIZZEN_CHECKPOINT_URI": str(folder / "checkpoints" / training.name),
                "MIZZEN_CHECKPOINT_INTERVAL_S": "3600",
            }
            command = [sys.executable, *self._command(training, folder, "0", str(steps[training.name]))]
            ranks = [
                subprocess.Popen(command, env={**environ, "RANK": str(rank)}, stdout=subprocess.DEVNULL)
                for rank in range(training.tasks)
            ]
            assert [rank.wait(120) for rank in ranks] == [0] * training.tasks, training
        return folder


@contextlib.contextmanager
def installation(folder: Path) -> Iterator[DemoSite]:
    """Starts the stack. At the end its processes are killed, if they still run."""
    site = DemoSite(folder)
    try:
        site.up.start()
        yield site
    finally:
        site.up.close()
