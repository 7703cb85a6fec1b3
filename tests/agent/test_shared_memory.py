"""What tasks leave in shared memory is removed once their user has no process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from agent.shared_memory import remove_left

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs users of tasks")
_UID = 2_099_990
_MAKE = """
import ctypes, os, pathlib, sys
os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]))
libc = ctypes.CDLL(None)
assert min(libc.shmget(0, 100_000, 0o1600), libc.semget(0, 2, 0o1600), libc.msgget(0, 0o1600)) >= 0
folder = pathlib.Path(sys.argv[2]); folder.mkdir(); (folder / "torch_1").write_text("x")
print("made", flush=True)
input()
"""


def _table(kind: str) -> list[str]:
    return Path("/proc/sysvipc", kind).read_text().splitlines()


def objects(uid: int) -> int:
    """Returns the number of System V objects of a user."""
    lines = [line.split() for kind in ("shm", "sem", "msg") for line in _table(kind)]
    return sum(str(uid) in line for line in lines)


def test_objects_of_a_user_without_processes_are_removed(tmp_path: Path) -> None:
    """Segments, semaphores, queues and files stay as long as a process of their user runs; others' always stay."""
    users = (_UID, _UID + 1)
    folders = [Path(f"/dev/shm/mizzen-test-{os.getpid()}-{uid}") for uid in users]
    makers = [
        subprocess.Popen(
            [sys.executable, "-c", _MAKE, str(uid), str(folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )
        for uid, folder in zip(users, folders, strict=True)
    ]  # fmt: skip
    try:
        for maker in makers:
            assert maker.stdout is not None and maker.stdout.readline() == b"made\n"
        assert [objects(uid) for uid in users] == [3, 3]
        assert remove_left(range(_UID, _UID + 2)) == 0
        for maker in makers:
            maker.communicate()
        assert remove_left(range(_UID, _UID + 1)) == 5
        assert [objects(uid) for uid in users] == [0, 3]
        assert [folder.exists() for folder in folders] == [False, True]
    finally:
        for maker in makers:
            maker.kill()
            maker.communicate()
        remove_left(range(_UID, _UID + 2))
    assert [objects(uid) for uid in users] == [0, 0] and not any(folder.exists() for folder in folders)
