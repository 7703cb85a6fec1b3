"""The measuring process of the suite `gpu-saves`: prints one JSON object for each round.

    python -m bench.gpu_rounds --rounds 5 --megabytes 8192 --folder /somewhere

Needs torch and a GPU, but no server code. `bench.gpu_saves` describes the measurements.
"""

import argparse
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from mizzen.checkpoint import Checkpointer, CheckpointSettings, open_checkpoints
from mizzen.checkpoint.gpu_copies import DEFAULT_PINNED_BYTES

TENSORS = 400
_MIB = 1 << 20


class GpuMeasurements:
    """The state, and the measurements that take turns."""

    def __init__(self, folder: Path, megabytes: int) -> None:
        torch.manual_seed(1)
        each = megabytes * _MIB // TENSORS // 4
        made = {f"layer_{index}": torch.nn.Parameter(torch.randn(each, device="cuda")) for index in range(TENSORS)}
        # Its tensors are live.
        self.state = {"model": torch.nn.ParameterDict(made).state_dict()}
        self.folder = folder
        self.checkpointer = Checkpointer(folder / "ours")
        self.saves = 0
        self.ours()
        self.checkpointer.wait()
        self.pinned_bytes = torch.cuda.host_memory_stats()["allocated_bytes.peak"]
        self._a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)

    def step(self) -> None:
        """Computes for about 20 ms, and changes every tensor."""
        for _ in range(15):
            self._a @ self._a
        torch._foreach_add_(list(self.state["model"].values()), 1.0)

    def stall_s(self, save: Callable[[], object]) -> float:
        """Returns the time for which a save holds up the next step, on the host and on the GPU."""
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        save()
        after = torch.cuda.Event()
        after.record()
        after.synchronize()
        return time.perf_counter() - began_s

    def steps_s(self, count: int) -> float:
        """Returns the median time of a step."""
        took = []
        for _ in range(count):
            began_s = time.perf_counter()
            self.step()
            after = torch.cuda.Event()
            after.record()
            after.synchronize()
            took.append(time.perf_counter() - began_s)
        return median(took)

    def ours(self) -> object:
        """Starts a save in the background."""
        self.saves += 1
        return self.checkpointer.save_async(self.saves, self.state)

    def torch(self) -> object:
        """Saves with `torch.save`, which does not sync the file."""
        return torch.save(self.state, self.folder / "torch.pt")

    def load_s(self) -> float:
        """Returns the time of a restore into a model on the GPU, from files that are in the page cache."""
        checkpointer = Checkpointer(self.folder / "ours", settings=CheckpointSettings(rank=1, world_size=2))
        checkpointer.track(model=empty_like(self.state["model"]))
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        checkpointer.restore(parts=["model"])
        torch.cuda.synchronize()
        return time.perf_counter() - began_s

    def torch_load_s(self) -> float:
        """Returns the time of `torch.load` and `load_state_dict` of the same model."""
        model = empty_like(self.state["model"])
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        model.load_state_dict(torch.load(self.folder / "torch.pt", map_location="cuda", weights_only=True)["model"])
        torch.cuda.synchronize()
        return time.perf_counter() - began_s

    def round(self) -> dict[str, float]:
        """Measures each once."""
        step_s = self.steps_s(20)
        began_s = time.perf_counter()
        found = {"stall_s": self.stall_s(self.ours)}
        found["step_beside_s"] = self.steps_s(20)
        self.checkpointer.wait()
        found |= {"step_s": step_s, "durable_s": time.perf_counter() - began_s}
        self.step()
        found["torch_s"] = self.stall_s(self.torch)
        found["torch_load_s"] = self.torch_load_s()
        (self.folder / "torch.pt").unlink()
        began_s = time.perf_counter()
        self.checkpointer.save(self.saves + 1, self.state)
        self.saves += 1
        found["save_s"] = time.perf_counter() - began_s
        found["load_s"] = self.load_s()
        return found | {"pinned_bytes": self.pinned_bytes, "pinned_limit_bytes": DEFAULT_PINNED_BYTES}

    def check(self) -> None:
        """Compares the last background save with the state at that instant, after the training has gone on.

        Raises:
            RuntimeError: they differ.
        """
        expected = {name: tensor.cpu() for name, tensor in self.state["model"].items()}
        self.ours()
        self.step()
        self.checkpointer.wait()
        found = open_checkpoints(self.folder / "ours").load(self.saves).state["model"]
        if not all(torch.equal(found[name], tensor) for name, tensor in expected.items()):
            raise RuntimeError("the checkpoint differs from the state at its save")


def empty_like(tensors: dict[str, torch.Tensor]) -> torch.nn.ParameterDict:
    """Returns a model with parameters of these shapes."""
    return torch.nn.ParameterDict({name: torch.nn.Parameter(torch.empty_like(one)) for name, one in tensors.items()})


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=8192)
    parser.add_argument("--folder", type=Path, required=True)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a GPU of CUDA")
    shutil.rmtree(given.folder, ignore_errors=True)
    given.folder.mkdir(parents=True)
    measured = GpuMeasurements(given.folder, given.megabytes)
    measured.round()  # Allocates the memory.
    for _ in range(given.rounds):
        print(json.dumps(measured.round()), flush=True)
    measured.check()
    shutil.rmtree(given.folder)


if __name__ == "__main__":
    main()
