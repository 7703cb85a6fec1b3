"""The measuring process of the suite `checkpoint`: prints one JSON object for each round.

    python -m bench.checkpoint_rounds --rounds 7 --megabytes 1024 --folder /somewhere

Needs torch, but no server code. `bench.checkpoint` describes the measurements.
"""

import argparse
import gc
import json
import mmap
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed.checkpoint as dcp

from mizzen.checkpoint import Checkpointer, CheckpointSettings, Tracked

TENSORS = 48
SMALL_TENSORS, SMALL_ELEMENTS = 10_000, 1024
NAMES = ("plain", "ours", "sha256", "torch", "dcp")
_MIB = 1 << 20


def make_state(size_bytes: int) -> dict[str, dict[str, Any]]:
    """Returns a model and an optimizer of twice its size, as float32 tensors of equal sizes."""
    torch.manual_seed(1)
    tensors = [torch.rand(size_bytes // TENSORS // 4) for _ in range(TENSORS)]
    third = TENSORS // 3
    return {
        "model": {f"layer.{index}.weight": tensor for index, tensor in enumerate(tensors[:third])},
        "optimizer": {f"moment.{index}": tensor for index, tensor in enumerate(tensors[third:])},
    }


def change(state: dict[str, dict[str, Any]]) -> None:
    """Simulates a training step: changes a few values of every tensor, which touches only a few pages."""
    for part in state.values():
        for tensor in part.values():
            tensor[:: 1 << 14] += 1


def seconds(function: Callable[[], object]) -> float:
    """Returns the seconds of one call, with the garbage collector off."""
    gc.collect()
    gc.disable()
    try:
        began_s = time.perf_counter()
        function()
        return time.perf_counter() - began_s
    finally:
        gc.enable()


def forget(folder: Path) -> None:
    """Drops the pages of the files from the kernel's cache."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def touch_memory(size_bytes: int) -> None:
    """Makes the host of a virtual machine back this much memory, which is free afterwards.

    Otherwise the first load that uses memory without backing would pay for it, which costs more than reading a file.
    """
    with mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        for page in range(0, size_bytes, mmap.PAGESIZE):
            memory[page] = 1


def sync_file(path: Path) -> None:
    """Syncs a file's content to the disk."""
    descriptor = os.open(path, os.O_RDWR)
    os.fsync(descriptor)
    os.close(descriptor)


class Loads:
    """The load methods; each loads its own saved state from the folder."""

    def __init__(self, folder: Path, shapes: dict[str, dict[str, int]]) -> None:
        self.folder, self.shapes = folder, shapes

    def plain(self) -> object:
        """Reads the file."""
        return (self.folder / "plain" / "state").read_bytes()

    def ours(self) -> object:
        """Loads the newest checkpoint, and verifies all checksums."""
        return Checkpointer(self.folder / "ours", settings=CheckpointSettings(rank=1, world_size=2)).load_latest()

    def sha256(self) -> object:
        """Loads the newest checkpoint with the standard library's checksum."""
        return Checkpointer(self.folder / "sha256", settings=CheckpointSettings(rank=1, world_size=2)).load_latest()

    def torch(self) -> object:
        """Loads the state with `torch.load`."""
        return torch.load(self.folder / "torch" / "state", weights_only=True)

    def dcp(self) -> object:
        """Loads the state with `torch.distributed.checkpoint.load` into new tensors."""
        target = {name: {k: torch.empty(n) for k, n in part.items()} for name, part in self.shapes.items()}
        dcp.load(target, checkpoint_id=self.folder / "dcp" / "state", no_dist=True)
        return target


class Live:
    """The load methods into an existing model, whose memory is allocated before."""

    def __init__(self, folder: Path, shapes: dict[str, dict[str, int]]) -> None:
        self.folder = folder
        self.model = modules({k: torch.zeros(n) for part in shapes.values() for k, n in part.items()})

    def ours(self) -> object:
        """Restores the newest checkpoint."""
        checkpointer = Checkpointer(self.folder / "live", settings=CheckpointSettings(rank=1, world_size=2))
        checkpointer.track(model=self.model)
        return checkpointer.restore()

    def torch(self) -> object:
        """Loads with `torch.load` and `load_state_dict`."""
        return self.model.load_state_dict(torch.load(self.folder / "live" / "state", weights_only=True))


def modules(tensors: dict[str, Any]) -> torch.nn.ParameterDict:
    """Returns a model with these parameters."""
    return torch.nn.ParameterDict({name.replace(".", "_"): torch.nn.Parameter(t) for name, t in tensors.items()})


def memory_bytes(name: str) -> int:
    """Returns a value of this process's memory status: `VmRSS`, or `VmHWM`, the peak since its last reset."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1]) << 10


class Starter:
    """Runs each load in a new process, as in a resumed training: a fork of a process that has only imported modules.

    A process that has loaded before would reuse freed memory, which would favour some loads at random.
    """

    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair()
        self._pid = os.fork()
        if not self._pid:
            self._ours.close()
            self._serve(theirs)
        theirs.close()

    def seconds(self, folder: Path, shapes: dict[str, dict[str, int]], name: str) -> list[float]:
        """Runs one load in a new process; returns its seconds and the memory growth in bytes."""
        self._ours.sendall(json.dumps([str(folder), shapes, name]).encode() + b"\n")
        said = b""
        while not said.endswith(b"\n"):
            got = self._ours.recv(1024)
            if not got:
                raise RuntimeError(f"load {name!r}: the process has failed")
            said += got
        took_s, grew_bytes = json.loads(said)
        return [took_s, grew_bytes]

    def close(self) -> None:
        """Ends the process."""
        self._ours.close()
        os.waitpid(self._pid, 0)

    def _serve(self, asked: socket.socket) -> NoReturn:
        for line in asked.makefile("rb"):
            pid = os.fork()
            if not pid:
                folder, shapes, name = json.loads(line)
                of = Live if name.startswith("live_") else Loads
                load = getattr(of(Path(folder), shapes), name.removeprefix("live_"))
                Path("/proc/self/clear_refs").write_text("5")
                before_bytes = memory_bytes("VmRSS")
                took_s = seconds(load)
                asked.sendall(f"{json.dumps([took_s, memory_bytes('VmHWM') - before_bytes])}\n".encode())
                os._exit(0)
            if os.waitpid(pid, 0)[1]:
                break
        os._exit(0)


class Saves:
    """The save methods; each saves the state once."""

    def __init__(self, folder: Path, state: dict[str, dict[str, Any]]) -> None:
        self.state = state
        self.shapes = {name: {k: t.numel() for k, t in part.items()} for name, part in state.items()}
        self.views = [memoryview(t.numpy()).cast("B") for part in state.values() for t in part.values()]
        self.size_bytes = sum(map(len, self.views))
        self.folder = folder
        self._plain, self._torch, self._dcp = (folder / n for n in ("plain", "torch", "dcp"))
        for path in (self._plain, self._torch, self._dcp):
            path.mkdir(parents=True)
        self.checkpointer = Checkpointer(folder / "ours", keep=1, settings=CheckpointSettings(checksum="xxh3_128"))
        self.small = Small(folder)
        self.plainer = Checkpointer(folder / "sha256", keep=1, settings=CheckpointSettings(checksum="sha256"))
        self.step = 0

    def plain(self) -> None:
        """Writes the bytes to a new file, and syncs it."""
        path = self._plain / "state"
        path.unlink(missing_ok=True)
        with open(path, "xb", buffering=0) as file:
            for view in self.views:
                while view:
                    view = view[file.write(view) :]
            os.fsync(file.fileno())

    def ours(self) -> None:
        """Commits a checkpoint, which also removes the previous one."""
        self.step += 1
        self.checkpointer.save(self.step, self.state)

    def sha256(self) -> None:
        """Commits a checkpoint with the standard library's checksum."""
        self.step += 1
        self.plainer.save(self.step, self.state)

    def torch(self) -> None:
        """Saves with `torch.save`, without a sync."""
        path = self._torch / "state"
        path.unlink(missing_ok=True)
        torch.save(self.state, path)

    def sync_torch(self) -> None:
        """Syncs the file of `torch.save`."""
        sync_file(self._torch / "state")

    def dcp(self) -> None:
        """Saves with `torch.distributed.checkpoint.save`, which syncs its files."""
        shutil.rmtree(self._dcp / "state", ignore_errors=True)
        dcp.save(self.state, checkpoint_id=self._dcp / "state", no_dist=True)

    def live(self) -> None:
        """Saves the input of `Live`: the same tensors as the parameters of one model."""
        model = modules({k: t for part in self.state.values() for k, t in part.items()})
        keeper = Checkpointer(self.folder / "live", keep=1)
        keeper.track(model=model)
        keeper.restore()
        keeper.save(1, Tracked({"model": model}).capture(1))
        torch.save(model.state_dict(), self.folder / "live" / "state")
        os.sync()

    def stall(self) -> dict[str, float]:
        """Returns how long a background save blocks the training, and how long until it is durable, in seconds."""
        self.step += 1
        began_s = time.perf_counter()
        saving = self.checkpointer.save_async(self.step, self.state)
        held_s = time.perf_counter() - began_s
        saving.wait()
        return {"stall_s": held_s, "durable_s": time.perf_counter() - began_s}


class Small:
    """Saves of a model with many small tensors."""

    def __init__(self, folder: Path) -> None:
        self.model = {f"block.{n // 10}.{n % 10}.weight": torch.rand(SMALL_ELEMENTS) for n in range(SMALL_TENSORS)}
        self.checkpointer = Checkpointer(folder / "small", keep=1)
        self._torch = folder / "small" / "state"
        self.step = 0

    def round(self) -> dict[str, float]:
        """Returns the seconds of our save, of `torch.save` with a sync, and of the stall by a background save."""
        out = {"small_ours_s": seconds(self._save)}
        self._change()
        out["small_torch_s"] = seconds(self._save_torch)
        self._torch.unlink()
        self._change()
        self.step += 1
        began_s = time.perf_counter()
        saving = self.checkpointer.save_async(self.step, {"model": self.model})
        out["small_stall_s"] = time.perf_counter() - began_s
        saving.wait()
        self._change()
        return out

    def _change(self) -> None:
        for tensor in self.model.values():
            tensor[:8] += 1
        os.sync()

    def _save(self) -> None:
        self.step += 1
        self.checkpointer.save(self.step, {"model": self.model})

    def _save_torch(self) -> None:
        torch.save(self.model, self._torch)
        sync_file(self._torch)


def one_round(saves: Saves, starter: Starter) -> dict[str, float]:
    """Runs each measurement once, and returns the values."""
    out: dict[str, float] = {}
    for name in NAMES:
        change(saves.state)
        out[f"save_{name}_s"] = seconds(getattr(saves, name))
        if name == "torch":
            out["save_torch_synced_s"] = out["save_torch_s"] + seconds(saves.sync_torch)
        os.sync()
    for heat in ("cold", "warm"):
        for name in NAMES:
            if heat == "cold":
                # Drop only the files of this method: the warm loads of the others follow.
                forget(saves.folder / name)
            touch_memory(3 * saves.size_bytes)
            out[f"load_{name}_{heat}_s"] = starter.seconds(saves.folder, saves.shapes, name)[0]
    for name in ("ours", "torch"):
        out[f"live_{name}_s"], out[f"live_{name}_bytes"] = starter.seconds(saves.folder, saves.shapes, f"live_{name}")
    change(saves.state)
    gc.collect()
    return out | saves.stall() | saves.small.round()


def main(argv: list[str] | None = None) -> int:
    """Runs the rounds, and prints one JSON object for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--folder", type=Path, required=True)
    given = parser.parse_args(argv)
    starter = Starter()
    state = make_state(given.megabytes * _MIB)
    saves = Saves(given.folder, state)
    saves.live()
    for number in range(-1, given.rounds):
        found = one_round(saves, starter)
        if number >= 0:
            print(json.dumps(found), flush=True)
    starter.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
