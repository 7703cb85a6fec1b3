"""Memory servers of tests: each machine is a folder with sockets; all its servers are killed at the end."""

import os
import select
import signal
import socket
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def pids(machine: Path) -> list[int]:
    """Returns the pids of the memory servers of a machine that answer."""
    found = []
    for path in machine.glob("mizzen-memory/*.sock"):
        with suppress(OSError), socket.socket(socket.AF_UNIX) as link:
            link.connect(str(path))
            found.append(struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])
    return found


def kill(machine: Path, signal_number: signal.Signals = signal.SIGKILL) -> None:
    """Sends a signal to all servers of a machine; after SIGKILL, returns when they have ended."""
    for pid in pids(machine):
        handle = os.pidfd_open(pid)
        os.kill(pid, signal_number)
        if signal_number == signal.SIGKILL:
            select.select([handle], [], [], 20)
        os.close(handle)


@contextmanager
def machines(*names: str) -> Iterator[list[Path]]:
    """Yields a folder for each machine. Their paths are short, because those of sockets are limited."""
    with tempfile.TemporaryDirectory(prefix="mz-", dir="/tmp") as folder:
        made = [Path(folder, name) for name in names]
        for machine in made:
            machine.mkdir()
        try:
            yield made
        finally:
            for machine in made:
                kill(machine, signal.SIGCONT)
                kill(machine)
