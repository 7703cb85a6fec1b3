"""Training processes that are forked from the supervisor, with methods to read, kill and freeze them.

A fork starts in milliseconds, because imports are not repeated; otherwise the processes use nothing of the supervisor.
They are killed when the supervisor ends.
"""

import ctypes
import mmap
import os
import select
import signal
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from rigs.crash.kill_training import Channel, KillJob, SaveStage, train
from rigs.crash.ptrace import WALL, SyscallTrace

WAIT_S = 60.0
"""Timeout in seconds: a process that takes longer is considered hung."""
_PDEATHSIG = 1


class ProcessTimeout(Exception):
    """A process did not make progress within the timeout."""


class Process:
    """One training process."""

    def __init__(self, job: KillJob) -> None:
        self.job = job
        self.lines: list[str] = []
        """Lines that the process has sent."""
        self.status: int | None = None
        self._place = mmap.mmap(-1, mmap.PAGESIZE)
        self._read, write = os.pipe()
        back, self._go = os.pipe()
        self._rest = b""
        supervisor = os.getpid()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if not self.pid:
            try:
                _alone(supervisor, {write, back})
                train(job, Channel(write, back, self._place))
            finally:
                os._exit(0)
        os.close(write)
        os.close(back)
        os.set_blocking(self._read, False)

    @property
    def stage(self) -> tuple[SaveStage, bool]:
        """The last reported stage of the process, and whether it concerns the local root."""
        return SaveStage(self._place[0]), bool(self._place[1])

    @property
    def ended(self) -> bool:
        """Whether the process is known to have ended."""
        return self.status is not None

    @property
    def killed(self) -> bool:
        """Whether the process was ended by SIGKILL."""
        return self.status is not None and os.WIFSIGNALED(self.status) and os.WTERMSIG(self.status) == signal.SIGKILL

    def told(self, word: str) -> list[str]:
        """Returns the text after `word` of each received line that begins with it."""
        return [line[len(word) :].strip() for line in self.lines if line.split(" ", 1)[0] == word]

    def go(self) -> None:
        """Sends the signal to continue, for the current or the next wait of the process."""
        with suppress(BrokenPipeError):
            os.write(self._go, b"g")

    def hear(self) -> None:
        """Reads the lines that the process has sent so far."""
        while True:
            try:
                raw = os.read(self._read, 1 << 16)
            except BlockingIOError:
                break
            if not raw:
                break
            self._rest += raw
        *lines, self._rest = self._rest.split(b"\n")
        self.lines += [line.decode() for line in lines]

    def wait_line(self, word: str, times: int = 1) -> bool:
        """Waits until the process has sent `times` lines that begin with `word`; returns False if it ended before.

        Raises:
            ProcessTimeout: the timeout has passed.
        """
        end_s = time.monotonic() + WAIT_S
        while True:
            self.hear()
            if len(self.told(word)) >= times:
                return True
            if self.poll():
                self.hear()
                return len(self.told(word)) >= times
            if time.monotonic() > end_s:
                raise ProcessTimeout(
                    f"{self.job}: no {word!r} in {WAIT_S:g} s; at {self.stage}; last lines: {self.lines[-5:]}"
                )
            select.select([self._read], [], [], 0.2)

    def poll(self) -> bool:
        """Returns whether the process has ended."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = status
        return self.ended

    def wait(self) -> None:
        """Waits until the process ends.

        Raises:
            ProcessTimeout: the process has sent no line within the timeout.
        """
        told, end_s = -1, 0.0
        while not self.poll():
            self.hear()
            if len(self.lines) > told:
                told, end_s = len(self.lines), time.monotonic() + WAIT_S
            if time.monotonic() > end_s:
                raise ProcessTimeout(f"{self.job}: no line and no end of the process in {WAIT_S:g} s; at {self.stage}")
            select.select([self._read], [], [], 0.05)
        self.hear()

    def kill(self) -> None:
        """Kills the process by SIGKILL, and reads the lines that it has sent."""
        if not self.ended:
            os.kill(self.pid, signal.SIGKILL)
            while not self.poll():
                # Traced threads must be reaped one by one.
                for path in _tasks(self.pid):
                    with suppress(ChildProcessError):
                        os.waitpid(path, os.WNOHANG | WALL)
                time.sleep(0.0005)
        self.hear()

    def close(self) -> None:
        """Kills the process if it still runs, and closes its pipes."""
        with suppress(ChildProcessError, ProcessLookupError):
            self.kill()
        for descriptor in (self._read, self._go):
            with suppress(OSError):
                os.close(descriptor)

    def trace(self, others: "list[Process]") -> SyscallTrace:
        """Starts tracing the process while it waits for `go`. Also records the end of `others`."""
        known = {process.pid: process for process in others}

        def ended(pid: int, status: int) -> None:
            # An unknown id belongs to a thread that was killed before the tracer saw it.
            if pid in known:
                known[pid].status = status

        return SyscallTrace(self.pid, ended)

    def kill_at(self, calls: int, others: "list[Process]", until: Callable[[], bool] = lambda: False) -> int:
        """Lets the process continue, and kills it at the `calls`-th stop at a system call.

        Returns:
            The number of stops.

        Raises:
            ProcessTimeout: the timeout has passed.
        """
        with _Deadline(self):
            trace = self.trace(others)
            self.go()
            if trace.run(calls, until):
                trace.kill()
        self.status = trace.status
        self.hear()
        return trace.calls

    def freeze_at(self, calls: int) -> bool:
        """Lets the process continue, and stops it by SIGSTOP at the `calls`-th stop at a system call.

        Returns:
            False if the process ended before.

        Raises:
            ProcessTimeout: the timeout has passed.
        """
        with _Deadline(self):
            trace = self.trace([])
            self.go()
            frozen = trace.run(calls)
            if frozen:
                trace.freeze()
        self.status = trace.status
        self.hear()
        return frozen


def _tasks(pid: int) -> list[int]:
    try:
        return [int(path.name) for path in Path(f"/proc/{pid}/task").iterdir() if int(path.name) != pid]
    except OSError:
        return []


class _Deadline:
    """A context that raises `ProcessTimeout` in a call that blocks for longer than the timeout."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def __enter__(self) -> None:
        def late(*_: object) -> None:
            raise ProcessTimeout(f"{self._process.job}: traced for more than {WAIT_S:g} s; at {self._process.stage}")

        self._before = signal.signal(signal.SIGALRM, late)
        signal.setitimer(signal.ITIMER_REAL, WAIT_S)

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._before)


def _alone(supervisor: int, keep: set[int]) -> None:
    """Isolates the new process: closes all descriptors but `keep`, and ends the process with its supervisor."""
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:
        os._exit(0)
    # The process is ended by the supervisor, not by a Ctrl-C in the terminal.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        if number > 2 and number not in keep:
            with suppress(OSError):
                os.close(number)
    for name in list(os.environ):
        if name.startswith("MIZZEN_"):
            del os.environ[name]
    # Skips the search for a cloud's metadata server, which does not exist here.
    os.environ["MIZZEN_PLATFORM"] = "sigterm"
