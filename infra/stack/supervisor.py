"""Keeps child processes running: starts them in order, restarts those that die or are stuck, stops them in the opposite
order.
"""

import asyncio
import logging
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from infra.config import LivenessSettings
from infra.errors import StackError
from infra.liveness_pipe import VARIABLE, LivenessListener
from infra.pidfds import first_end
from infra.stack import leftovers
from infra.stack.liveness import Liveness, Part, Probe

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
    probes: Sequence[Probe] = ()
    listener: LivenessListener | None = None
    """Hears the process's signs of life, where it gives any."""
    process: subprocess.Popen[bytes] | None = None
    restarts: int = 0
    started_s: float = 0.0
    """When the process was last started (monotonic)."""
    killed_because: str | None = None
    """Why the supervisor killed the process, until it is started again."""
    umask: int = -1
    """Of the files that it makes; -1: this process's."""
    prepare: Callable[[], None] | None = None
    """Called before each start of the process; a StackError is written to its log, and the process started all the
    same: it knows best what it can work with."""

    def launch(self) -> None:
        """Starts the process in a session of its own: a Ctrl-C at the terminal reaches the supervisor alone."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        pipe = {VARIABLE: str(self.listener.writing)} if self.listener is not None else {}
        if self.listener is not None:
            self.listener.clear()
        self.started_s = time.monotonic()
        with self.log.open("ab") as log:
            try:
                if self.prepare is not None:
                    self.prepare()
            except StackError as error:
                log.write(f"{error}\n".encode())
                log.flush()
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **self.environment, **pipe},
                pass_fds=() if self.listener is None else (self.listener.writing,),
                umask=self.umask,
            )

    def is_running(self) -> bool:
        """Whether its process is there."""
        return self.process is not None and self.process.poll() is None

    def tail(self, lines: int = 5) -> str:
        """The last lines of its log."""
        try:
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        except OSError:
            return ""


_KILLED_AT_START = 3
"""So often a part that is killed while it starts is started again."""


class Supervisor:
    """A list of children, in the order of their start."""

    def __init__(
        self,
        liveness: LivenessSettings | None = None,
        on_restart: Callable[[str, str], Awaitable[None]] | None = None,
        parts: Path | None = None,
    ) -> None:
        """`liveness`: when a part counts as stuck; `on_restart` gets a child's name and why it was restarted.

        `parts`: the file that lists the running processes (`infra.stack.leftovers`).
        """
        self.children: list[Child] = []
        self._watchers: list[asyncio.Task[None]] = []
        self._telling: set[asyncio.Task[None]] = set()
        self._liveness = Liveness(liveness or LivenessSettings(), self._kill)
        self._on_restart = on_restart
        self._parts = parts
        self._stopping = False

    async def start(self, child: Child) -> None:
        """Starts a child, waits until it is ready, and keeps it running from then on.

        One that is killed meanwhile (by the kernel for want of memory, or by somebody) is started again.

        Raises:
            StackError: it ended by itself, was killed each time, or was not ready in time; with its log's last lines.
        """
        self.children.append(child)
        self._launch(child)
        kills = 0
        deadline = time.monotonic() + child.ready_timeout_s
        while child.ready is not None and not await child.ready():
            assert child.process is not None
            code = child.process.poll()
            if code is not None and code < 0 and kills < _KILLED_AT_START:
                kills += 1
                _log.warning("%s is started again: it was killed by signal %d at its start", child.name, -code)
                self._launch(child)
            elif code is not None:
                raise StackError(f"{child.name}: ended with {child.process.returncode} at its start\n{child.tail()}")
            if time.monotonic() > deadline:
                raise StackError(f"{child.name}: not ready after {child.ready_timeout_s:.0f} s\n{child.tail()}")
            await asyncio.sleep(0.05)
        if not self._watchers:
            self._watchers.append(asyncio.create_task(self._liveness.run(lambda: self.children)))
        self._watchers.append(asyncio.create_task(self._keep(child)))

    @staticmethod
    def _kill(part: Part, why: str) -> None:
        assert isinstance(part, Child)
        if part.is_running() and part.process is not None:
            part.killed_because = why
            part.process.kill()

    async def _keep(self, child: Child) -> None:
        failures, started = 0, time.monotonic()
        while not self._stopping:
            assert child.process is not None
            await ended(child.process)
            failures = 0 if time.monotonic() - started > _STEADY_S else failures
            pause_s = _BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)]
            why = child.killed_because or f"it ended with {child.process.returncode}"
            child.killed_because = None
            _log.warning("%s is started again in %.1f s: %s", child.name, pause_s, why)
            self._tell(child.name, why)
            await asyncio.sleep(pause_s)
            failures += 1
            started = time.monotonic()
            child.restarts += 1
            if not self._stopping:
                self._launch(child)

    def _launch(self, child: Child) -> None:
        child.launch()
        if self._parts is not None:
            running = (c.process.pid for c in self.children if c.is_running() and c.process is not None)
            leftovers.record(self._parts, running)

    def _tell(self, name: str, why: str) -> None:
        if self._on_restart is not None:
            telling = asyncio.ensure_future(self._on_restart(name, why))
            self._telling.add(telling)
            telling.add_done_callback(self._telling.discard)

    async def stop(self) -> None:
        """Stops all children, the last started first; those that do not end in time are killed."""
        self._stopping = True
        ending = [*self._watchers, *self._telling]
        for watcher in ending:
            watcher.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        for child in reversed(self.children):
            await asyncio.to_thread(stop_process, child)
            if child.listener is not None:
                child.listener.close()
        self.children.clear()


async def ended(process: subprocess.Popen[bytes]) -> None:
    """Waits for the end of a child of this process, without polling, where the kernel allows it."""
    while process.poll() is None:
        await first_end([process.pid])


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
