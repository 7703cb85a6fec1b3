"""The zygote: one small process per agent that forks the shims of the agent's tasks.

Starting a new Python interpreter for each shim would cost more CPU than the rest of a short task. The zygote has
imported all modules, has one thread and only forks. The agent starts it with `agent.zygote_client.command`, an empty
environment, the working directory `/`, and a socket (SOCK_SEQPACKET) as standard input. Each message on the socket
requests one shim. It contains `SANDBOXED` or `PLAIN`, the run's folder, and three file descriptors:

- A pipe that carries the launch as JSON. Only the shim reads it, so no secret is ever in the zygote's memory.
- A pipe for the response. The shim first writes `BEGUN`; the agent writes the launch only after that. So if the agent
  has given up on a shim, the shim reads no launch and exits. The shim closes the pipe when the task is recorded. If a
  system call fails before that, the shim writes its errno first. If the fork fails, the zygote writes the errno.
- The file for the shim's error output.

A shim has its own session and outlives the zygote. The zygote ends with its agent: it exits when the socket is closed,
and the kernel kills it if it is stopped by a signal at that time.

Requests for sandboxes are passed on to a zygote of the attempt, which has a scope of its own (`agent.landlock`) and
listens on `private/zygote` in the attempt's folder. It outlives the agent, so that the next agent's requests find it,
and ends with the last of its shims. Uses the standard library only.
"""

import contextlib
import ctypes
import gc
import json
import os
import select
import signal
import socket
import sys
from typing import Any, NoReturn

from agent import seccomp, shim
from agent.landlock import enter_scope
from infra import process_title
from infra.process_title import entitle

BEGUN = b"+"
SANDBOXED, PLAIN = b"s", b"-"
TITLE_ROOM = " " * 1024
"""The last argument of the zygote's command. It reserves space in the command line for the process titles of shims."""
_MESSAGE_BYTES = 8192
_DESCRIPTORS = 3
_IDLE_MS = 60_000
"""An attempt's zygote ends after it has had no shim for this time."""
_PR_SET_CHILD_SUBREAPER = 36
_own: list[int] = []
"""Descriptors that shims must close: while a shim has them open, the zygote seems to listen."""
_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Forks shims until the agent closes the socket. Blocks."""
    shim.die_with_parent()
    os.setsid()  # A new session, so that Ctrl-C reaches only the agent.
    room = process_title.room()
    entitle(f"mizzen zygote of agent {os.getppid()}", "mizzen-zygote", room)
    shim.boot_id()  # Cached here once for all shims, and so is the filter.
    seccomp.prepare()
    requests = socket.socket(fileno=0)
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # Adopts the shims that continue in a PID namespace.
    signal.signal(signal.SIGCHLD, _bury)
    gc.collect()
    gc.freeze()  # The collector then does not write to shared pages, which would copy them in each fork.
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, _MESSAGE_BYTES, _DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        if not message:
            return
        # Fewer descriptors arrive if too many files are open. The agent then sees its pipes close.
        if len(descriptors) == _DESCRIPTORS:
            if message.startswith(SANDBOXED):
                _pass_on(message, descriptors, room)
            else:
                _fork(os.fsdecode(message[1:]), descriptors, room)
        for descriptor in descriptors:
            os.close(descriptor)


def _pass_on(message: bytes, descriptors: list[int], room: tuple[int, int]) -> None:
    """Sends a request to the zygote of the attempt, and starts it if there is none."""
    private = os.path.join(os.path.dirname(os.fsdecode(message[1:])), "private")
    try:
        os.makedirs(private, mode=0o700, exist_ok=True)
        folder = os.open(private, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            path = f"/proc/self/fd/{folder}/zygote"  # Paths of sockets have at most 107 bytes.
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
                try:
                    client.connect(path)
                except OSError:
                    _start_for_attempt(path, private, descriptors, room)
                    client.connect(path)
                socket.send_fds(client, [message], descriptors)
        finally:
            os.close(folder)
    except OSError as error:
        _refuse(error, descriptors)


def _start_for_attempt(path: str, private: str, descriptors: list[int], room: tuple[int, int]) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # The socket of a killed zygote.
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(path)
        listening.listen(128)
        if os.fork() == 0:
            code = 1
            try:
                # The descriptors of the request. The agent waits until they are closed in every process.
                for descriptor in descriptors:
                    os.close(descriptor)
                _serve_attempt(listening, private, room)
                code = 0
            finally:
                os._exit(code)


def _serve_attempt(listening: socket.socket, private: str, room: tuple[int, int]) -> None:
    """Runs the zygote of an attempt, which starts shims until the last one has ended."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for standard in (0, 2):  # The agent's socket, and its log.
        os.dup2(nothing, standard)
    entitle(f"mizzen zygote of {private}", "mizzen-attempt", room)
    enter_scope()
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    ended, ending = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(ending, warn_on_full_buffer=False)
    _own[:] = [listening.fileno(), ended, ending]
    poll = select.poll()
    for descriptor in (listening.fileno(), ended):
        poll.register(descriptor, select.POLLIN)
    while True:
        found = {descriptor for descriptor, _ in poll.poll(_IDLE_MS)}
        if listening.fileno() in found:
            with listening.accept()[0] as client:
                message, descriptors, _, _ = socket.recv_fds(
                    client, _MESSAGE_BYTES, _DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
                )
            if len(descriptors) == _DESCRIPTORS:
                _fork(os.fsdecode(message[1:]), descriptors, room)
            for descriptor in descriptors:
                os.close(descriptor)
            continue
        with contextlib.suppress(BlockingIOError):
            os.read(ended, 4096)
        if not _bury():
            return


def _fork(folder: str, descriptors: list[int], room: tuple[int, int]) -> None:
    try:
        pid = os.fork()
    except OSError as error:
        _refuse(error, descriptors)
        return
    if pid == 0:
        launch, report, complaints = descriptors
        _become_shim(folder, launch, report, complaints, room)


def _refuse(error: OSError, descriptors: list[int]) -> None:
    """Reports that no shim was started."""
    _, report, complaints = descriptors
    os.write(complaints, f"cannot start a shim: {error}\n".encode())
    with contextlib.suppress(BrokenPipeError):  # The agent has ended.
        os.write(report, str(error.errno or 0).encode())


def _become_shim(folder: str, launch: int, report: int, complaints: int, room: tuple[int, int]) -> NoReturn:
    """Runs in the forked child: makes a new session, reads the launch and runs the shim of the run in `folder`."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        for descriptor in _own:
            os.close(descriptor)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        os.dup2(complaints, 2)
        os.close(complaints)
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        os.dup2(nothing, 0)
        os.close(nothing)
        entitle(f"mizzen shim {folder}", "mizzen-shim", room)
        with contextlib.suppress(BrokenPipeError):  # The agent has given up; the launch is then empty, too.
            os.write(report, BEGUN)
        body = _read_launch(launch)
        if body is not None:
            shim.main(folder, body, report)
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    os._exit(code)


def _read_launch(descriptor: int) -> dict[str, Any] | None:
    with open(descriptor, "rb") as file:
        text = file.read()
    if not text:
        return None
    body: dict[str, Any] = json.loads(text)
    return body


def _bury(*_: object) -> bool:
    """Handles SIGCHLD: reaps shims that have ended. Returns whether any shim is left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0] != 0:
            pass
    except ChildProcessError:
        return False
    return True
