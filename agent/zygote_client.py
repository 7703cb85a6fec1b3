"""The agent's client of its zygote (`agent.zygote`): starts and replaces the zygote, and requests shims from it.

A zygote that has died or does not respond is replaced. This is always safe: a shim receives its launch only after it
has responded, and the run's folder ensures that only one shim starts the task (`agent.shim`).
"""

import atexit
import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGKILL
from typing import TypeVar

from agent import zygote
from agent.processes import ProcessIdentity

_SEND_S = 10.0
"""Timeout for sending a request to the zygote's socket while its buffer is full."""
_ANSWER_S = (10.0, 20.0, 40.0)
"""Timeouts from the request to the first response of the shim, for the first, second and third zygote that is tried."""
T = TypeVar("T")
_CODE = "import sys; sys.path.insert(0, sys.argv.pop(1)); from agent.zygote import main; main()"


class NoZygote(Exception):
    """No zygote has responded in time."""


def command() -> list[str]:
    """Returns the command that starts a zygote, without the site packages of the Python environment."""
    root = str(Path(zygote.__file__).parents[1])
    return [sys.executable, "-I", "-S", "-E", "-c", _CODE, root, zygote.TITLE_ROOM]


@dataclass(frozen=True)
class _Zygote:
    socket: socket.socket
    identity: ProcessIdentity
    sending: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def start(cls) -> "_Zygote":
        """Starts a zygote. A dedicated thread starts and reaps it, because it dies with the thread that started it."""
        started: Future[ProcessIdentity] = Future()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        threading.Thread(target=_keep, args=(theirs, started), name="zygote", daemon=True).start()
        try:
            identity = started.result()
        except BaseException:
            ours.close()
            raise
        ours.settimeout(_SEND_S)
        return cls(ours, identity)

    def ask(self, message: bytes, descriptors: list[int]) -> bool:
        """Requests a shim; returns False if the request cannot be sent."""
        with self.sending, contextlib.suppress(OSError):
            socket.send_fds(self.socket, [message], descriptors)
            return True
        return False

    def end(self) -> None:
        """Kills the zygote. Its shims continue."""
        self.identity.send(SIGKILL)
        with self.sending:
            self.socket.close()


def _keep(requests: socket.socket, started: Future[ProcessIdentity]) -> None:
    try:
        with requests:
            process = subprocess.Popen(command(), stdin=requests.fileno(), stdout=subprocess.DEVNULL, cwd="/", env={})
        started.set_result(ProcessIdentity.of(process.pid))
    except BaseException as error:
        started.set_exception(error)
    else:
        process.wait()


class _Starter:
    """Holds the process's zygote, at most one, which is created at the first start. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._zygote: _Zygote | None = None

    def start(self, ask: Callable[[_Zygote, float], T | None]) -> T:
        """Calls `ask` with a zygote and a timeout until it returns a result that is not None.

        Raises:
            NoZygote: no zygote responded.
        """
        for answer_s in _ANSWER_S:
            with self._lock:
                if self._zygote is None:
                    self._zygote = _Zygote.start()
                current = self._zygote
            found = ask(current, answer_s)
            if found is not None:
                return found
            with self._lock:
                if self._zygote is current:
                    self._zygote = None
                    current.end()
        waited = ", ".join(f"{answer_s:g}" for answer_s in _ANSWER_S)
        raise NoZygote(f"{len(_ANSWER_S)} zygotes did not respond (waited {waited} s)")

    def close(self) -> None:
        """Closes this process's end of the zygote's socket. The zygote exits once no process has that end open."""
        if self._zygote is not None:
            self._zygote.socket.close()


def _ask(asked: _Zygote, message: bytes, launch: bytes, complaints: int, answer_s: float) -> int | None:
    """Requests a shim and sends it the launch. Returns the errno that was reported, or 0 if there was no error.

    Returns None if no shim responded within `answer_s`. A shim that responds later does not get the launch.
    """
    with contextlib.ExitStack() as stack:
        theirs, giving = os.pipe()
        report, reporting = os.pipe()
        try:
            stack.callback(os.close, report)
            sending = stack.enter_context(open(giving, "wb", buffering=0))
            sent = asked.ask(message, [theirs, reporting, complaints])
        finally:
            os.close(theirs)
            os.close(reporting)
        if not sent or not _readable(report, answer_s):
            return None
        first = os.read(report, 1)
        if first == zygote.BEGUN:
            with contextlib.suppress(BrokenPipeError):  # The shim has died. The run's folder shows how far it got.
                left = memoryview(launch)
                while left:
                    left = left[sending.write(left) :]
            sending.close()
            return int(_rest(report) or b"0")
        return int(first + _rest(report)) if first else None


def _ask_session(
    asked: _Zygote, message: bytes, launch: bytes, complaints: int, answer_s: float
) -> socket.socket | None:
    """Requests the shim of a session and sends it the launch. Returns a socket to it; None: it did not respond."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    reading, giving = os.pipe()
    with open(giving, "wb", buffering=0) as sending:
        try:
            sent = asked.ask(message, [reading, theirs.fileno(), complaints])
        finally:
            os.close(reading)
            theirs.close()
        if sent and _readable(ours.fileno(), answer_s) and ours.recv(16) == zygote.BEGUN:
            with contextlib.suppress(BrokenPipeError):  # The shim has died, which the socket shows.
                left = memoryview(launch)
                while left:
                    left = left[sending.write(left) :]
            return ours
    ours.close()
    return None


def _readable(descriptor: int, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def _rest(descriptor: int) -> bytes:
    text = b""
    while more := os.read(descriptor, 16):
        text += more
    return text


_starter = _Starter()


def start_shim(folder: Path, launch: bytes, complaints: int, *, sandboxed: bool) -> int:
    """Starts the shim of the run in `folder` with `launch` (JSON). The shim writes its errors to the descriptor
    `complaints`. `sandboxed`: the launch has a sandbox.

    Returns when the shim has recorded the task, has refused it, or has ended. Returns the errno of the system call that
    failed, or 0. Thread-safe.

    Raises:
        NoZygote: no shim was started, and none will be.
        OSError: this process has too many open files, or cannot start another process.
    """
    message = _request(folder, sandboxed=sandboxed)
    return _starter.start(lambda asked, answer_s: _ask(asked, message, launch, complaints, answer_s))


def start_session(folder: Path, launch: bytes, complaints: int, *, sandboxed: bool) -> socket.socket:
    """Starts the shim of a session in the task of the run in `folder` (`agent.sessions.session_shim`).

    Returns the socket (SOCK_SEQPACKET) to the shim, which ends the session when the socket is closed. Parameters and
    errors are those of `start_shim`.
    """
    message = _request(folder, sandboxed=sandboxed)
    return _starter.start(lambda asked, answer_s: _ask_session(asked, message, launch, complaints, answer_s))


def _request(folder: Path, *, sandboxed: bool) -> bytes:
    return (zygote.SANDBOXED if sandboxed else zygote.PLAIN) + os.fsencode(folder)


def _forget() -> None:
    """Resets `_starter` in a forked child, because the zygote belongs to the parent."""
    global _starter
    _starter.close()
    _starter = _Starter()


os.register_at_fork(after_in_child=_forget)
atexit.register(lambda: _starter.close())
