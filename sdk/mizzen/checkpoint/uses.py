"""Finds whether a training depends on variables: whether a tracked object or a condition gets their values."""

import ast
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from mizzen.checkpoint.carried import MUTATING, name_of, names_in, root_of, taken_by, variable
from mizzen.checkpoint.restored_names import RANGES, SELF, is_own

_SHOWING = {
    "print", "write", "log", "info", "debug", "warning", "error", "display", "plot", "tqdm",
    "log_metrics", "add_scalar", "add_scalars", "set_description", "set_postfix", "set_postfix_str",
}  # fmt: skip
"""Functions that only show values."""
_DEPTH = 4
"""How many calls of functions are followed into each other."""

SHARED = (ast.Global, ast.Nonlocal)


class Call(NamedTuple):
    """A call of a function or method of the script."""

    function: ast.FunctionDef
    given: Mapping[str, ast.expr]
    """The arguments, by the names of the parameters."""
    owner: ast.expr | None
    """The object of a method."""
    value: Any
    """The value of that object."""

    def locals(self) -> set[str]:
        """Return the function's own variables."""
        shared = {name for one in ast.walk(self.function) if isinstance(one, SHARED) for name in one.names}
        own = {one.arg for one in ast.walk(self.function.args) if isinstance(one, ast.arg)}
        return own | {name for name in names_in(self.function, ast.Store) - shared if not is_own(name)}


@dataclass
class Uses:
    """What happens to the values of some names in a function."""

    names: set[str]
    """The names whose values are followed, and the variables that were computed from them."""
    is_known: Callable[[ast.AST], bool]
    """Whether an expression depends on the restored state."""
    is_aligned: Callable[[ast.If], bool] = lambda _: False
    """Whether a condition is at the same phase after a restart."""
    callee: Callable[[ast.Call, Any], Call | None] = lambda *_: None
    """Returns the function or method of the script that a call calls. The second argument: `owner`."""
    unchanged: Mapping[str, Set[str]] = field(default_factory=dict)
    """The attributes that stay the same, as `self.x`, by the name of the object."""
    owner: Any = None
    """The object whose method is followed now, or None."""
    path: tuple[ast.FunctionDef, ...] = ()
    """The functions that are followed now."""
    end: int = 1 << 30
    """The last line of the loop that carries the names."""
    divisor: str | None = None
    """The first of the names by which a line after the loop divides."""
    divided_at: int = 0
    """The number of that line."""
    guarded: bool = False
    """Whether a condition checks one of the names before the present line divides by it."""
    returned: str | None = None
    """The name from which a value is computed that the function returns."""
    holders: dict[str, set[str]] = field(default_factory=dict)
    """The names that a call has got whose result depends on the values, by the name of the result."""
    cause: dict[str, str] = field(default_factory=dict)
    """The name from which a name was computed."""

    def first(self, statements: Collection[ast.stmt], after: int) -> str | None:
        """Return the first of the names on which the training depends, in lines from number `after` on."""
        for one in statements:
            if (one.end_lineno or 0) < after or isinstance(one, ast.FunctionDef | ast.ClassDef):
                continue
            if found := self._in(one, after):
                return self.cause.get(found, found)
        return None

    def _in(self, one: ast.stmt, after: int) -> str | None:
        if isinstance(one, ast.If):
            found = self._mentioned(one.test) if one.lineno >= after and not self.is_aligned(one) else None
            if found and not all(self._shows(part) for part in (*one.body, *one.orelse)):
                return found
            guarded, self.guarded = self.guarded, self.guarded or found is not None
            found = self._perhaps([*one.body, *one.orelse], after)
            self.guarded = guarded
            return found
        if isinstance(one, ast.For | ast.While | ast.With | ast.Try):
            if isinstance(one, ast.While) and one.lineno >= after and (found := self._mentioned(one.test)):
                return found
            if isinstance(one, ast.For) and one.lineno > after and (found := self._mentioned(one.iter)):
                if name_of(one.iter) in RANGES and not all(map(self._shows, one.body)):
                    return found
                for target, taken in taken_by(one):
                    if part := self._mentioned(taken):
                        self._derive(names_in(target, ast.Store), part)
            handlers = [part for handler in getattr(one, "handlers", ()) for part in handler.body]
            ends = [*getattr(one, "orelse", ()), *getattr(one, "finalbody", ())]
            return self.first(one.body, after) or self._perhaps(handlers, after) or self.first(ends, after)
        if one.lineno < after:
            return None
        self._divided(one)
        if found := self._by_calls(one):
            return found
        if isinstance(one, ast.Return):
            self._returns(one.value)
        elif isinstance(one, ast.Assign | ast.AnnAssign | ast.AugAssign) and one.value is not None:
            return self._assigned(one, one.value)
        elif isinstance(one, ast.Expr) and isinstance(one.value, ast.Call):
            return self._called(one.value)
        elif isinstance(one, ast.Expr) and isinstance(one.value, ast.Yield | ast.YieldFrom):
            self._returns(one.value)
        return None

    def _returns(self, value: ast.expr | None) -> None:
        found = self._mentioned(value) if value is not None else None
        self.returned = self.returned or (self.cause.get(found, found) if found else None)

    def _divided(self, one: ast.stmt) -> None:
        guards = [part.test for part in ast.walk(one) if isinstance(part, ast.IfExp)]
        if (
            one.lineno > self.end
            and self.divisor is None
            and not self.guarded
            and not any(map(self._mentioned, guards))
        ):
            for part in ast.walk(one):
                if (
                    isinstance(part, ast.BinOp)
                    and isinstance(part.op, ast.Div | ast.FloorDiv)
                    and name_of(part.right) != "max"
                ):
                    self.divisor = self.divisor or self._mentioned(part.right)
                    self.divided_at = one.lineno

    def _perhaps(self, statements: Collection[ast.stmt], after: int) -> str | None:
        """Like `first`, for statements that may not be executed, and so do not end the use of a value."""
        before = set(self.names)
        found = self.first(statements, after)
        self.names |= before
        return found

    def _assigned(self, one: ast.Assign | ast.AnnAssign | ast.AugAssign, value: ast.expr) -> str | None:
        targets = one.targets if isinstance(one, ast.Assign) else [one.target]
        slices = [target.slice for target in targets if isinstance(target, ast.Subscript)]
        found = next((name for part in (value, *slices) if (name := self._mentioned(part))), None)
        for call in (part for part in ast.walk(value) if isinstance(part, ast.Call) and name_of(part).endswith("_")):
            # It changes its arguments, such as the gradients of `clip_grad_norm_(parameters, limit)`.
            if any(map(self.is_known, call.args)) and (changed := self._called(call)):
                return changed
        if isinstance(value, ast.Call) and found is not None:
            self.holders |= {name: names_in(value) for target in targets for name in names_in(target, ast.Store)}
        for target in targets:
            stored = names_in(target, ast.Store)
            if found is None:
                if not isinstance(one, ast.AugAssign):
                    self.names -= stored  # Its new value does not depend on the old one.
            elif stored:
                self._derive(stored, found)
            elif self._is_state(target):
                return found
            elif isinstance(target, ast.Subscript):
                self._derive({root_of(target)} - {""}, found)
        return None

    def _by_calls(self, one: ast.stmt) -> str | None:
        """Like `first`, in the functions of the script that a statement calls."""
        for call in (part for part in ast.walk(one) if isinstance(part, ast.Call)):
            to = self._callee(call)
            if to is not None and (found := self._followed(to)[0]):
                return found
        return None

    def _callee(self, call: ast.Call) -> Call | None:
        to = self.callee(call, self.owner) if len(self.path) < _DEPTH else None
        return None if to is None or to.function in self.path else to

    def _followed(self, to: Call) -> tuple[str | None, str | None]:
        """Return the first name on which the training depends in a function that is called, and one that it returns."""
        names = {name: found for name, part in to.given.items() if (found := self._mentioned(part))}
        unchanged = {name: self.unchanged[found] for name, found in names.items() if found in self.unchanged}
        for name, part in to.given.items():
            if isinstance(part, ast.Name):  # `context.teacher` is `c.teacher` in a function `f(c)`.
                prefix = f"{part.id}."
                names |= {f"{name}.{one.removeprefix(prefix)}": one for one in self.names if one.startswith(prefix)}
        names |= {name: name for name in names_in(to.function) & self.names - to.locals()}
        if to.owner is not None and ast.unparse(to.owner) != "self" and (found := self._mentioned(to.owner)):
            same = self.unchanged.get(found, ())
            names |= {name: found for one in vars(to.value) if (name := f"{SELF}{one}") not in same}
        if not names:
            return None, None
        inner = {name for name, part in to.given.items() if self.is_known(part)}
        uses = replace(
            self,
            names=set(names),
            is_known=_or_in(self.is_known, inner),
            owner=to.value,
            path=(*self.path, to.function),
            unchanged=unchanged,
            cause={},
            holders={},
            returned=None,
        )
        found = uses.first(to.function.body, 0)
        return names.get(found, found) if found else None, names.get(uses.returned or "", uses.returned)

    def _called(self, call: ast.Call) -> str | None:
        if name_of(call) in _SHOWING or self._callee(call) is not None:
            return None
        if name_of(call) == "step" and (held := self.holders.get(root_of(call))):
            # An optimizer with a rate of these names changes what it trains.
            if any(self.is_known(variable(name)) for name in held):
                return self._mentioned(call.func)
            self._derive(held, root_of(call))
        found = next((name for one in (*call.args, *call.keywords) if (name := self._mentioned(one))), None)
        if found is not None and name_of(call) in MUTATING and not self.is_known(call.func):
            self._derive({root_of(call.func)}, found)
            return None
        return found or (self._mentioned(call.func) if name_of(call) == "backward" else None)

    def _derive(self, names: set[str], found: str) -> None:
        for name in names - self.names:
            self.cause[name] = self.cause.get(found, found)
        self.names |= names

    def _mentioned(self, node: ast.AST) -> str | None:
        return min(self._mentions(node), default=None)

    def _mentions(self, node: ast.AST) -> Iterator[str]:
        """Yield the names on which the value of an expression depends."""
        if isinstance(node, ast.Name):
            yield from {node.id} & self.names
        elif isinstance(node, ast.Attribute) and (text := ast.unparse(node)) in self.names:
            yield text
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if f"{SELF}{node.attr}" not in self.unchanged.get(node.value.id, ()):
                yield from self._mentions(node.value)
        elif isinstance(node, ast.Call) and (to := self._callee(node)) is not None:
            returned = self._followed(to)[1]
            yield from [returned] if returned else []
            if to.owner is None:  # A closure, or a function with attributes.
                yield from self._mentions(node.func)
        else:
            # The last item of a list is one that the last pass has added.
            is_last = isinstance(node, ast.Subscript) and ast.unparse(node.slice) == "-1"
            for one in ast.iter_child_nodes(node):
                if not (is_last and isinstance(one, ast.Name)):
                    yield from self._mentions(one)

    def _shows(self, one: ast.stmt) -> bool:
        """Return whether a statement only shows values, or sets variables."""
        if isinstance(one, ast.If | ast.For | ast.With):
            return all(self._shows(part) for part in (*one.body, *getattr(one, "orelse", ())))
        if isinstance(one, ast.Assign):
            return all(isinstance(target, ast.Name) for target in one.targets)
        if isinstance(one, ast.Expr) and isinstance(one.value, ast.Call):
            return name_of(one.value) in _SHOWING | MUTATING and not self.is_known(one.value.func)
        if isinstance(one, ast.AugAssign):
            return not self._is_state(one.target)
        return isinstance(one, ast.Expr | ast.Pass)

    def _is_state(self, target: ast.expr) -> bool:
        return not isinstance(target, ast.Name) and (
            self.is_known(target) or (isinstance(target, ast.Subscript) and ast.unparse(target.slice) == "'lr'")
        )


def _or_in(is_known: Callable[[ast.AST], bool], names: set[str]) -> Callable[[ast.AST], bool]:
    return lambda node: is_known(node) or bool(names_in(node) & names)
