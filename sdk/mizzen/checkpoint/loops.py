"""Analyses the source of the loops that call the SDK, and tells the files of a script from those of libraries."""

import ast
import linecache
import os
import re
import sys
from collections.abc import Iterator
from functools import cache
from types import CodeType, FrameType
from typing import TypeAlias

Stack: TypeAlias = list[tuple[CodeType, int]]
"""The functions of a script that are running, the innermost first, each with its current line."""

_PACKAGES = re.compile(r"[\\/](site|dist)-packages[\\/]")
"""Also the folders of a user (`pip install --user`), or of a distribution of Linux."""


@cache
def _folders() -> tuple[str, ...]:
    import sysconfig  # Not at the start: few scripts need it there.

    return tuple(sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "purelib", "platlib"))


def is_of_library(file: str) -> bool:
    """Return whether a source file belongs to an installed library or to Python, and not to the script."""
    return file.startswith(_folders()) or _PACKAGES.search(file) is not None


def stack() -> Stack:
    """Return the functions of the script that are running."""
    return [(frame.f_code, frame.f_lineno) for frame in frames()]


def text(of: Stack, restored: Stack) -> str:
    """Return the lines that a script executes, from the innermost function to the one that called `restore`."""
    callers, lines = {code for code, _ in restored}, []
    for code, line in of:
        lines.append(f"{code.co_name}: {linecache.getline(code.co_filename, line).strip()}")
        if code in callers:
            break
    return "; ".join(lines)


def share_loop(one: Stack, other: Stack, apart: Stack) -> bool:
    """Return whether two lines are executed in one loop, which does not contain the line of `apart`.

    False without the source.
    """
    others, aparts = dict(other), dict(apart)
    for code, line in one:
        if code in others and line != aparts.get(code):
            inner = [loop for loop in _loops(code, line) if _contains(loop, others[code])]
            if any(not _contains(loop, aparts.get(code, 0)) for loop in inner):
                return True
    return False


def frames() -> Iterator[FrameType]:
    """Yield the frames of the script, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not str(frame.f_globals.get("__name__", "")).startswith("mizzen."):
            yield frame
        frame = frame.f_back


def _loops(code: CodeType, line: int) -> list[ast.For | ast.While]:
    """Return the loops of a function that contain a line of it, the innermost first."""
    try:
        tree = ast.parse("".join(linecache.getlines(code.co_filename)))
    except (SyntaxError, ValueError):
        return []
    found = [one for one in ast.walk(tree) if isinstance(one, ast.For | ast.While) and _contains(one, line)]
    return sorted(found, key=lambda one: one.lineno, reverse=True)


def _contains(loop: ast.For | ast.While, line: int) -> bool:
    return loop.lineno <= line <= (loop.end_lineno or 0)
