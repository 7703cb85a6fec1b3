"""Removes what tasks have left in the memory that processes share: it would outlive them until the machine restarts.

Tasks in sandboxes and containers have IPC namespaces of their own, which end with them. The others share those of the
machine: System V segments, semaphores and message queues, and the files in `/dev/shm`. They belong to the user of a
tenant, and are removed once that user has no process here, like logind does (RemoveIPC). What the agent's own user has
is never touched.
"""

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_IPC_RMID = 0
_SHM = Path("/dev/shm")
_KINDS: dict[str, tuple[str, Callable[[int], int]]] = {
    "shm": ("shmid", lambda number: int(_LIBC.shmctl(number, _IPC_RMID, None))),
    "sem": ("semid", lambda number: int(_LIBC.semctl(number, 0, _IPC_RMID))),
    "msg": ("msqid", lambda number: int(_LIBC.msgctl(number, _IPC_RMID, None))),
}
"""File of `/proc/sysvipc`: its column with the number of an object, and the function that removes one."""


def remove_left(uids: range) -> int:
    """Removes the shared objects of those users among `uids` that have no process, and returns how many there were."""
    # Listed first: a process that begins later cannot have made them.
    found = [(uid, remove) for uid, remove in [*_system_v(), *_files()] if uid in uids]
    busy = _with_processes() if found else set()
    removed = 0
    for uid, remove in found:
        if uid not in busy:
            with contextlib.suppress(OSError):
                remove()
                removed += 1
    return removed


def _system_v() -> Iterator[tuple[int, Callable[[], object]]]:
    for name, (column, control) in _KINDS.items():
        with contextlib.suppress(FileNotFoundError):  # A kernel without System V IPC.
            head, *lines = Path("/proc/sysvipc", name).read_text().splitlines()
            columns = head.split()
            for line in lines:
                values = dict(zip(columns, line.split(), strict=True))
                yield int(values["uid"]), partial(control, int(values[column]))


def _files() -> Iterator[tuple[int, Callable[[], object]]]:
    for folder, folders, names in os.walk(_SHM, topdown=False):
        for name in names + folders:
            path = Path(folder, name)
            with contextlib.suppress(OSError):
                is_folder = path.is_dir() and not path.is_symlink()
                yield path.lstat().st_uid, path.rmdir if is_folder else path.unlink


def _with_processes() -> set[int]:
    """Returns the users that have a process, from its real, effective and saved user id."""
    found: set[int] = set()
    for name in os.listdir("/proc"):  # noqa: PTH208 - of every process, and only names are needed
        if name.isdigit():
            with contextlib.suppress(OSError, StopIteration), open(f"/proc/{name}/status") as file:
                found.update(map(int, next(line for line in file if line.startswith("Uid:")).split()[1:4]))
    return found
