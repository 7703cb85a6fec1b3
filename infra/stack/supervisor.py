"""Keeps child processes running: starts them in order, restarts those that die, stops them in the opposite order."""

import asyncio
import logging
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from infra.errors import StackError

_log = logging.getLogger(__name__)
_BACKOFF_S = (0.2, 0.5, 1.0, 2.0, 5.0)
_STEADY_S = 30.0


def dies_with_parent(signal_name: str = "TERM") -> list[str]:
    """Put before a command: it gets this signal when its parent dies, even by SIGKILL.

    Raises:
        StackError: setpriv (util-linux) is not there.
    """
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        raise StackError("setpriv: not found on the PATH; it is part of util-linux, install that package")
    return [setpriv, "--pdeathsig", signal_name]


@dataclass
class Child:
    """One process to keep running."""

    name: str
    command: list[str]
    log: Path
    stop_signal: int = signal.SIGTERM
    stop_timeout_s: float = 10.0
    environment: dict[str, str] = field(default_factory=dict)
    ready: Callable[[], Awaitable[bool]] | None = None
    """Asked until True before the next child is started."""
    ready_timeout_s: float = 60.0
    process: subprocess.Popen[bytes] | None = None
    restarts: int = 0

    def launch(self) -> None:
        """Starts the process in a session of its own: a Ctrl-C at the terminal reaches the supervisor alone."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **self.environment},
            )

    def tail(self, lines: int = 5) -> str:
        """The last lines of its log."""
        try:
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        except OSError:
            return ""


class Supervisor:
    """A list of children, in the order of their start."""

    def __init__(self) -> None:
        self.children: list[Child] = []
        self._watchers: list[asyncio.Task[None]] = []
        self._stopping = False

    async def start(self, child: Child) -> None:
        """Starts a child, waits until it is ready, and keeps it running from then on.

        Raises:
            StackError: it ended, or was not ready in time; with the last lines of its log.
        """
        child.launch()
        self.children.append(child)
        deadline = time.monotonic() + child.ready_timeout_s
        while child.ready is not None and not await child.ready():
            assert child.process is not None
            if child.process.poll() is not None:
                raise StackError(f"{child.name}: ended with {child.process.returncode} at its start\n{child.tail()}")
            if time.monotonic() > deadline:
                raise StackError(f"{child.name}: not ready after {child.ready_timeout_s:.0f} s\n{child.tail()}")
            await asyncio.sleep(0.05)
        self._watchers.append(asyncio.create_task(self._keep(child)))

    async def _keep(self, child: Child) -> None:
        failures, started = 0, time.monotonic()
        while not self._stopping:
            assert child.process is not None
            if child.process.poll() is None:
                await asyncio.sleep(0.1)
                continue
            failures = 0 if time.monotonic() - started > _STEADY_S else failures
            pause_s = _BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)]
            _log.warning("%s ended with %s; starting it again in %.1f s", child.name, child.process.returncode, pause_s)
            await asyncio.sleep(pause_s)
            failures += 1
            started = time.monotonic()
            child.restarts += 1
            if not self._stopping:
                child.launch()

    async def stop(self) -> None:
        """Stops all children, the last started first; those that do not end in time are killed."""
        self._stopping = True
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        for child in reversed(self.children):
            await asyncio.to_thread(stop_process, child)
        self.children.clear()


def stop_process(child: Child) -> None:
    """Asks one child to end, and kills it if it does not in time."""
    process = child.process
    if process is None or process.poll() is not None:
        return
    process.send_signal(child.stop_signal)
    try:
        process.wait(child.stop_timeout_s)
    except subprocess.TimeoutExpired:
        _log.warning("%s did not end in %.0f s; killing it", child.name, child.stop_timeout_s)
        process.kill()
        process.wait()
