"""Stopping a process between two of its system calls, by ptrace (Linux).

A process runs untraced until `Trace` seizes all its threads. From then on each thread stops when it enters a system
call and when it comes back from it; new threads are traced from their first instruction on. Who is killed at an
entrance has not done that call.
"""

import ctypes
import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path

_SEIZE, _INTERRUPT, _SYSCALL, _DETACH = 0x4206, 0x4207, 24, 17
_SYSGOOD, _CLONE, _EXITKILL = 1, 8, 1 << 20
WALL = 0x40000000
_SYSCALL_STOP = signal.SIGTRAP | 0x80

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.restype = ctypes.c_long
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


class Trace:
    """All threads of one process, which this thread has seized and which go on at once. Used by one thread only."""

    def __init__(self, pid: int, others: Callable[[int, int], None]) -> None:
        """Seize it. `others(pid, status)` is told of the end of other children that is seen on the way.

        Raises:
            ProcessLookupError: it is gone.
            PermissionError: the system forbids it.
        """
        self.pid = pid
        self.calls = 0
        """Stops at system calls so far, entrances and returns, of all threads."""
        self.status: int | None = None
        """What `waitpid` gave for its end, once it has ended."""
        self._others = others
        self._stopped: set[int] = set()
        self._threads: set[int] = set()
        # A thread that starts meanwhile is that of one that is seized already, or shows up in the next look.
        gone: set[int] = set()
        while new := {int(path.name) for path in Path(f"/proc/{pid}/task").iterdir()} - self._threads - gone:
            for thread in new:
                if _ask(_SEIZE, thread, _SYSGOOD | _CLONE | _EXITKILL):
                    self._threads.add(thread)
                    _ask(_INTERRUPT, thread)
                elif _traced(thread):
                    self._threads.add(thread)
                else:
                    gone.add(thread)
        waiting = set(self._threads)
        while waiting and self.status is None:
            stopped = self._next()
            if stopped is not None:
                waiting.discard(stopped)
                self._resume(stopped)
            waiting &= self._threads

    def run(self, calls: int, until: Callable[[], bool] = lambda: False) -> bool:
        """Let it run to the `calls`-th stop from now on, or the first one at which `until()`; one thread stands there.

        Returns:
            False: it ended before.
        """
        end = self.calls + calls
        while self.status is None:
            thread = self._next()
            if thread is None:
                continue
            if self._call:
                self.calls += 1
                if self.calls >= end or until():
                    return True
            self._resume(thread)
        return False

    def freeze(self) -> None:
        """Stop the process by SIGSTOP where its threads are, and let go of it."""
        for thread in list(self._threads - self._stopped):
            _ask(_INTERRUPT, thread)
        while self.status is None and self._threads - self._stopped:
            self._next()
        # A thread that was made just now is traced too, and would stand for ever if nobody let go of it.
        while self.status is None and self._unseen():
            self._next()
        # Not before: one who stands at this very signal would lose it with the tracing.
        os.kill(self.pid, signal.SIGSTOP)
        for thread in self._threads:
            _ask(_DETACH, thread)

    def _unseen(self) -> set[int]:
        """Threads of the process whose first stop has not been seen yet."""
        try:
            tasks = {int(path.name) for path in Path(f"/proc/{self.pid}/task").iterdir()}
        except OSError:
            return set()
        return {task for task in tasks - self._stopped if _state(task) not in (None, "Z", "X")}

    def kill(self) -> None:
        """End it by SIGKILL, and see its end."""
        os.kill(self.pid, signal.SIGKILL)
        while self.status is None:
            self._next()

    def _next(self) -> int | None:
        """Wait for a thread to stop: which. None: it, or something else, has ended."""
        thread, status = os.waitpid(-1, WALL)
        if not os.WIFSTOPPED(status):
            if thread == self.pid:
                self.status = status
            elif thread not in self._threads:
                self._others(thread, status)
            self._threads.discard(thread)
            self._stopped.discard(thread)
            return None
        self._threads.add(thread)
        self._stopped.add(thread)
        self._call = os.WSTOPSIG(status) == _SYSCALL_STOP
        # A signal that is on its way to the thread is passed on; stops of the tracing itself are not.
        self._signal = 0 if self._call or status >> 16 else os.WSTOPSIG(status)
        return thread

    def _resume(self, thread: int) -> None:
        self._stopped.discard(thread)
        _ask(_SYSCALL, thread, self._signal)


def _ask(request: int, thread: int, data: int = 0) -> bool:
    """Whether it worked: a thread that is gone, or was killed while it stood, is no error.

    Raises:
        PermissionError: the system forbids it.
    """
    if _libc.ptrace(request, thread, None, data) == 0:
        return True
    error = ctypes.get_errno()
    if error in (errno.EPERM, errno.EACCES) and _state(thread) not in (None, "Z", "X") and not _traced(thread):
        raise PermissionError(error, f"ptrace of {thread}: {os.strerror(error)}")
    return False


def _traced(thread: int) -> bool:
    """Whether this process traces it already: a new thread comes with the one that made it."""
    return _status(thread, "TracerPid") == str(os.getpid())


def _state(thread: int) -> str | None:
    words = _status(thread, "State")
    return words[0] if words else None


def _status(thread: int, name: str) -> str | None:
    try:
        lines = Path(f"/proc/{thread}/status").read_text().splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(f"{name}:")), None)
