"""The zygote: one small process for each agent, from which the shims of its tasks are forked.

A shim that is a fresh interpreter costs more CPU than all the rest of a short task. The zygote has imported everything,
has one thread and does nothing but fork. The agent starts it with `agent.starting.command`: an empty environment, the
folder `/`, and a socket (SOCK_SEQPACKET) as its standard input. Each message on the socket asks for one shim: the run's
folder, with three file descriptors.

- A pipe with the launch as JSON. Only the shim reads it, so no secret ever is in the zygote's memory.
- A pipe to report on. The shim writes `BEGUN` first; the agent writes the launch only then. So a shim that the agent no
  longer waits for finds no launch, and ends. The shim closes the pipe when the task is recorded, and writes the errno
  of a failed system call before. If there is no shim, the zygote writes the errno of the fork.
- The file for the shim's complaints.

A shim has a session of its own and outlives the zygote, which ends with its agent: the socket is closed then, and the
kernel kills a zygote that is stopped by a signal. Standard library only.
"""

import contextlib
import ctypes
import gc
import json
import os
import signal
import socket
import sys
from typing import Any, NoReturn

from agent import shim

BEGUN = b"+"
TITLE_ROOM = " " * 1024
"""The last argument of the zygote's command: room for the titles of its shims."""
_MESSAGE_BYTES = 8192
_DESCRIPTORS = 3
_PR_SET_NAME = 15
_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Fork shims until the agent closes the socket. Blocks."""
    shim.die_with_parent()
    os.setsid()  # A Ctrl-C is for the agent.
    room = _title_room()
    _entitle(f"mizzen zygote of agent {os.getppid()}", "mizzen-zygote", room)
    shim.boot_id()  # Read once for all shims.
    requests = socket.socket(fileno=0)
    signal.signal(signal.SIGCHLD, _bury)
    gc.collect()
    gc.freeze()  # What is never looked at is never copied.
    while True:
        folder, descriptors, _, _ = socket.recv_fds(requests, _MESSAGE_BYTES, _DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        if not folder:
            return
        if len(descriptors) == _DESCRIPTORS:  # Fewer: too many files are open. The agent sees its pipes close.
            launch, report, complaints = descriptors
            _fork(os.fsdecode(folder), launch, report, complaints, room)
        for descriptor in descriptors:
            os.close(descriptor)


def _fork(folder: str, launch: int, report: int, complaints: int, room: tuple[int, int]) -> None:
    try:
        pid = os.fork()
    except OSError as error:
        os.write(complaints, f"cannot fork: {error}\n".encode())
        with contextlib.suppress(BrokenPipeError):  # The agent has ended.
            os.write(report, str(error.errno).encode())
        return
    if pid == 0:
        _become_shim(folder, launch, report, complaints, room)


def _become_shim(folder: str, launch: int, report: int, complaints: int, room: tuple[int, int]) -> NoReturn:
    """In the forked child: leave the agent's session, take the launch, and be the shim of the run in `folder`."""
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        os.dup2(complaints, 2)
        os.close(complaints)
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        os.dup2(nothing, 0)
        os.close(nothing)
        _entitle(f"mizzen shim {folder}", "mizzen-shim", room)
        with contextlib.suppress(BrokenPipeError):  # Then there is no launch, either.
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


def _bury(*_: object) -> None:
    """On SIGCHLD: reap the shims that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0] != 0:
            pass


def _title_room() -> tuple[int, int]:
    """First address of this process's command line and the one after its last; both 0: the kernel does not say."""
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    return int(fields[45]), int(fields[46])


def _entitle(title: str, name: str, room: tuple[int, int]) -> None:
    """Show `title` as this process's command line, and `name` (15 bytes at most) as its name.

    The end of a title that is too long is shown: there the name of the run is.
    """
    _libc.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
    size = room[1] - room[0] - 1
    if size > 0:
        ctypes.memmove(room[0], os.fsencode(title)[-size:].ljust(size + 1, b"\0"), size + 1)
