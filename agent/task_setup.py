"""The setup script of a job: runs once on each machine, and shares its results with the job's other tasks there.

The job's first task on the machine runs the script, before its command. Then it adds the results to the working
directories of the other tasks: links to new files and folders, and copies of files that the script has changed. The
others wait for that before their commands. Like `agent.shim`, this uses only the standard library.
"""

import ctypes
import os
import resource
import signal
import time
from collections.abc import Mapping, Sequence
from typing import NoReturn

from agent.termination import SETUP

BEGUN_FILE = "begun"
CANNOT_RUN = 127
"""Exit code of a task whose command cannot be executed, as in shells."""
_NOT_BEGUN = b"-".ljust(32)
"""Content of `begun` until the command begins. The later content has the same size, so it needs no more disk space."""
_PR_SET_NAME = 15
_LOOK_S = 0.1
_PIECE_BYTES = 1 << 20
_CLOCK_S = 0.05
"""Tolerance for coarse file times: a file that the script changes at once may seem older than its start."""
_libc = ctypes.CDLL(None, use_errno=True)


def execute(argv: list[str], env: Mapping[str, str]) -> NoReturn:
    """Replaces this process with a command; if that is not possible, ends it."""
    try:
        os.execvpe(argv[0], argv, env)
    except BaseException as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        os.write(2, f"mizzen: cannot run {argv[0]!r}: {why}\n".encode())
    os._exit(CANNOT_RUN)


def open_begun(path: str) -> int:
    """Opens the file `begun`, and writes that the command has not begun."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    os.write(descriptor, _NOT_BEGUN)
    return descriptor


def open_awaited(path: str) -> int:
    """Opens the file `begun` of the task that runs the setup. It may not have been started yet."""
    return os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)


def begun_at_s(path: str) -> float | None:
    """Returns when the command began after its setup, in epoch seconds, from the file `begun`; None: not yet."""
    try:
        with open(path, "rb") as file:
            return _begun(file.read())
    except FileNotFoundError:
        return None


def _begun(text: bytes) -> float | None:
    return None if text.strip() in (b"", _NOT_BEGUN.strip()) else float(text)


def run_setup(argv: list[str], env: Mapping[str, str], shares: Sequence[str]) -> None:
    """Runs the setup command in the working directory, and shares its results with the folders `shares`.

    If the command fails, this process exits with the same status.
    """
    _libc.prctl(_PR_SET_NAME, SETUP.encode(), 0, 0, 0)
    began_s = time.time()
    pid = os.fork()
    if pid == 0:
        execute(argv, env)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code > 0:
        os._exit(code)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # A core dump of this process would say nothing.
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
        os._exit(CANNOT_RUN)
    for folder in shares:
        share(os.getcwd(), folder, began_s - _CLOCK_S)


def await_setup(awaited: int) -> None:
    """Waits until another task, whose file `begun` is given, has run the setup.

    If the setup fails, that task fails, and the agent stops this one.
    """
    while _begun(os.pread(awaited, len(_NOT_BEGUN), 0)) is None:
        time.sleep(_LOOK_S)


def mark_begun(begun: int) -> None:
    """Writes that the command begins now."""
    os.pwrite(begun, f"{time.time():.6f}".encode().ljust(len(_NOT_BEGUN)), 0)


def share(source: str, target: str, since_s: float) -> None:
    """Adds files that were made in `source` since a given time to `target`, which had the same files as `source`."""
    with os.scandir(source) as entries:
        for entry in entries:
            own = f"{target}/{entry.name}"
            if not os.path.lexists(own):
                os.symlink(entry.path, own)
            elif entry.is_dir(follow_symlinks=False) and not os.path.islink(own):
                share(entry.path, own, since_s)
            elif entry.is_file(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_ctime >= since_s:
                _copy(entry.path, own)


def _copy(source: str, target: str) -> None:
    with open(source, "rb") as old, open(target, "wb") as new:
        while piece := old.read(_PIECE_BYTES):
            new.write(piece)
        os.fchmod(new.fileno(), os.fstat(old.fileno()).st_mode & 0o7777)
