"""The fork server: one process that has imported what the parts of the embedded stack import, and forks them.

Most of the CPU time of a start is for imports, which the parts have in common. Forked parts also share the memory of
what they import. `mizzen up` forks the server before it reads its settings and starts a thread, and imports nothing
more itself. The server has one thread and only forks. Each message on its socket (SOCK_SEQPACKET) requests one part, as
JSON, and carries file descriptors: a socket for this part, the part's log, and descriptors that the part inherits. The
server writes the part's pid to the part's socket, and later its exit code. The part starts when it has read `_GO` from
this socket. So if the supervisor has given up on the server, no second process of the part starts later.

Parts die with the server, and the server with its parent: the kernel sends signals (PR_SET_PDEATHSIG). If the server
does not respond, the supervisor starts new Python processes.
"""

import asyncio
import contextlib
import ctypes
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, BinaryIO, NoReturn

from infra import children, process_title
from infra.errors import StackError
from infra.memory import loading
from infra.process_exit import end_process
from infra.stack.leftovers import PartIdentity

_READY, _GO = b"r", b"+"
_MESSAGE_BYTES = 1 << 20
_DESCRIPTORS = 8
_READY_S = 60.0
"""Timeout for the imports."""
_ANSWER_S = 5.0
"""Timeout for the pid of a part. Meanwhile, the supervisor does nothing else."""
_TOLD_S = 1.0
"""How long the server may take to report an exit code."""
_UNKNOWN = -int(signal.SIGTERM)
"""The exit code of a part whose server has ended: the kernel has sent it this signal."""
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


class ForkedProcess:
    """A part that the server has forked. Has the methods of `subprocess.Popen` that the supervisor uses."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        """`connection`: the part's socket."""
        self.pid = pid
        self.returncode: int | None = None
        self._connection = connection
        self._identity = PartIdentity.of(pid)

    def poll(self) -> int | None:
        """Returns the exit code, as `subprocess.Popen` has it; None: the process runs."""
        return self._ended(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end, and returns the exit code.

        Raises:
            subprocess.TimeoutExpired: the process runs after `timeout` seconds.
        """
        deadline_s = None if timeout is None else time.monotonic() + timeout
        while True:
            left_s = 1.0 if deadline_s is None else deadline_s - time.monotonic()
            code = self._ended(max(0.0, min(left_s, 1.0)))
            if code is not None:
                return code
            if left_s <= 0:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)

    def send_signal(self, number: int) -> None:
        """Sends a signal, if the process runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Sends SIGKILL, if the process runs."""
        self.send_signal(signal.SIGKILL)

    def _ended(self, timeout_s: float) -> int | None:
        if self.returncode is not None:
            return self.returncode
        if _is_readable(self._connection, timeout_s) or (self._is_gone() and _is_readable(self._connection, _TOLD_S)):
            if said := _read(self._connection):
                self.returncode = int(said)
            elif self._is_gone():
                self.returncode = _UNKNOWN
            else:
                time.sleep(min(timeout_s, 0.05))  # The server has ended. The part is about to end.
        elif self._is_gone():
            self.returncode = _UNKNOWN  # The server is stopped.
        if self.returncode is not None:
            self._connection.close()
        return self.returncode

    def _is_gone(self) -> bool:
        return self._identity is None or PartIdentity.of(self.pid) != self._identity


class ForkServer:
    """The supervisor's end of the server."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._responds = False

    @classmethod
    def start(cls, module: str, imports: Sequence[str]) -> "ForkServer":
        """Forks the server. Call this from the main thread, which has to be the only one.

        Args:
            module: what parts run, like `python -m`.
            imports: the modules that the server imports.

        Raises:
            StackError: this machine starts no more processes.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            raise StackError(f"cannot start a process: {error.strerror}") from None
        if pid == 0:
            try:
                ours.close()
                _die_with(parent, signal.SIGKILL)
                os.setsid()  # A new session, so that Ctrl-C reaches only the supervisor.
                _Server(theirs, module).run(imports)
            finally:
                os._exit(1)
        theirs.close()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MESSAGE_BYTES)
        return cls(ours)

    async def ready(self) -> None:
        """Waits for the imports. If they fail or take a minute, the server is not used."""
        loop, told = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._connection, told.set)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_READY_S):
                    await told.wait()
        finally:
            loop.remove_reader(self._connection)
        self._responds = told.is_set() and self._connection.recv(1) == _READY

    def launch(
        self,
        arguments: Sequence[str],
        log: BinaryIO,
        environment: Mapping[str, str],
        inherited: Mapping[str, int],
        umask: int = -1,
    ) -> ForkedProcess | None:
        """Starts a part, in a session of its own. Returns None if the server does not respond.

        Args:
            arguments: of the module.
            log: standard output and standard error of the part.
            environment: of the part.
            inherited: descriptors that the part inherits. `environment` gets their numbers, by variable.
            umask: of the part; -1: that of the supervisor.
        """
        if not self._responds:
            return None
        body = {"arguments": arguments, "environment": {**environment}, "inherited": [*inherited], "umask": umask}
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                descriptors = [theirs.fileno(), log.fileno(), *inherited.values()]
                socket.send_fds(self._connection, [json.dumps(body).encode()], descriptors)
            if _is_readable(ours, _ANSWER_S) and (said := ours.recv(64)):
                ours.sendall(_GO)
                return ForkedProcess(int(said), ours)
        except OSError:  # The server has ended, or the environment is too large for a message.
            pass
        ours.close()
        self._responds = False
        return None

    def close(self) -> None:
        """Ends the server. Its parts get SIGTERM."""
        self._connection.close()


def _is_readable(connection: socket.socket, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def _read(connection: socket.socket) -> bytes:
    try:
        return connection.recv(64)
    except ConnectionResetError:  # The part was killed before it read `_GO`; what the server has sent comes next.
        return connection.recv(64)


class _Server:
    """The server itself, in its own process."""

    def __init__(self, requests: socket.socket, module: str) -> None:
        self._requests = requests
        self._module = module
        self._pid = os.getpid()
        self._parts: dict[int, socket.socket] = {}
        self._woken, self._waking = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        process_title.own_environment(dict(os.environ))
        self._room = process_title.room(with_environment=True)
        process_title.entitle(f"{' '.join(sys.orig_argv)} (fork server)", "mizzen-forks", self._room)

    def run(self, imports: Sequence[str]) -> None:
        """Imports the modules, and forks parts until the supervisor closes its socket."""
        with loading():
            for name in imports:
                import_module(name)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python loses a signal that arrives while it forks.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._waking, warn_on_full_buffer=False)
        self._requests.send(_READY)
        poll = select.poll()
        for descriptor in (self._requests.fileno(), self._woken):
            poll.register(descriptor, select.POLLIN)
        while True:
            found = {descriptor for descriptor, _ in poll.poll()}
            if self._woken in found:
                os.read(self._woken, 4096)
                self._bury()
            if self._requests.fileno() in found:
                message, descriptors, _, _ = socket.recv_fds(
                    self._requests, _MESSAGE_BYTES, _DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
                )
                if not message:
                    return
                self._fork(json.loads(message), descriptors)
                for descriptor in descriptors:
                    os.close(descriptor)

    def _bury(self) -> None:
        """Reports the exit codes of the parts that have ended."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0] != 0:
                with self._parts.pop(ended[0]) as part, contextlib.suppress(OSError):
                    part.send(str(os.waitstatus_to_exitcode(ended[1])).encode())

    def _fork(self, body: dict[str, Any], descriptors: list[int]) -> None:
        """Forks a part. If that fails, the supervisor sees its socket close."""
        if len(descriptors) != 2 + len(body["inherited"]):
            return  # Too many files are open.
        part = socket.socket(fileno=os.dup(descriptors[0]))
        try:
            pid = os.fork()
        except OSError:
            part.close()
            return
        if pid == 0:
            self._become_part(body, part, descriptors)
        self._parts[pid] = part
        with contextlib.suppress(OSError):  # The supervisor has given up.
            part.send(str(pid).encode())

    def _become_part(self, body: dict[str, Any], part: socket.socket, descriptors: list[int]) -> NoReturn:
        """Runs in the forked child: becomes what a new Python process of the part would be, and runs the part."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            _die_with(self._pid, signal.SIGTERM)
            for one in (self._requests, *self._parts.values()):
                one.close()
            if part.recv(1) != _GO:
                os._exit(1)
            part.close()
            os.setsid()
            nothing = os.open(os.devnull, os.O_RDWR)
            for old, new in ((nothing, 0), (descriptors[1], 1), (descriptors[1], 2)):
                os.dup2(old, new)
            for descriptor in (nothing, self._woken, self._waking, *descriptors[:2]):
                os.close(descriptor)
            if body["umask"] >= 0:
                os.umask(body["umask"])
            arguments, numbers = body["arguments"], map(str, descriptors[2:])
            process_title.own_environment({**body["environment"], **dict(zip(body["inherited"], numbers, strict=True))})
            command = children.python("-m", self._module, *arguments)
            process_title.entitle(" ".join(command), f"mizzen-{arguments[0]}", self._room)
            sys.argv = [self._module, *arguments]
            runpy.run_module(self._module, run_name="__main__", alter_sys=True)
            code = 0
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            end_process(code)


def _die_with(parent: int, number: int) -> None:
    """Makes the kernel send this process a signal when its parent dies."""
    _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:  # It has died before.
        os._exit(1)
