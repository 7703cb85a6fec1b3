"""A running function of a script: the loops around its present line, its variables, and which of them are restored."""

import ast
import linecache
from collections.abc import Iterator, Sequence
from types import FrameType, GeneratorType
from typing import Any

from mizzen.checkpoint import loops
from mizzen.checkpoint.carried import bindings, name_of, root_of
from mizzen.checkpoint.restored_names import SELF, OwnAttributes, RestoredNames, Values, is_own, own_attributes

PASSING = ("enumerate", "tqdm", "zip", "islice", "iter")
"""Functions that yield items of an iterable."""
_MANY = 100
"""Lists with as many items are not looked into."""


class ScriptFrame:
    """A running function of the script."""

    def __init__(self, frame: FrameType, restored_at: int, values: Values) -> None:
        """`restored_at`: the line of the function that called `restore`, or 0."""
        self.file, self.line = frame.f_code.co_filename, frame.f_lineno
        self.values = values
        own = own_attributes(frame.f_locals)
        self.names = {**frame.f_globals, **frame.f_locals, **own}
        """The values of the variables, and of the attributes of `self` (see `own_attributes`)."""
        self.tree = OwnAttributes().visit(source(frame))
        around = [one for one in ast.walk(self.tree) if isinstance(one, ast.stmt) and contains(one, self.line)]
        functions = [one for one in around if isinstance(one, ast.FunctionDef)]
        function = max(functions, key=lambda one: one.lineno, default=None)
        self.body = function.body if function else self.tree.body
        self.given = (
            {one.arg for one in ast.walk(function.args) if isinstance(one, ast.arg)} if function else set[str]()
        )
        """The parameters."""
        found = [one for one in around if isinstance(one, ast.For | ast.While) and not repeats_line(one, restored_at)]
        first = self.body[0].lineno if self.body else 0
        self.loops = sorted((one for one in found if one.lineno >= first), key=lambda one: -one.lineno)
        """The loops that contain the line, the innermost first. A loop that also contains the call of `restore` is left
        out: each of its passes restores."""
        self.loaders = {name for name, value in self.names.items() if values.is_loader(value)}
        known = {name for name, value in self.names.items() if values.is_position(value)} | self.loaders
        known |= {name for name in self.names if name.removeprefix(SELF) in values.saved}
        if values.is_kept(frame.f_locals.get("self")):
            known |= own.keys()
        self._restored_at = restored_at
        self._kept = known
        """The variables that a restore sets, or whose content it sets."""
        restored = RestoredNames(self.tree, self.names, known, values)
        self.known, self.is_known, self.value = restored.known, restored.is_known, restored.value
        self.is_called = not restored_at
        """Whether the training calls this function again and again."""

    def is_kept(self, node: ast.AST) -> bool:
        """Return whether an expression is a tracked object or a part of one."""
        value = self.names.get(root_of(node)) if isinstance(node, ast.expr) else None
        return value is not None and (self.values.is_kept(value) or self.values.is_inside(value))

    def is_restored(self, node: ast.AST) -> bool:
        """Return whether an expression depends on the restored state, or is a tracked object or a part of one."""
        return self.is_kept(node) or self.is_known(node)

    def begins_restored(self, name: str, loop: ast.stmt) -> bool:
        """Return whether a variable has a restored value when a loop begins. What the loop assigns does not count."""
        if name not in self.known or is_own(name) or name in self.given or name in self._kept:
            return name in self.known
        local = [one for one in statements(self.body) if name in {part.id for part in _assigned(one)}]
        every = local or [one for one in statements(self.tree.body) if name in {part.id for part in _assigned(one)}]
        before = [one for one in every if one.lineno < loop.lineno]
        # An iterator of a tracked loader may be older than the restore, because it begins at its first item.
        if local and before and before[-1].lineno < self._restored_at and not hasattr(self.names[name], "__next__"):
            return False
        values = [one.value for one in before if isinstance(one, ast.Assign | ast.AnnAssign) and one.value]
        return len(values) < len(before) or not before or any(map(self.is_known, values))

    def is_saved(self, value: Any) -> bool:
        """Return whether a value is tracked, or has iterators of tracked loaders: their positions are saved."""
        if isinstance(value, GeneratorType) and value.gi_frame is not None:
            frame = value.gi_frame
            inner = {**frame.f_locals, **own_attributes(frame.f_locals)}.values()
            return any(isinstance(one, GeneratorType) and self.is_saved(one) for one in inner) or any(
                map(self.values.is_loader, inner)
            )
        if isinstance(value, list | tuple | dict) and 0 < len(value) < _MANY:
            return all(map(self.is_saved, value.values() if isinstance(value, dict) else value))
        return self.values.is_kept(value) or self.values.is_loader(value)


def statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements and those inside, without those of functions and classes."""
    for one in body:
        yield one
        if not isinstance(one, ast.FunctionDef | ast.ClassDef):
            for name in ("body", "orelse", "finalbody"):
                yield from statements(getattr(one, name, []))


def _assigned(one: ast.stmt) -> Iterator[ast.Name]:
    """Yield the names that a statement assigns, without those of the statements inside."""
    if isinstance(one, ast.For):
        yield from bindings(one.target)
    elif not isinstance(one, ast.While | ast.If | ast.With | ast.Try):
        yield from bindings(one)


def script_frames(before: dict[Any, int]) -> Iterator[FrameType]:
    """Yield the frames of the script, without those of libraries, up to the one that called `restore`.

    `before`: the code of the functions that were running then (`loops.Stack`).
    """
    for frame in loops.frames():
        if loops.is_of_library(frame.f_code.co_filename):
            return
        yield frame
        if frame.f_code in before:
            return


def source(frame: FrameType) -> ast.Module:
    """Return the source of the file of a frame."""
    return ast.parse("".join(linecache.getlines(frame.f_code.co_filename)))


def passed(node: ast.expr) -> Iterator[ast.expr]:
    """Yield the expressions of the iterables that a loop takes: `x` and `y` of `enumerate(zip(x, y))`."""
    if isinstance(node, ast.Call) and name_of(node) in PASSING:
        for argument in node.args:
            yield from passed(argument)
    else:
        yield node


def contains(one: ast.stmt | ast.expr, line: int) -> bool:
    """Return whether a statement or expression contains a line."""
    return one.lineno <= line <= (one.end_lineno or 0)


def repeats_line(loop: ast.For | ast.While, line: int) -> bool:
    """Return whether the body of a loop contains a line."""
    return loop.body[0].lineno <= line <= (loop.end_lineno or 0)
