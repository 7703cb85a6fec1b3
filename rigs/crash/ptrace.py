"""Stops a process between two of its system calls, by ptrace (Linux).

A process runs untraced until `SyscallTrace` seizes all its threads. From then on each thread stops at the entry and at
the exit of every system call; new threads are traced from their first instruction on. A thread that is killed at the
entry of a call has not executed it.
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


class SyscallTrace:
    """A tracer of all threads of one process, which keep running. It must be used by a single thread."""

    def __init__(self, pid: int, others: Callable[[int, int], None]) -> None:
        """Seizes the process. Calls `others(pid, status)` if another child of this process ends meanwhile.

        Raises:
            ProcessLookupError: the process does not exist.
            PermissionError: the system does not allow ptrace.
        """
        self.pid = pid
        self.calls = 0
        """Stops of all threads at system calls so far, entries and exits."""
        self.status: int | None = None
        """Exit status of the process from `waitpid`; None: it has not ended."""
        self._others = others
        self._stopped: set[int] = set()
        self._threads: set[int] = set()
        # A thread that starts meanwhile is traced if its parent is; otherwise the next listing contains it.
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
        """Runs the process to the `calls`-th stop from now on, or to the first stop at which `until()` returns True.

        The thread of that stop remains stopped.

        Returns:
            False if the process ended before.
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
        """Stops the process by SIGSTOP at its present point, and detaches from it."""
        for thread in list(self._threads - self._stopped):
            _ask(_INTERRUPT, thread)
        while self.status is None and self._threads - self._stopped:
            self._next()
        # A thread that was created just now is traced too, and would stay stopped forever without a detach.
        while self.status is None and self._unseen():
            self._next()
        # Send SIGSTOP only now: a thread that is stopped for delivery of this signal would lose it at the detach.
        os.kill(self.pid, signal.SIGSTOP)
        for thread in self._threads:
            _ask(_DETACH, thread)

    def _unseen(self) -> set[int]:
        """Returns the threads of the process whose first stop was not received yet."""
        try:
            tasks = {int(path.name) for path in Path(f"/proc/{self.pid}/task").iterdir()}
        except OSError:
            return set()
        return {task for task in tasks - self._stopped if _state(task) not in (None, "Z", "X")}

    def kill(self) -> None:
        """Kills the process by SIGKILL, and waits for its end."""
        os.kill(self.pid, signal.SIGKILL)
        while self.status is None:
            self._next()

    def _next(self) -> int | None:
        """Waits until a thread stops, and returns its id; None: a thread or another child has ended instead."""
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
        # Pass a pending signal on to the thread, but not the stops of ptrace itself.
        self._signal = 0 if self._call or status >> 16 else os.WSTOPSIG(status)
        return thread

    def _resume(self, thread: int) -> None:
        self._stopped.discard(thread)
        _ask(_SYSCALL, thread, self._signal)


def _ask(request: int, thread: int, data: int = 0) -> bool:
    """Calls ptrace, and returns whether it succeeded; False: the thread has ended, or was killed while stopped.

    Raises:
        PermissionError: the system does not allow ptrace.
    """
    if _libc.ptrace(request, thread, None, data) == 0:
        return True
    error = ctypes.get_errno()
    if error in (errno.EPERM, errno.EACCES) and _state(thread) not in (None, "Z", "X") and not _traced(thread):
        raise PermissionError(error, f"ptrace of {thread}: {os.strerror(error)}")
    return False


def _traced(thread: int) -> bool:
    """Returns whether this process traces a thread already, such as a new thread of a traced one."""
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
