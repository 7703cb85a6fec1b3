"""Finds what a loop changes in place or by calls: objects, tensors, and global variables of a script's functions.

`carried` finds the variables that the loop itself assigns. Here are those that a pass reads as the pass before has left
them, but that only a method, a function, a closure or an in-place operation changes: `meter.update(x)`, `bank.mul_(x)`,
`bank[at] = x`, `config.rate *= 0.9`, or `global calls; calls += 1` in a function.
"""

import ast
from collections.abc import Iterator, Sequence
from types import FunctionType, ModuleType
from typing import Any

from mizzen.checkpoint import loops, rng
from mizzen.checkpoint.carried import (
    MUTATING,
    is_in_place,
    name_of,
    names_in,
    place_of,
    read_first,
    root_of,
    taken_by,
    variable,
)
from mizzen.checkpoint.own_names import is_of_script
from mizzen.checkpoint.restored_names import SELF, is_own
from mizzen.checkpoint.script_frames import ScriptFrame, contains, statements
from mizzen.checkpoint.uses import SHARED, Call

_RESETTING = ("clear", "reset", "copy_", "zero_", "fill_", "uniform_", "normal_")
"""Methods after which an object has no history."""


_COPYING = ("load_state_dict", "copy_")
_TENSORS = ("parameters", "named_parameters", "buffers", "state_dict", "items", "values")
_LOOPS = (ast.For, ast.comprehension)


class InPlaceChanges:
    """The changes by the loops of one function of a script."""

    def __init__(self, frame: ScriptFrame) -> None:
        """Finds nothing yet."""
        self._frame = frame
        self._running = {one.f_code.co_firstlineno for one in loops.frames() if one.f_code.co_filename == frame.file}
        self._begun = set[str]()
        self._changed: dict[str, set[str]] = {}
        self._methods: dict[tuple[str, str], ast.FunctionDef] = {}
        self._functions: dict[str, ast.FunctionDef] = {}
        inner = set[ast.AST]()
        for one in ast.walk(frame.tree):
            if isinstance(one, ast.ClassDef):
                inner |= {*one.body}
                self._methods |= {(one.name, part.name): part for part in one.body if isinstance(part, ast.FunctionDef)}
            elif isinstance(one, ast.FunctionDef) and one not in inner:
                self._functions.setdefault(one.name, one)

    def of(self, loop: ast.For | ast.While) -> set[str]:
        """Return the names whose objects a pass of a loop changes and uses as the pass before has left them."""
        self._begun = {one for one in self._set_before(loop) if not self._frame.is_saved(self._frame.names.get(one))}
        found = self._in(loop.body, (), None) - self._begun
        found = {one for one in found if not isinstance(self._frame.names.get(one), ModuleType)}
        return found - names_in(loop, ast.Store) - {"self"} | {one for one in found if is_own(one)}

    def _set_before(self, loop: ast.For | ast.While) -> Iterator[str]:
        """Yield the names of objects that get restored values before a loop, so that they begin where they ended.

        What a function changes together with such an object counts as set, too.
        """
        for one in (part for part in statements(self._frame.body) if part.lineno < loop.lineno):
            if isinstance(one, ast.Assign) and self._frame.is_known(one.value):
                yield from (root_of(target) for target in one.targets if not isinstance(target, ast.Name))
            call = one.value if isinstance(one, ast.Expr) else None
            if isinstance(call, ast.Call) and any(map(self._frame.is_known, call.args)):
                yield root_of(call.func)

    def cleared(self, body: Sequence[ast.stmt]) -> Iterator[str]:
        """Yield the names of objects that are cleared or filled in each pass, or whenever a step is saved."""
        for one in body:
            if isinstance(one, ast.Expr) and isinstance(call := one.value, ast.Call) and name_of(call) in _RESETTING:
                yield ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
            elif isinstance(one, ast.Delete):
                yield from (root_of(target) for target in one.targets if isinstance(target, ast.Subscript))
            elif isinstance(one, ast.If | ast.For | ast.While | ast.With | ast.Try) and contains(one, self._frame.line):
                yield from self.cleared(one.body)

    def unchanged(self) -> dict[str, set[str]]:
        """Return the attributes of the objects that no loop changes, as `self.x`, by the name of the object."""
        return {
            name: {f"{SELF}{one}" for one in vars(value)} - changed
            for name, changed in self._changed.items()
            if isinstance(getattr(value := self._frame.names.get(name), "__dict__", None), dict)
        }

    def _in(self, body: Sequence[ast.stmt], path: tuple[ast.AST, ...], owner: Any) -> set[str]:
        """Return the names that statements change so. `owner`: the object of whose method they are."""
        found = set[str]()
        nodes = [one for part in body for one in ast.walk(part)]
        read = {*_read_first(nodes)}
        filled = {name for one in nodes if isinstance(one, ast.For) for name in names_in(one.target, ast.Store)}
        some = {part for one in nodes if isinstance(one, ast.If) for part in ast.walk(one)}
        for one in nodes:
            if isinstance(one, ast.Call) and name_of(one) in _COPYING and one in some:
                found.add(root_of(one))  # It stays until the condition is met again.
            if isinstance(one, ast.Attribute | ast.Subscript) and isinstance(one.ctx, ast.Store):
                if ast.unparse(one) in read or (isinstance(one, ast.Subscript) and _stays(one, nodes, filled)):
                    found.add(root_of(one))
                    if isinstance(one, ast.Attribute):
                        self._changed.setdefault(root_of(one), set()).add(f"{SELF}{one.attr}")
            elif isinstance(one, ast.Call):
                found |= self._by(one, path, owner)
        held = {name: root for one in nodes if isinstance(one, _LOOPS) for name, root in _holders(one)}
        return {held.get(name, name) for name in found} - {""}

    def _by(self, one: ast.Call, path: tuple[ast.AST, ...], owner: Any) -> set[str]:
        """Return the names of objects that a call changes and uses."""
        if is_in_place(one):
            return {root_of(one)}
        if name_of(one) in MUTATING and isinstance(one.func, ast.Attribute):
            name = self._place(one.func.value)
            if path or "." in name.removeprefix(SELF):
                return {name}
        if path and name_of(one) == "next" and one.args:
            return {root_of(one.args[0])}
        drawn = [one.func.value] if isinstance(one.func, ast.Attribute) else []
        for source in (*drawn, *(part.value for part in one.keywords if part.arg == "generator")):
            if rng.generator(self._value(source, owner)) is not None:
                return {root_of(source)} if is_own(root_of(source)) and path else set()  # Otherwise see `Draws`.
        call = self.callee(one, owner)
        if call is None or call.function in path:
            return set()
        path = (*path, call.function)
        if call.owner is not None:
            # A method that runs now is a `ScriptFrame` of its own.
            changed = self._advanced(call, path) if call.function.lineno not in self._running else set()
            if ast.unparse(call.owner) == "self" and owner is None:
                return changed
            name = self._place(call.owner)
            if changed and name:
                self._changed.setdefault(name, set()).update(changed, names_in(call.function, ast.Store))
            return {name} if changed else set()
        shared = {name for part in ast.walk(call.function) if isinstance(part, SHARED) for name in part.names}
        kept = shared & names_in(call.function, ast.Store) & _read(call.function)
        if kept and getattr(self._value(one.func, owner), "__closure__", None):
            return {root_of(one.func)}
        inner = self._in(call.function.body, path, None)
        found = kept | (inner - call.locals()) | {root_of(call.given[name]) for name in inner if name in call.given}
        return set() if found & self._begun else found

    def _advanced(self, call: Call, path: tuple[ast.AST, ...]) -> set[str]:
        """Return the attributes, as `self.x`, that a method changes and uses as the call before has left them."""
        found = names_in(call.function, ast.Store) & _read(call.function)
        found |= self._in(call.function.body, path, call.value)
        for one in (part.func for part in ast.walk(call.function) if isinstance(part, ast.Call)):
            if isinstance(one, ast.Attribute) and ast.unparse(one.value) == "self":
                method = self._method(call.value, one.attr)
                if method is not None and method not in path:
                    found |= self._advanced(call._replace(function=method), (*path, method))
        return {
            name for name in found if is_own(name) and not self._is_saved(name, self._value(variable(name), call.value))
        }

    def _is_saved(self, name: str, value: Any) -> bool:
        """Return whether an attribute of an object is in the checkpoint, as a part of its own or inside one."""
        frame = self._frame
        if frame.is_known(variable(name)) or frame.is_saved(value) or frame.values.is_inside(value):
            return True
        return isinstance(getattr(value, "__dict__", value), dict | list) and frame.values.is_reached(value)

    def _place(self, node: ast.expr) -> str:
        """Return the name of an object, or the expression of one that an object of the function holds."""
        if (name := place_of(node)) not in self._frame.names and (value := self._frame.value(node)) is not None:
            self._frame.names[name] = value
        return name if name in self._frame.names else root_of(node)

    def _value(self, node: ast.expr, owner: Any) -> Any:
        """Return the value of an expression, in a method of `owner` if that is not None."""
        if owner is not None and isinstance(node, ast.Name) and (node.id == "self" or is_own(node.id)):
            return owner if node.id == "self" else getattr(owner, "__dict__", {}).get(node.id.removeprefix(SELF))
        return self._frame.value(node)

    def read_by(self, function: ast.expr) -> set[str]:
        """Return the names that a lambda, or a function of the script with this name, reads."""
        if isinstance(function, ast.Name) and function.id in self._functions:
            return names_in(self._functions[function.id])
        return names_in(function.body) if isinstance(function, ast.Lambda) else set()

    def callee(self, call: ast.Call, of: Any = None) -> Call | None:
        """Return the function or method of the script that a call calls, in a method of `of`; None if it is another."""
        at, owner = call.func, None
        function: ast.FunctionDef | None = None
        target = self._value(at, of)
        if isinstance(at, ast.Name) and (target is None or isinstance(target, FunctionType)):
            code = getattr(getattr(target, "__wrapped__", target), "__code__", None)
            function = self._functions.get(at.id if code is None else code.co_name)
        elif isinstance(at, ast.Attribute) and (inner := self._value(at.value, of)) is not None and target is None:
            function, owner, target = self._method(inner, at.attr), at.value, inner
        elif target is not None:
            function, owner = self._method(target, "__call__"), at
        if function is None:
            return None
        parameters = [one.arg for one in function.args.args][0 if owner is None else 1 :]
        given = [*zip(parameters, call.args, strict=False), *((one.arg, one.value) for one in call.keywords)]
        return Call(function, {name: one for name, one in given if name}, owner, target if owner is not None else of)

    def _method(self, value: Any, name: str) -> ast.FunctionDef | None:
        """Return a method of an object of the script that is not saved."""
        if not is_of_script(type(value)) or self._frame.values.is_reached(value):
            return None
        kinds = (self._methods.get((kind.__name__, name)) for kind in type(value).__mro__)
        return next((one for one in kinds if one is not None), None)


def _holders(loop: ast.For | ast.comprehension) -> Iterator[tuple[str, str]]:
    """Yield the variables of a loop over tensors, each with the name of the module, dict or list that has them."""
    for target, one in taken_by(loop):
        if isinstance(one, ast.Name) or name_of(one) in _TENSORS:
            yield from ((name, root_of(one)) for name in names_in(target, ast.Store))


def _read(function: ast.FunctionDef) -> set[str]:
    """Return the variables that a function reads as an earlier call has left them."""
    counted = {root_of(one.target) for one in ast.walk(function) if isinstance(one, ast.AugAssign)}
    return read_first(function.body) | counted


def _read_first(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """Yield the texts of attributes and items that are read before they are set: `state["last"]`."""
    places = [one for one in nodes if isinstance(one, ast.Attribute | ast.Subscript)]
    reads = {ast.unparse(one): (one.lineno, one.col_offset) for one in places[::-1] if isinstance(one.ctx, ast.Load)}
    for one in nodes:
        if isinstance(one, ast.AugAssign):
            yield ast.unparse(one.target)
        elif isinstance(one, ast.Assign):
            for text in {ast.unparse(target) for target in one.targets} & reads.keys():
                if reads[text] < (one.end_lineno or 0, one.end_col_offset or 0):
                    yield text


def _stays(target: ast.Subscript, nodes: Sequence[ast.AST], filled: set[str]) -> bool:
    """Return whether an item that is set stays while others are set, and the whole object is read."""
    if isinstance(target.slice, ast.Constant) or not names_in(target.slice) or names_in(target.slice) & filled:
        return False
    name = root_of(target)
    reads = [one for one in nodes if isinstance(one, ast.Name) and one.id == name]
    parts = [
        one.value
        for one in nodes
        if isinstance(one, ast.Subscript) and ast.unparse(one.slice) == ast.unparse(target.slice)
    ]
    parts += [part for one in nodes if isinstance(one, ast.Compare) for part in one.comparators]
    return any(one not in parts for one in reads)
