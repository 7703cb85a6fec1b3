"""Processes of this machine: who one is, whether it still lives, and finding what a lost task left behind."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Self

from agent import shim


@dataclass(frozen=True)
class Identity:
    """A process for good: pids come again, a pid with its start time (clock ticks) and boot does not."""

    pid: int
    start: int
    boot_id: str

    @classmethod
    def of(cls, pid: int) -> Self:
        """The identity of a living process.

        Raises:
            ProcessLookupError: there is none.
        """
        stat = shim.process_stat(pid)
        if stat is None:
            raise ProcessLookupError(f"no process {pid}")
        return cls(pid, stat[2], shim.boot_id())

    @classmethod
    def from_json(cls, body: dict[str, Any], boot_id: str) -> Self:
        """From `{"pid", "start"}` as the shim writes it."""
        return cls(int(body["pid"]), int(body["start"]), boot_id)

    def alive(self) -> bool:
        """Whether it runs. A zombie does not."""
        stat = shim.process_stat(self.pid)
        return stat is not None and stat[2] == self.start and stat[0] not in "ZX" and self.boot_id == shim.boot_id()

    def send(self, signum: int) -> bool:
        """Send a signal to it and to no later owner of its pid; whether it was there."""
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
    """Processes whose environment says that they belong to one of the runs."""
    wanted = {f"MIZZEN_RUN_ID={run_id}".encode() for run_id in run_ids}
    found = set()
    for name in os.listdir("/proc"):  # noqa: PTH208 - of every process, and only names are needed
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
                if wanted.intersection(file.read().split(b"\0")):
                    found.add(int(name))
    return found


def kill_until_gone(find: Callable[[], set[int]], patience_s: float = 30.0) -> set[int]:
    """SIGKILL what `find` finds until it finds nothing; returns what could not be killed within `patience_s`."""
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
