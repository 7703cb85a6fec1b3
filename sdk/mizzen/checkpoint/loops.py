"""Analyses the source of the loops that call the SDK, to find out what a restart would repeat."""

import ast
import linecache
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, TypeAlias

Stack: TypeAlias = list[tuple[CodeType, int]]
"""The functions of a script that are running, the innermost first, each with its current line."""

_PASSING = ("enumerate", "tqdm", "zip")
"""Functions that yield all items of an iterable."""
_ORDERED = (ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.NotEq)


def begins_again(is_loader: Callable[[Any], bool]) -> bool:
    """Return whether the running loop over a loader seems to process all of its batches, from the first one on.

    False if the loop may skip batches after a restart, for example with `continue` or `islice`, or without its source.
    """
    for frame in _frames():
        for loop in _loops(frame.f_code, frame.f_lineno):
            names = {**frame.f_globals, **frame.f_locals}
            if isinstance(loop, ast.For) and any(is_loader(_value(passed, names)) for passed in _passed(loop.iter)):
                return not _may_skip(loop)
    return False


def stack() -> Stack:
    """Return the functions of the script that are running."""
    return [(frame.f_code, frame.f_lineno) for frame in _frames()]


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


def _frames() -> Iterator[FrameType]:
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


def _passed(node: ast.expr) -> Iterator[ast.expr]:
    """Yield the expressions of the iterables that a loop takes entirely: `x` and `y` of `enumerate(zip(x, y))`."""
    if not isinstance(node, ast.Call):
        yield node
        return
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name in _PASSING:
        for argument in node.args:
            yield from _passed(argument)


def _value(node: ast.expr, names: dict[str, Any]) -> Any:
    """Return the value of a name, or of an attribute of it; None for other expressions."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        return getattr(_value(node.value, names), node.attr, None)
    return None


def _may_skip(loop: ast.For) -> bool:
    """Return whether a loop may pass over batches, by `continue` or by a comparison of sizes, as of a counter."""
    for node in ast.walk(loop):
        if isinstance(node, ast.Continue):
            return True
        if isinstance(node, ast.Compare) and any(isinstance(one, _ORDERED) for one in node.ops):
            return True
    return False
