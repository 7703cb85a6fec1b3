"""What attacks have in common: how they try things, and what they got."""

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

Targets = dict[str, Any]


class Blocked(Exception):
    """The attack did not succeed."""


def succeeding(calls: dict[str, Callable[[], object]]) -> list[str]:
    """Returns the names of the calls that raise no error, each in a process of its own."""
    found = []
    for name, call in calls.items():
        pid = os.fork()
        if pid == 0:
            try:
                call()
            except BaseException:
                os._exit(1)
            os._exit(0)
        if os.waitpid(pid, 0)[1] == 0:
            found.append(name)
    return found


def fork_with(pid: int) -> int:
    """Returns the result of a call that forks, and ends the child."""
    if pid == 0:
        os._exit(0)
    return pid


def check(result: int) -> int:
    """Returns the result of a call of C; raises OSError if it is negative."""
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def readable(paths: list[Path]) -> str:
    """Returns which files and folders can be read; raises `Blocked` if none can."""
    found, errors = [], []
    for path in paths:
        try:
            if path.is_dir():
                found.append(f"{path}: {[one.name for one in path.iterdir()]}")
            else:
                with path.open("rb") as file:
                    found.append(f"{path}: {len(file.read(100))} bytes")
        except OSError as error:
            errors.append(f"{path.name}: {error.strerror}")
    return some(found, "; ".join(errors))


def some(found: list[Any], otherwise: str) -> str:
    """Returns what was found; raises `Blocked` with `otherwise` if that is nothing."""
    if not found:
        raise Blocked(otherwise)
    return str(found)
