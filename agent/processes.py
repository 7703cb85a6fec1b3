"""Identifies processes of this machine, checks whether they are alive, and finds what a lost task left running."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Self

from agent import shim


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
