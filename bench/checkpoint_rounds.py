"""The measuring process of the suite `checkpoint`: prints one JSON object for each round.

    python -m bench.checkpoint_rounds --rounds 7 --megabytes 1024 --folder /somewhere

Needs torch, and nothing of the server's. See `bench.checkpoint` for what is measured.
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

from mizzen.checkpoint import Checkpointer, Tracked

TENSORS = 48
SMALL_TENSORS, SMALL_ELEMENTS = 10_000, 1024
NAMES = ("plain", "ours", "sha256", "torch", "dcp")
_MIB = 1 << 20


def make_state(size_bytes: int) -> dict[str, dict[str, Any]]:
    """A model and an optimiser of twice its size, as float32 tensors of equal sizes."""
    torch.manual_seed(1)
    tensors = [torch.rand(size_bytes // TENSORS // 4) for _ in range(TENSORS)]
    third = TENSORS // 3
    return {
        "model": {f"layer.{index}.weight": tensor for index, tensor in enumerate(tensors[:third])},
        "optimizer": {f"moment.{index}": tensor for index, tensor in enumerate(tensors[third:])},
    }


def change(state: dict[str, dict[str, Any]]) -> None:
    """Let a training step pass: every tensor is another one, at the price of a few pages each."""
    for part in state.values():
        for tensor in part.values():
            tensor[:: 1 << 14] += 1


def seconds(function: Callable[[], object]) -> float:
    """Seconds of one call, with the garbage collector off."""
    gc.collect()
    gc.disable()
    try:
        began_s = time.perf_counter()
        function()
        return time.perf_counter() - began_s
    finally:
        gc.enable()


def forget(folder: Path) -> None:
    """Let the kernel drop the files' pages from its cache."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def touch_memory(size_bytes: int) -> None:
    """Let a virtual machine's host provide this much memory, which the kernel then has free.

    Memory that the host has not provided yet costs more to touch than a file to read, for whichever load gets it.
    """
    with mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        for page in range(0, size_bytes, mmap.PAGESIZE):
            memory[page] = 1


def sync_file(path: Path) -> None:
    """Make a file's content durable."""
    descriptor = os.open(path, os.O_RDWR)
    os.fsync(descriptor)
    os.close(descriptor)


class Loads:
    """Each method loads what was saved below the folder."""

    def __init__(self, folder: Path, shapes: dict[str, dict[str, int]]) -> None:
        self.folder, self.shapes = folder, shapes

    def plain(self) -> object:
        """Read the file."""
        return (self.folder / "plain" / "state").read_bytes()

    def ours(self) -> object:
        """Load the newest checkpoint, checksums and all."""
        return Checkpointer(self.folder / "ours", rank=1, world_size=2).load_latest()

    def sha256(self) -> object:
        """The same with the standard library's checksum."""
        return Checkpointer(self.folder / "sha256", rank=1, world_size=2).load_latest()

    def torch(self) -> object:
        """`torch.load`."""
        return torch.load(self.folder / "torch" / "state", weights_only=True)

    def dcp(self) -> object:
        """`torch.distributed.checkpoint.load` into tensors that are made for it."""
        target = {name: {k: torch.empty(n) for k, n in part.items()} for name, part in self.shapes.items()}
        dcp.load(target, checkpoint_id=self.folder / "dcp" / "state", no_dist=True)
        return target


class Live:
    """A model of the process's own, which each method loads into: its memory is there before."""

    def __init__(self, folder: Path, shapes: dict[str, dict[str, int]]) -> None:
        self.folder = folder
        self.model = modules({k: torch.zeros(n) for part in shapes.values() for k, n in part.items()})

    def ours(self) -> object:
        """Restore the newest checkpoint."""
        checkpointer = Checkpointer(self.folder / "live", rank=1, world_size=2)
        checkpointer.track(model=self.model)
        return checkpointer.restore()

    def torch(self) -> object:
        """`torch.load` and `load_state_dict`."""
        return self.model.load_state_dict(torch.load(self.folder / "live" / "state", weights_only=True))


def modules(tensors: dict[str, Any]) -> torch.nn.ParameterDict:
    """A model of these parameters."""
    return torch.nn.ParameterDict({name.replace(".", "_"): torch.nn.Parameter(t) for name, t in tensors.items()})


def memory_bytes(name: str) -> int:
    """This process's `VmRSS`, or its highest since `VmHWM` was reset."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1]) << 10


class Starter:
    """Loads in processes that have just started, as a training does: each a fork of one that has only imported.

    In a process that has loaded before, memory that was freed is there again, for whichever happens to get it.
    """

    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair()
        self._pid = os.fork()
        if not self._pid:
            self._ours.close()
            self._serve(theirs)
        theirs.close()

    def seconds(self, folder: Path, shapes: dict[str, dict[str, int]], name: str) -> list[float]:
        """Seconds of one load by that name, in a new process, and by how many bytes its memory grew meanwhile."""
        self._ours.sendall(json.dumps([str(folder), shapes, name]).encode() + b"\n")
        said = b""
        while not said.endswith(b"\n"):
            got = self._ours.recv(1024)
            if not got:
                raise RuntimeError(f"the process that loads by {name!r} has failed")
            said += got
        took_s, grew_bytes = json.loads(said)
        return [took_s, grew_bytes]

    def close(self) -> None:
        """End the process."""
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
    """Each method saves the state once."""

    def __init__(self, folder: Path, state: dict[str, dict[str, Any]]) -> None:
        self.state = state
        self.shapes = {name: {k: t.numel() for k, t in part.items()} for name, part in state.items()}
        self.views = [memoryview(t.numpy()).cast("B") for part in state.values() for t in part.values()]
        self.size_bytes = sum(map(len, self.views))
        self.folder = folder
        self._plain, self._torch, self._dcp = (folder / n for n in ("plain", "torch", "dcp"))
        for path in (self._plain, self._torch, self._dcp):
            path.mkdir(parents=True)
        self.checkpointer = Checkpointer(folder / "ours", keep=1, checksum="xxh3_128")
        self.small = Small(folder)
        self.plainer = Checkpointer(folder / "sha256", keep=1, checksum="sha256")
        self.step = 0

    def plain(self) -> None:
        """Write the bytes to a new file and sync it."""
        path = self._plain / "state"
        path.unlink(missing_ok=True)
        with open(path, "xb", buffering=0) as file:
            for view in self.views:
                while view:
                    view = view[file.write(view) :]
            os.fsync(file.fileno())

    def ours(self) -> None:
        """Commit a checkpoint; the one before goes."""
        self.step += 1
        self.checkpointer.save(self.step, self.state)

    def sha256(self) -> None:
        """The same with the standard library's checksum."""
        self.step += 1
        self.plainer.save(self.step, self.state)

    def torch(self) -> None:
        """`torch.save`, without a sync."""
        path = self._torch / "state"
        path.unlink(missing_ok=True)
        torch.save(self.state, path)

    def sync_torch(self) -> None:
        """What `torch.save` leaves to the kernel."""
        sync_file(self._torch / "state")

    def dcp(self) -> None:
        """`torch.distributed.checkpoint.save`, which syncs its files."""
        shutil.rmtree(self._dcp / "state", ignore_errors=True)
        dcp.save(self.state, checkpoint_id=self._dcp / "state", no_dist=True)

    def live(self) -> None:
        """What `Live` loads: the same tensors as the parameters of one model."""
        model = modules({k: t for part in self.state.values() for k, t in part.items()})
        keeper = Checkpointer(self.folder / "live", keep=1)
        keeper.track(model=model)
        keeper.restore()
        keeper.save(1, Tracked({"model": model}).capture(1))
        torch.save(model.state_dict(), self.folder / "live" / "state")
        os.sync()

    def stall(self) -> dict[str, float]:
        """How long a save in the background holds the training up, and how long until it is durable."""
        self.step += 1
        began_s = time.perf_counter()
        saving = self.checkpointer.save_async(self.step, self.state)
        held_s = time.perf_counter() - began_s
        saving.wait()
        return {"stall_s": held_s, "durable_s": time.perf_counter() - began_s}


class Small:
    """Saves of a model of many small tensors."""

    def __init__(self, folder: Path) -> None:
        self.model = {f"block.{n // 10}.{n % 10}.weight": torch.rand(SMALL_ELEMENTS) for n in range(SMALL_TENSORS)}
        self.checkpointer = Checkpointer(folder / "small", keep=1)
        self._torch = folder / "small" / "state"
        self.step = 0

    def round(self) -> dict[str, float]:
        """Seconds of a save of ours, one of `torch.save` with a sync, and how long one in the background holds up."""
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
    """All of them once, in turns."""
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
                # Its own only: the others' are read again while they are warm.
                forget(saves.folder / name)
            touch_memory(3 * saves.size_bytes)
            out[f"load_{name}_{heat}_s"] = starter.seconds(saves.folder, saves.shapes, name)[0]
    for name in ("ours", "torch"):
        out[f"live_{name}_s"], out[f"live_{name}_bytes"] = starter.seconds(saves.folder, saves.shapes, f"live_{name}")
    change(saves.state)
    gc.collect()
    return out | saves.stall() | saves.small.round()


def main(argv: list[str] | None = None) -> int:
    """Print one line for each round."""
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
