"""Processes that train, forked from the supervisor: how they are started, heard, killed and frozen.

They are forked, so a start takes milliseconds and not the seconds of imports; nothing else of the supervisor is used in
them. They die with it.
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

from bench.kill_training import Channel, Job, Place, train
from bench.ptrace import WALL, Trace

WAIT_S = 60.0
"""What takes longer hangs."""
_PDEATHSIG = 1


class Hangs(Exception):
    """A process does not do in time what it should."""


class Process:
    """One training process."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.lines: list[str] = []
        """What it has told."""
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
    def place(self) -> tuple[Place, bool]:
        """What it is, or was, at; and whether that was about the local root."""
        return Place(self._place[0]), bool(self._place[1])

    @property
    def ended(self) -> bool:
        """Whether it was seen to have ended."""
        return self.status is not None

    @property
    def killed(self) -> bool:
        """Whether it was ended by SIGKILL."""
        return self.status is not None and os.WIFSIGNALED(self.status) and os.WTERMSIG(self.status) == signal.SIGKILL

    def told(self, word: str) -> list[str]:
        """The rest of all lines that begin with `word`."""
        return [line[len(word) :].strip() for line in self.lines if line.split(" ", 1)[0] == word]

    def go(self) -> None:
        """The word to go on, which it waits for or will wait for."""
        with suppress(BrokenPipeError):
            os.write(self._go, b"g")

    def hear(self) -> None:
        """Take in what it has told up to now."""
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
        """Wait until it has told a line that begins with `word` so often; False: it ended before.

        Raises:
            Hangs: that takes too long.
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
                raise Hangs(f"{self.job}: no {word!r} in {WAIT_S:g} s; it is at {self.place}; told: {self.lines[-5:]}")
            select.select([self._read], [], [], 0.2)

    def poll(self) -> bool:
        """Whether it has ended."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = status
        return self.ended

    def wait(self) -> None:
        """Wait for its end.

        Raises:
            Hangs: it tells nothing for too long.
        """
        told, end_s = -1, 0.0
        while not self.poll():
            self.hear()
            if len(self.lines) > told:
                told, end_s = len(self.lines), time.monotonic() + WAIT_S
            if time.monotonic() > end_s:
                raise Hangs(f"{self.job}: neither ends nor says anything in {WAIT_S:g} s; it is at {self.place}")
            select.select([self._read], [], [], 0.05)
        self.hear()

    def kill(self) -> None:
        """SIGKILL, and take in what it told."""
        if not self.ended:
            os.kill(self.pid, signal.SIGKILL)
            while not self.poll():
                # Threads that are traced must be waited for, each by itself.
                for path in _tasks(self.pid):
                    with suppress(ChildProcessError):
                        os.waitpid(path, os.WNOHANG | WALL)
                time.sleep(0.0005)
        self.hear()

    def close(self) -> None:
        """Kill it if it lives, and forget it."""
        with suppress(ChildProcessError, ProcessLookupError):
            self.kill()
        for descriptor in (self._read, self._go):
            with suppress(OSError):
                os.close(descriptor)

    def trace(self, others: "list[Process]") -> Trace:
        """Seize it, while it waits for a word. The end of `others` is noted when it is seen."""
        known = {process.pid: process for process in others}

        def ended(pid: int, status: int) -> None:
            # Else it is a thread that was killed before it was seen.
            if pid in known:
                known[pid].status = status

        return Trace(self.pid, ended)

    def kill_at(self, calls: int, others: "list[Process]", until: Callable[[], bool] = lambda: False) -> int:
        """Give it a word, and kill it at the `calls`-th stop at a system call; how many stops there were.

        Raises:
            Hangs: that takes too long.
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
        """The same, but it is stopped by SIGSTOP; False: it ended before."""
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
    """Within it, what blocks for too long is interrupted."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def __enter__(self) -> None:
        def late(*_: object) -> None:
            raise Hangs(f"{self._process.job}: traced, at {self._process.place}, for {WAIT_S:g} s")

        self._before = signal.signal(signal.SIGALRM, late)
        signal.setitimer(signal.ITIMER_REAL, WAIT_S)

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._before)


def _alone(supervisor: int, keep: set[int]) -> None:
    """In the new process: nothing of the supervisor's but these descriptors, and no life without it."""
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:
        os._exit(0)
    # The supervisor decides when it ends, not the terminal.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        if number > 2 and number not in keep:
            with suppress(OSError):
                os.close(number)
    for name in list(os.environ):
        if name.startswith("MIZZEN_"):
            del os.environ[name]
    # No metadata server is looked for: there is none here.
    os.environ["MIZZEN_PLATFORM"] = "sigterm"
