"""Saves that fail at the end of a script, within a notice, and in gangs.

The disk is a small file system of its own.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mizzen.checkpoint import (
    Checkpointer,
    CheckpointError,
    CheckpointSettings,
    CheckpointWarning,
    list_committed,
)
from tests.sdk.full_disks import FULL, Disk
from tests.sdk.scripts import BEGIN
from tests.sdk.test_sdk_gang import gang, together

IN_BACKGROUND = """
import mizzen
from mizzen.objects.files import FileStore
settings = mizzen.CheckpointSettings(max_failures=int(sys.argv[2]))
checkpointer = mizzen.Checkpointer(sys.argv[1], interval_s=0, background=True, settings=settings)
checkpointer.track(model={"w": 0})
checkpointer.restore()
def fail(*_):
    raise OSError(5, "no")
FileStore.put = fail
checkpointer.step(1)
"""


@pytest.mark.parametrize(("most", "code"), [(0, 1), (5, 0)])
def test_the_end_of_a_script_tells_a_failed_background_save(tmp_path: Path, most: int, code: int) -> None:
    """The failure of the last background save is printed at exit; the exit code is 1 if a limit is reached."""
    command = [sys.executable, "-c", BEGIN + IN_BACKGROUND, tmp_path, str(most)]
    environment = {"PATH": os.environ["PATH"], "MIZZEN_PLATFORM": "sigterm"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert "step 1 was not saved" in done.stderr and done.returncode == code, done.stderr


LEAVES = """
import mizzen
root, told = sys.argv[1:]
weights = {"w": 0}
checkpointer = mizzen.Checkpointer(root, interval_s=1000)
checkpointer.track(model=weights)
checkpointer.restore()
checkpointer.save(1, {"model": weights, "rng": {}, "progress": {}})
open(told, "w").close()
os.read(0, 1)  # The disk is full now.
weights["w"] = bytes(100_000)
os.kill(os.getpid(), signal.SIGTERM)
"""
BY_STEP = "checkpointer.step(2)"
OF_FILES = """
from pathlib import Path
from mizzen.integrations.files import FileCheckpoints
folder = Path(told + ".folder")
folder.mkdir()
(folder / "model").write_bytes(weights["w"])
files = FileCheckpoints(checkpointer, lambda number: number)
assert files.action(2).name == "FLUSH"
files.save(2, folder)
files.leave()
"""


@pytest.mark.parametrize("last", [BY_STEP, OF_FILES], ids=["step", "files"])
def test_the_last_save_is_repeated_within_the_notice(disk: Disk, tmp_path: Path, last: str) -> None:
    """After a notice on a full disk, the last save is repeated until there is space; the process exits with 143."""
    told = tmp_path / "told"
    environment = {"PATH": os.environ["PATH"], "MIZZEN_PLATFORM": "sigterm", "MIZZEN_NOTICE_WINDOW_S": "60"}
    command = [sys.executable, "-c", BEGIN + LEAVES + last, disk.path / "root", told]
    child = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdin is not None and child.stderr is not None
    while not told.exists() and child.poll() is None:
        pass
    disk.fill()
    child.stdin.write("x")
    child.stdin.flush()
    for line in child.stderr:
        if "step 2 was not saved" in line:
            break
    disk.clear()
    errors = child.communicate(timeout=60)[1]
    assert child.returncode == 128 + signal.SIGTERM, errors
    assert [m.step for m in list_committed(disk.path / "root", verify=True)] == [2, 1]


ENDS = """
import mizzen
root, told, leaves = sys.argv[1:]
weights = {"w": 0}
checkpointer = mizzen.Checkpointer(root, interval_s=0)
checkpointer.track(model=weights)
checkpointer.restore()
checkpointer.step(1)
open(told, "w").close()
os.read(0, 1)  # The disk is full now.
print("x" * 100)
weights["w"] = bytes(100_000)
checkpointer.step(2)
if leaves == "True":
    mizzen.exit_preempted()
"""


@pytest.mark.parametrize("leaves", [False, True])
def test_output_that_cannot_be_written_does_not_change_the_exit_code(disk: Disk, tmp_path: Path, leaves: bool) -> None:
    """If the disk of the output is full too, the exit code is that of the training, not the interpreter's 120."""
    told = tmp_path / "told"
    environment = {"PATH": os.environ["PATH"], "MIZZEN_PLATFORM": "sigterm"}
    command = [sys.executable, "-c", BEGIN + ENDS, disk.path / "root", told, str(leaves)]
    with (disk.path / "output").open("w") as output:
        child = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=output, stderr=output, text=True
        )
        while not told.exists() and child.poll() is None:
            pass
        disk.fill()
        child.communicate("x", timeout=60)
    assert child.returncode == (128 + signal.SIGTERM if leaves else 0)


def test_a_gang_commits_when_its_ranks_can_write(disk: Disk) -> None:
    """Ranks whose disk is full repeat their writes, so the others do not wait for the timeout."""
    ranks = gang(disk.path / "root", world_size=2, shard_timeout_s=60)

    def save(number: int) -> Callable[[Checkpointer, int], Any]:
        return lambda one, rank: one.save(number, {"model": bytes([number]) * 50_000, "rng": [rank, number]})

    together(ranks, save(1))
    disk.fill()
    threading.Timer(0.5, disk.clear).start()
    found = together(ranks, save(2))
    assert [getattr(one, "step", one) for one in found] == [2, 2]
    assert [m.step for m in list_committed(disk.path / "root", verify=True)] == [2, 1]


@pytest.mark.parametrize("tier", ["only", "local"])
def test_a_gang_saves_after_a_claim_has_failed(disk: Disk, tmp_path: Path, tier: str) -> None:
    """If one rank cannot claim a root at its start, all ranks' first save waits for it and is committed."""
    given: dict[str, Any] = {"attempt": 1}
    gang_of_two = CheckpointSettings(sharded=True, world_size=2, shard_timeout_s=30)
    near = disk.path / "root"
    root = tmp_path / "far" if tier == "local" else near
    given |= {"local": near} if tier == "local" else {}
    other = Checkpointer(root, **given, settings=replace(gang_of_two, rank=1))
    disk.fill()
    with pytest.warns(CheckpointWarning, match=f"not claimed yet: .*{FULL}"):
        ranks = [Checkpointer(root, **given, settings=replace(gang_of_two, rank=0)), other]
    threading.Timer(0.3, disk.clear).start()
    for number in (1, 2):
        found = together(ranks, lambda one, rank, n=number: one.save(n, {"model": [n], "rng": [rank, n]}))  # type: ignore[misc]
        assert [getattr(one, "step", one) for one in found] == [number] * 2
    for place in {root, near}:
        assert [m.step for m in list_committed(place, verify=True)] == [2, 1]


def test_a_gang_saves_after_one_rank_could_not_begin(tmp_path: Path) -> None:
    """A save that fails on one rank before it writes anything does not prevent later saves of the gang."""
    ranks = gang(tmp_path, world_size=2, shard_timeout_s=30)
    ranks[1]._roots.writers[0].abandon(1)

    def save(one: Checkpointer, rank: int) -> Any:
        return one.save(1, {"model": [1], "rng": [rank, 1] if rank else object()})

    assert all(isinstance(error, CheckpointError) for error in together(ranks, save))
    found = together(ranks, lambda one, rank: one.save(2, {"model": [2], "rng": [rank, 2]}))
    assert [getattr(one, "step", one) for one in found] == [2, 2]
