"""The agent's side of its zygote (`agent.zygote`): having one that answers, and asking it for shims.

A zygote that has died or does not answer is replaced. That is always safe: a shim gets its launch only after it has
answered, and the run's folder decides whether it may start the task (`agent.shim`).
"""

import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGKILL

from agent import zygote
from agent.processes import Identity

_SEND_S = 10.0
"""How long a zygote may leave no room for another request."""
_ANSWER_S = (10.0, 20.0, 40.0)
"""How long a shim may take from the request to its first sign: of the first zygote that is tried, the second, ..."""
_CODE = "import sys; sys.path.insert(0, sys.argv.pop(1)); from agent.zygote import main; main()"


class NoZygote(Exception):
    """No zygote has answered."""


def command() -> list[str]:
    """The command that starts a zygote. It sees nothing of the environment's packages."""
    root = str(Path(zygote.__file__).parents[1])
    return [sys.executable, "-I", "-S", "-E", "-c", _CODE, root, zygote.TITLE_ROOM]


@dataclass(frozen=True)
class _Zygote:
    socket: socket.socket
    identity: Identity
    sending: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def start(cls) -> "_Zygote":
        """A new one. It is started and reaped by a thread of its own: it dies with the thread that started it."""
        started: Future[Identity] = Future()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        threading.Thread(target=_keep, args=(theirs, started), name="zygote", daemon=True).start()
        try:
            identity = started.result()
        except BaseException:
            ours.close()
            raise
        ours.settimeout(_SEND_S)
        return cls(ours, identity)

    def ask(self, folder: Path, descriptors: list[int]) -> bool:
        """Ask for a shim; False: it does not take requests."""
        with self.sending, contextlib.suppress(OSError):
            socket.send_fds(self.socket, [os.fsencode(folder)], descriptors)
            return True
        return False

    def end(self) -> None:
        """Kill it. Its shims go on."""
        self.identity.send(SIGKILL)
        with self.sending:
            self.socket.close()


def _keep(requests: socket.socket, started: Future[Identity]) -> None:
    try:
        with requests:
            process = subprocess.Popen(command(), stdin=requests.fileno(), stdout=subprocess.DEVNULL, cwd="/", env={})
        started.set_result(Identity.of(process.pid))
    except BaseException as error:
        started.set_exception(error)
    else:
        process.wait()


class _Starter:
    """What a process has of zygotes: one at most, made at the first start. Any thread may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._zygote: _Zygote | None = None

    def start(self, folder: Path, launch: bytes, complaints: int) -> int:
        """See `start_shim`."""
        for answer_s in _ANSWER_S:
            with self._lock:
                if self._zygote is None:
                    self._zygote = _Zygote.start()
                current = self._zygote
            reported = _ask(current, folder, launch, complaints, answer_s)
            if reported is not None:
                return reported
            with self._lock:
                if self._zygote is current:
                    self._zygote = None
                    current.end()
        waited = ", ".join(f"{answer_s:g}" for answer_s in _ANSWER_S)
        raise NoZygote(f"{len(_ANSWER_S)} zygotes did not answer (waited {waited} s)")


def _ask(asked: _Zygote, folder: Path, launch: bytes, complaints: int, answer_s: float) -> int | None:
    """The errno that was reported, or 0; None: no shim began, and none that begins later gets the launch."""
    with contextlib.ExitStack() as stack:
        theirs, giving = os.pipe()
        report, reporting = os.pipe()
        try:
            stack.callback(os.close, report)
            sending = stack.enter_context(open(giving, "wb", buffering=0))
            sent = asked.ask(folder, [theirs, reporting, complaints])
        finally:
            os.close(theirs)
            os.close(reporting)
        if not sent or not _readable(report, answer_s):
            return None
        first = os.read(report, 1)
        if first == zygote.BEGUN:
            with contextlib.suppress(BrokenPipeError):  # It has died: what its folder says counts.
                left = memoryview(launch)
                while left:
                    left = left[sending.write(left) :]
            sending.close()
            return int(_rest(report) or b"0")
        return int(first + _rest(report)) if first else None


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


def start_shim(folder: Path, launch: bytes, complaints: int) -> int:
    """Start the shim of the run in `folder` and give it `launch` (JSON); it prints to the descriptor `complaints`.

    Returns when the shim has recorded the task, has refused, or is gone: the errno of the system call that failed,
    or 0. Several threads may do so at once.

    Raises:
        NoZygote: no shim began; none will.
        OSError: this process has too many open files, or cannot start another process.
    """
    return _starter.start(folder, launch, complaints)


def _forget() -> None:
    """In a forked child: the zygote is its parent's."""
    global _starter
    _starter = _Starter()


os.register_at_fork(after_in_child=_forget)
