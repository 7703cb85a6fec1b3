"""The title of a process: what `ps` and `/proc/PID/cmdline` show. Uses the standard library only."""

import ctypes
import os

_PR_SET_NAME = 15
_ARGUMENTS, _ENVIRONMENT = slice(45, 47), slice(47, 49)
"""Where `/proc/PID/stat` has the addresses, counted from the field after the name."""
_libc = ctypes.CDLL(None, use_errno=True)


def room(*, with_environment: bool = False) -> tuple[int, int]:
    """Returns the start and end address of the memory for a title; both are 0 if the kernel hides them.

    It is the memory of this process's command line. `with_environment`: and of the environment behind it, which nothing
    may refer to any more (`own_environment`).
    """
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    start, end = (int(field) for field in fields[_ARGUMENTS])
    first, last = (int(field) for field in fields[_ENVIRONMENT])
    return start, last if with_environment and end == first <= last else end


def own_environment(environment: dict[str, str]) -> None:
    """Sets this process's environment, so that nothing of it is in the memory that the process was started with."""
    os.environ.clear()
    os.environ.update(environment)


def entitle(title: str, name: str, room: tuple[int, int]) -> None:
    """Sets this process's command line to `title` and its name to `name` (at most 15 bytes).

    If `title` is too long, its end is kept, because it contains the run's name, or the path of the settings.
    """
    _libc.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
    size = room[1] - room[0] - 1
    if size > 0:
        ctypes.memmove(room[0], os.fsencode(title)[-size:].ljust(size + 1, b"\0"), size + 1)
