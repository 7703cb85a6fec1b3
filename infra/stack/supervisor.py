"""Keeps child processes running: starts them in order, restarts dead or stuck ones, and stops them in reverse order."""

import asyncio
import logging
import shutil
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from infra import children
from infra.config.services import LivenessSettings
from infra.errors import StackError
from infra.liveness_pipe import VARIABLE, LivenessListener
from infra.pidfds import first_end
from infra.stack import leftovers
from infra.stack.fork_server import ForkedProcess, ForkServer
from infra.stack.liveness import Liveness, Probe, StackPart

_log = logging.getLogger(__name__)
_BACKOFF_S = (0.2, 0.5, 1.0, 2.0, 5.0)
_STEADY_S = 30.0
_DEATHS_AT_START = 3
_OUTAGE_S = 300.0
_START_S = 5.0
"""A part that ran for longer than this counts as having worked, even if it ended before its first liveness check."""
"""A part that has worked before is restarted for at least this long: its failure, such as a full disk, may pass."""
_LINE_CHARACTERS = 400


def dies_with_parent(signal_name: str = "TERM") -> list[str]:
    """Returns a command prefix that makes the kernel send the signal to the command when its parent dies.

    Raises:
        StackError: setpriv (util-linux) is not installed.
    """
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        raise StackError("setpriv: not found on the PATH; install the package util-linux, which contains it")
    return [setpriv, "--pdeathsig", signal_name]


@dataclass
class Child:
    """One child process that the supervisor keeps running."""

    name: str
    command: list[str]
    log: Path
    stop_signal: int = signal.SIGTERM
    stop_timeout_s: float = 10.0
    environment: dict[str, str] = field(default_factory=dict)
    ready: Callable[[], Awaitable[bool]] | None = None
    """Readiness check, called until it returns True before the next child is started."""
    ready_timeout_s: float = 60.0
    probes: Sequence[Probe] = ()
    listener: LivenessListener | None = None
    """Receives the liveness signs of the process, if it sends any."""
    process: subprocess.Popen[bytes] | ForkedProcess | None = None
    restarts: int = 0
    started_s: float = 0.0
    """Time of the last start of the process (monotonic)."""
    killed_because: str | None = None
    """Why the supervisor killed the process; None after the restart."""
    umask: int = -1
    """Umask of the process; -1 means the supervisor's umask."""
    has_worked: bool = False
    """Whether a process of this part was ready, or a probe of it succeeded."""
    log_start: int = 0
    """Size of the log in bytes before the last start of the process."""
    arguments: tuple[str, ...] | None = None
    """What the fork server runs, if there is one, instead of `command`; None: it cannot run this."""
    prepare: Callable[[], None] | None = None
    """Called before each start of the process. A StackError is written to the process's log, and the process is started
    anyway, because it may still be able to run."""

    def launch(self, forks: ForkServer | None = None) -> None:
        """Starts the process in its own session, so that Ctrl-C at the terminal reaches only the supervisor."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        pipe = {VARIABLE: self.listener.writing} if self.listener is not None else {}
        environment = {**children.environment(), **self.environment}
        if self.listener is not None:
            self.listener.clear()
        self.started_s = time.monotonic()
        with self.log.open("ab") as log:
            self.log_start = log.tell()
            try:
                if self.prepare is not None:
                    self.prepare()
            except StackError as error:
                log.write(f"{error}\n".encode())
                log.flush()
            if forks is not None and self.arguments is not None:
                self.process = forks.launch(self.arguments, log, environment, pipe, self.umask)
                if self.process is not None:
                    return
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**environment, **{name: str(number) for name, number in pipe.items()}},
                pass_fds=tuple(pipe.values()),
                umask=self.umask,
            )

    def is_running(self) -> bool:
        """Whether the process is running."""
        return self.process is not None and self.process.poll() is None

    def tail(self, lines: int = 5) -> str:
        """Returns the last lines that the process has logged since its start. The middle of a long line is left out."""
        try:
            text = self.log.read_bytes()
        except OSError:
            return ""
        own = text[self.log_start :] if len(text) >= self.log_start else text  # A shorter log was rotated.
        last = own.decode(errors="replace").splitlines()[-lines:] or [f"it has written nothing to {self.log}"]
        half = _LINE_CHARACTERS // 2
        return "\n".join(line if len(line) <= 2 * half else f"{line[:half]} ... {line[-half:]}" for line in last)


_KILLED_AT_START = 3
"""Maximum number of restarts of a part that is killed by a signal while it starts."""


class Supervisor:
    """Starts, monitors, restarts and stops child processes."""

    def __init__(
        self,
        liveness: LivenessSettings | None = None,
        on_restart: Callable[[str, str], Awaitable[None]] | None = None,
        parts: Path | None = None,
        forks: ForkServer | None = None,
    ) -> None:
        """Creates a supervisor without children.

        Args:
            liveness: when a part counts as stuck.
            on_restart: called with a child's name and the reason after each restart.
            parts: path of the file that lists the running processes (`infra.stack.leftovers`).
            forks: forks the children that have `arguments`.
        """
        self.children: list[Child] = []
        self._watchers: list[asyncio.Task[None]] = []
        self._telling: set[asyncio.Task[None]] = set()
        self._liveness = Liveness(liveness or LivenessSettings(), self._kill)
        self._on_restart = on_restart
        self._parts = parts
        self._forks = forks
        self._stopping = False
        self._failure: StackError | None = None
        self._failed = asyncio.Event()

    async def start(self, child: Child) -> None:
        """Starts a child, waits until it is ready, and keeps it running from then on.

        A child that is killed by a signal while it starts, for example by the kernel's OOM killer, is restarted.

        Raises:
            StackError: the child exited by itself, was killed too often, or was not ready in time. The message contains
                the last lines of its log.
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
                _log.warning("restarting %s: it was killed by signal %d at its start", child.name, -code)
                self._launch(child)
            elif code is not None:
                raise StackError(
                    f"{child.name}: exited with code {child.process.returncode} at its start\n{child.tail()}"
                )
            if time.monotonic() > deadline:
                raise StackError(f"{child.name}: not ready after {child.ready_timeout_s:.0f} s\n{child.tail()}")
            await asyncio.sleep(0.05)
        child.has_worked = child.ready is not None
        if not self._watchers:
            self._watchers.append(asyncio.create_task(self._liveness.run(lambda: self.children)))
        self._watchers.append(asyncio.create_task(self._keep(child)))

    @staticmethod
    def _kill(part: StackPart, why: str) -> None:
        assert isinstance(part, Child)
        if part.is_running() and part.process is not None:
            part.killed_because = why
            part.process.kill()

    async def _keep(self, child: Child) -> None:
        failures, started = 0, time.monotonic()
        deaths, worked_s = 0, started
        while not self._stopping:
            assert child.process is not None
            await ended(child.process)
            now_s = time.monotonic()
            failures = 0 if now_s - started > _STEADY_S else failures
            if child.killed_because is not None or self._liveness.has_answered(child):
                deaths, worked_s, child.has_worked = 0, now_s, True
            else:
                deaths += 1
                if now_s - started > _START_S and not child.has_worked:
                    worked_s, child.has_worked = now_s, True
                if deaths >= _DEATHS_AT_START and (not child.has_worked or now_s - worked_s > _OUTAGE_S):
                    self._give_up(child, deaths)
                    return
            pause_s = _BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)]
            why = child.killed_because or f"it exited with code {child.process.returncode}"
            child.killed_because = None
            _log.warning("%s is restarted in %.1f s: %s", child.name, pause_s, why)
            self._notify(child.name, why)
            await asyncio.sleep(pause_s)
            failures += 1
            started = time.monotonic()
            child.restarts += 1
            if not self._stopping:
                self._launch(child)

    def _give_up(self, child: Child, deaths: int) -> None:
        assert child.process is not None
        how = f"ended at its start {deaths} times in a row, the last time with exit code {child.process.returncode}"
        self._failure = StackError(f"{child.name}: {how}\n{child.tail()}")
        self._failed.set()

    async def until_failed(self) -> None:
        """Waits until a part cannot be started again.

        Raises:
            StackError: a part ended at its start three times in a row. If it had worked before, this lasted 5 minutes.
                The message contains the last lines of its log.
        """
        await self._failed.wait()
        assert self._failure is not None
        raise self._failure

    def _launch(self, child: Child) -> None:
        child.launch(self._forks)
        if self._parts is not None:
            running = (c.process.pid for c in self.children if c.is_running() and c.process is not None)
            leftovers.record(self._parts, running)

    def _notify(self, name: str, why: str) -> None:
        if self._on_restart is not None:
            telling = asyncio.ensure_future(self._on_restart(name, why))
            self._telling.add(telling)
            telling.add_done_callback(self._telling.discard)

    async def stop(self) -> None:
        """Stops all children in reverse order of their start. Kills a child that does not end in time."""
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
        if self._forks is not None:
            self._forks.close()


async def ended(process: subprocess.Popen[bytes] | ForkedProcess) -> None:
    """Waits for the end of a child process, without polling if the kernel supports pidfds."""
    while process.poll() is None:
        await first_end([process.pid])


def stop_process(child: Child) -> None:
    """Sends a child its stop signal, and kills it if it does not end in time."""
    process = child.process
    if process is None or process.poll() is not None:
        return
    process.send_signal(child.stop_signal)
    try:
        process.wait(child.stop_timeout_s)
    except subprocess.TimeoutExpired:
        _log.warning("%s did not end within %.0f s; killing it", child.name, child.stop_timeout_s)
        process.kill()
        process.wait()
