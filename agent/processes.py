"""Identifies processes of this machine, checks whether they are alive, and finds what a lost task left running.

Also ends the tasks of a state folder that was deleted, without the records in it.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from agent import sandbox, shim


@dataclass(frozen=True)
class ProcessIdentity:
    """The unique identity of a process: pid, start time (clock ticks) and boot id. A pid alone can be reused."""

    pid: int
    start: int
    boot_id: str

    @classmethod
    def of(cls, pid: int) -> Self:
        """Returns the identity of a living process.

        Raises:
            ProcessLookupError: no process has this pid.
        """
        stat = shim.process_stat(pid)
        if stat is None:
            raise ProcessLookupError(f"no process has pid {pid}")
        return cls(pid, stat[2], shim.boot_id())

    @classmethod
    def from_json(cls, body: dict[str, Any], boot_id: str) -> Self:
        """Returns the identity in a JSON object with `pid` and `start`, as the shim writes it."""
        return cls(int(body["pid"]), int(body["start"]), boot_id)

    def alive(self) -> bool:
        """Whether the process is alive. A zombie is not."""
        stat = shim.process_stat(self.pid)
        return stat is not None and stat[2] == self.start and stat[0] not in "ZX" and self.boot_id == shim.boot_id()

    def send(self, signum: int) -> bool:
        """Sends a signal to the process, never to a later process with the same pid. Returns whether it was alive."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except OSError:
            return False
        try:
            if not self.alive():
                return False
            signal.pidfd_send_signal(descriptor, signum)
        except ProcessLookupError:
            return False
        finally:
            os.close(descriptor)
        return True


def with_run_ids(run_ids: Collection[str]) -> set[int]:
    """Returns the pids of processes whose `MIZZEN_RUN_ID` is one of `run_ids`."""
    wanted = {f"MIZZEN_RUN_ID={run_id}".encode() for run_id in run_ids}
    found = set()
    for name in os.listdir("/proc"):  # noqa: PTH208 - of every process, and only names are needed
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
                if wanted.intersection(file.read().split(b"\0")):
                    found.add(int(name))
    return found


def kill_until_gone(find: Callable[[], set[int]], patience_s: float = 30.0) -> set[int]:
    """Sends SIGKILL to the processes that `find` returns until it returns none that is alive.

    Gives up after `patience_s` seconds. Returns the pids of the processes that are still alive.
    """
    give_up_s = time.monotonic() + patience_s
    pause_s = 0.005
    while True:
        table = shim.process_table()
        left = {pid for pid in find() if pid in table and table[pid][0] not in "ZX"}
        if not left or time.monotonic() > give_up_s:
            return left
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(pause_s)
        pause_s = min(0.25, 2 * pause_s)


_GRACE_S = 30.0
"""How long the tasks have to save. The grace periods of their workloads were lost with the folder."""
_POLL_S = 0.2
_SHIM = "mizzen-shim"


def end_tasks(folder: Path) -> None:
    """Gives the tasks of a state folder their notice, then kills their remaining processes and their shims.

    `folder` is its current path (`StateFolder.place`). Finally removes the folders of their sandboxes.
    """
    below = f"{folder / 'runs'}/"
    shims = _shims(lambda path: path.startswith(below))
    for one in shims:
        one.send(signal.SIGTERM)
    give_up_s = time.monotonic() + _GRACE_S
    # A shim continues after the end of its task: it tries to write the exit status.
    while _alive(shim.descendants(_pids(shims))) and time.monotonic() < give_up_s:
        time.sleep(_POLL_S)
    table, roots = shim.process_table(), _pids(shims)
    tree = {pid: table[pid][2] for pid in roots | shim.descendants(roots, table) if pid in table}
    kill_until_gone(lambda: {pid for pid, stat in shim.process_table().items() if tree.get(pid) == stat[2]})
    for private in folder.glob("runs/*/private"):
        with contextlib.suppress(OSError):
            sandbox.clear(str(private))


def _pids(shims: list[ProcessIdentity]) -> set[int]:
    return {one.pid for one in shims if one.alive()}


def _alive(pids: set[int]) -> bool:
    stats = map(shim.process_stat, pids)
    return any(stat is not None and stat[0] not in "ZX" for stat in stats)


def holder_of(lock: Path) -> ProcessIdentity | None:
    """Returns the shim that holds the lock of a task's folder; None: the task has none. Takes milliseconds."""
    wanted = os.path.realpath(lock)
    return next(iter(_shims(lambda path: path == wanted)), None)


def _shims(wanted: Callable[[str], bool]) -> list[ProcessIdentity]:
    """Returns the shims that have one of the wanted files open: each shim keeps the lock file of its task open."""
    found = []
    for name in os.listdir("/proc"):  # noqa: PTH208 - of every process, and only names are needed
        if not name.isdigit() or _name(name) != _SHIM:
            continue
        with contextlib.suppress(OSError), os.scandir(f"/proc/{name}/fd") as descriptors:
            identity = ProcessIdentity.of(int(name))
            if any(wanted(_target(one.path)) for one in descriptors):
                found.append(identity)
    return found


def _target(link: str) -> str:
    with contextlib.suppress(OSError):
        return str(Path(link).readlink())
    return ""


def _name(pid: str) -> str:
    """Returns the name of a process (at most 15 bytes), or an empty string if the process does not exist."""
    with contextlib.suppress(OSError, ValueError):
        return Path("/proc", pid, "comm").read_text().rstrip("\n")
    return ""


def task_environment(pid: int) -> dict[str, str]:
    """Returns the environment with which a process, or the command that it has started, was executed.

    Raises:
        OSError: the process has ended.
    """
    for one in (pid, *sorted(children_of(pid))):
        text = Path(f"/proc/{one}/environ").read_bytes()
        if text.strip(b"\0"):
            entries = (os.fsdecode(entry).partition("=") for entry in text.split(b"\0") if entry)
            return {name: value for name, _, value in entries}
    return {}


def children_of(pid: int) -> set[int]:
    """Returns the pids of the children of a process."""
    return {child for child, (_, parent, _) in shim.process_table().items() if parent == pid}
