"""Rates of distributed checkpoints against torch's own files: `python -m tests_integrations.dcp_rates --megabytes 512`.

All ranks save and load the same sharded state, in alternating rounds: to a root, by `FileSystemWriter` (which syncs its
files), and as plain files of the same bytes with an fsync of each. Loads are read from a warm page cache, and after the
files' pages were dropped. Printed are medians of the ratios of each round: another time divided by ours.

Two floors show what a load can reach at most: `load plain` reads the bytes of the plain files into the same tensors;
`load checked` also computes their checksum while each piece is in the processor's cache. A load that changes no tensor
before all ranks have verified their parts must read twice, so it needs more than `load checked`.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import distributed
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, load, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from mizzen.integrations import dcp
from mizzen.objects import checksums

TENSORS = 24
PIECE_BYTES = 1 << 20


def timed(call: Callable[[], object]) -> float:
    """Returns the seconds from a barrier until all ranks have ended `call`."""
    distributed.barrier()
    began_s = time.perf_counter()
    call()
    distributed.barrier()
    return time.perf_counter() - began_s


def forget(folder: Path) -> None:
    """Drops the pages of all files below a folder from the kernel's cache."""
    if distributed.get_rank() == 0:
        os.sync()
        for path in (path for path in folder.rglob("*") if path.is_file()):
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    distributed.barrier()


def rank_main(folder: Path, megabytes: int, rounds: int) -> None:
    """Measures in one rank; rank 0 prints."""
    distributed.init_process_group("gloo")
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (ranks,))
    columns = megabytes * 2**20 // 4 // TENSORS // (64 * ranks)
    state = {
        f"layer{n}.weight": distribute_tensor(torch.randn(64 * ranks, columns), mesh, [Shard(0)])
        for n in range(TENSORS)
    }
    blank = {name: torch.zeros_like(value) for name, value in state.items()}
    root, theirs, plain = folder / "root", folder / "theirs", folder / "plain"
    writer = dcp.RootWriter(root)
    times: dict[str, list[float]] = {}

    def save_theirs() -> None:
        if rank == 0:
            shutil.rmtree(theirs, ignore_errors=True)
        distributed.barrier()
        save(state, storage_writer=FileSystemWriter(theirs, sync_files=True))

    def save_plain() -> None:
        plain.mkdir(exist_ok=True)
        path = plain / str(rank)
        path.unlink(missing_ok=True)
        with path.open("wb", buffering=0) as file:
            for value in state.values():
                left = memoryview(value.to_local().reshape(-1).numpy()).cast("B")
                while left:
                    left = left[file.write(left) :]
            os.fsync(file.fileno())

    def load_plain(is_checked: bool) -> None:
        digest = checksums.digest(checksums.fastest())
        with (plain / str(rank)).open("rb", buffering=0) as file:
            for value in blank.values():
                memory = memoryview(value.to_local().reshape(-1).numpy()).cast("B")
                for start in range(0, len(memory), PIECE_BYTES):
                    piece = memory[start : start + PIECE_BYTES]
                    assert file.readinto(piece) == len(piece)
                    if is_checked:
                        digest.update(piece)

    for number in range(rounds):
        for value in state.values():
            value.to_local()[0, 0] += 1
        doing = [
            ("save ours", lambda step=number + 1: save(state, storage_writer=writer.at(step))),
            ("save theirs", save_theirs),
            ("save plain", save_plain),
        ]
        for name, call in doing if number % 2 else doing[::-1]:
            times.setdefault(name, []).append(timed(call))
        for cache in ("warm", "cold"):
            reading = [
                (f"load ours, {cache}", root, lambda: load(blank, storage_reader=dcp.RootReader(root))),
                (f"load theirs, {cache}", theirs, lambda: load(blank, storage_reader=FileSystemReader(theirs))),
                (f"load plain, {cache}", plain, lambda: load_plain(False)),
                (f"load checked, {cache}", plain, lambda: load_plain(True)),
            ]
            for name, where, call in reading if number % 2 else reading[::-1]:
                if cache == "cold":
                    forget(where)
                else:
                    call()
                times.setdefault(name, []).append(timed(call))
                for key, value in state.items():
                    assert isinstance(value, DTensor) and torch.equal(blank[key].to_local(), value.to_local())
                    blank[key].to_local().zero_()
    if rank == 0:
        shown = {name: round(median(values), 3) for name, values in times.items()}
        for name in ("save", "load warm", "load cold"):
            kind, _, cache = name.partition(" ")
            suffix = f", {cache}" if cache else ""
            others = [("plain", "ours")] if kind == "save" else [("theirs", "plain"), ("theirs", "checked")]
            for above, below in (("theirs", "ours"), *others):
                pairs = zip(times[f"{kind} {above}{suffix}"], times[f"{kind} {below}{suffix}"], strict=True)
                shown[f"{name}: {above} / {below}"] = round(median(a / b for a, b in pairs), 2)
        print(json.dumps(shown, indent=1), "load", os.getloadavg(), flush=True)
    distributed.barrier()
    os._exit(0)


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    os.environ |= {"WORLD_SIZE": str(given.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}
    with tempfile.TemporaryDirectory(prefix=".bench-dcp-", dir=".") as folder:
        children = []
        for rank in range(given.ranks):
            if not (child := os.fork()):
                os.environ["RANK"] = str(rank)
                rank_main(Path(folder), given.megabytes, given.rounds)
            children.append(child)
        return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)


if __name__ == "__main__":
    sys.exit(main())
