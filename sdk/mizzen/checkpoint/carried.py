"""Finds variables that a loop carries from one pass to the next, and whether the training depends on them."""

import ast
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field

_MUTATING = {"append", "extend", "update", "add"}
"""Methods that add to an object, such as a list or a meter."""
_SHOWING = {
    "print", "write", "log", "info", "debug", "warning", "error", "display", "plot", "tqdm",
    "log_metrics", "add_scalar", "add_scalars", "set_description", "set_postfix", "set_postfix_str",
}  # fmt: skip
"""Functions that only show values."""


def name_of(call: ast.expr) -> str:
    """Return the name of the function or method that a call calls, such as `step` for `scheduler.step()`; or ""."""
    function = call.func if isinstance(call, ast.Call) else None
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def names_in(node: ast.AST, kind: type[ast.expr_context] = ast.Load) -> set[str]:
    """Return the names that a node reads (or stores)."""
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, kind)}


def root_of(node: ast.expr) -> str:
    """Return the name at the beginning of an expression such as `state["a"].b`; or ""."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def carried(loop: ast.For | ast.While) -> set[str]:
    """Return the names that a pass of a loop reads as the pass before has left them, such as sums and counters.

    Also the objects to which a pass adds, the iterators that it advances, the lists that it shuffles, and those whose
    items it computes from their former values: `sums[i] += x`.
    """
    flow = _Flow()
    flow.run(loop.body, flow.reads(loop.test, set()) if isinstance(loop, ast.While) else set())
    found = flow.read & names_in(loop, ast.Store)
    for call in (one for one in ast.walk(loop) if isinstance(one, ast.Call)):
        if name_of(call) in _MUTATING and isinstance(call.func, ast.Attribute):
            found |= {root_of(call.func)} & flow.read
        elif name_of(call) in ("next", "shuffle") and call.args:
            found |= {root_of(call.args[0])} & flow.read
    items, others = set[str](), set[str]()
    for one in (one for one in ast.walk(loop) if isinstance(one, ast.Assign | ast.AugAssign)):
        for target in one.targets if isinstance(one, ast.Assign) else [one.target]:
            if isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
                is_own = isinstance(one, ast.AugAssign) or target.value.id in names_in(one.value)
                (items if is_own else others).add(target.value.id)
    found |= (items - others) & flow.read
    return found - (names_in(loop.target, ast.Store) if isinstance(loop, ast.For) else set())


def set_by_some(loop: ast.For | ast.While, body: list[ast.stmt], is_known: Callable[[ast.AST], bool]) -> set[str]:
    """Return the names that a loop in `body` changes only in some passes, such as the best weights."""
    stored, some, always = [one for part in loop.body for one in bindings(part)], set[ast.AST](), set[str]()
    for one in (one for one in ast.walk(loop) if isinstance(one, ast.If) and not isinstance(one.body[-1], _LEAVING)):
        branches = [{each.id for part in branch for each in bindings(part)} for branch in (one.body, one.orelse)]
        always |= set.intersection(*branches)
        if not all(is_known(ast.Name(name)) for name in names_in(one.test)):
            some |= {*ast.walk(one)}
    always |= {one.id for one in stored if one not in some}
    before = {one.id for part in body for one in bindings(part) if one.lineno < loop.lineno}
    return before & {one.id for one in stored} - always


def bindings(node: ast.AST) -> Iterator[ast.Name]:
    """Yield the names that a statement assigns, without those of functions and comprehensions inside."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node
    for one in ast.iter_child_nodes(node) if not isinstance(node, _SCOPES) else ():
        yield from bindings(one)


def following(statements: list[ast.stmt], loop: ast.stmt) -> list[ast.stmt] | None:
    """Return the statements of a function that follow a loop, also those after the blocks that contain it."""
    for at, one in enumerate(statements):
        if one is loop:
            return statements[at + 1 :]
        if one.lineno <= loop.lineno <= (one.end_lineno or 0):
            for part in (getattr(one, name, []) for name in ("body", "orelse", "finalbody")):
                if (found := following(part, loop)) is not None:
                    return found + statements[at + 1 :]
    return None


def unassigned(statements: list[ast.stmt]) -> list[ast.Name]:
    """Return the uses of names that statements read before they have assigned them."""
    flow = _Flow()
    flow.run(statements, set())
    return [one for part in statements for one in _uses(part) if one.id in flow.read]


def _uses(node: ast.AST) -> Iterator[ast.Name]:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        yield node
    for one in ast.iter_child_nodes(node) if not isinstance(node, _SCOPES[:2]) else ():
        yield from _uses(one)


_SCOPES = (
    ast.FunctionDef, ast.Lambda, ast.ClassDef, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp,
)  # fmt: skip


class _Flow:
    """Finds the names that statements read before they have assigned them. Loops are taken to run at least once."""

    def __init__(self) -> None:
        self.read: set[str] = set()

    def run(self, statements: Iterable[ast.stmt], defined: set[str]) -> set[str]:
        """Return the names that are assigned after `statements`, if those in `defined` are before."""
        for one in statements:
            defined = self._after(one, defined)
        return defined

    def _after(self, one: ast.stmt, defined: set[str]) -> set[str]:
        if isinstance(one, ast.If):
            defined = self.reads(one.test, defined)
            branches = [(part, self.run(part, set(defined))) for part in (one.body, one.orelse)]
            kept = [after for part, after in branches if not (part and isinstance(part[-1], _LEAVING))]
            return set.intersection(*kept) if kept else defined
        if isinstance(one, ast.For | ast.While | ast.With | ast.Try):
            for part in ast.iter_child_nodes(one):
                if isinstance(part, ast.expr | ast.withitem):
                    defined = self.reads(part, defined)
            defined = defined | {name for part in _heads(one) for name in names_in(part, ast.Store)}
            after = self.run(one.body, set(defined))
            for handler in getattr(one, "handlers", ()):
                self.run(handler.body, set(defined))
            return self.run([*getattr(one, "orelse", ()), *getattr(one, "finalbody", ())], after)
        if isinstance(one, ast.FunctionDef | ast.ClassDef):
            return defined
        after = self.reads(one, defined)
        if isinstance(one, ast.AugAssign) and isinstance(one.target, ast.Name):
            self.read |= {one.target.id} - defined
        return after

    def reads(self, node: ast.AST, defined: set[str]) -> set[str]:
        """Add the names that a node reads outside `defined`. Return `defined` with the names that it assigns."""
        inner = [names_in(one.target, ast.Store) for one in ast.walk(node) if isinstance(one, ast.comprehension)]
        self.read |= names_in(node) - defined - set[str]().union(*inner)
        return defined | names_in(node, ast.Store)


_LEAVING = (ast.Continue, ast.Break, ast.Return, ast.Raise)


def _heads(one: ast.For | ast.While | ast.With | ast.Try) -> Iterator[ast.AST]:
    if isinstance(one, ast.For):
        yield one.target
    elif isinstance(one, ast.With):
        yield from one.items


@dataclass
class Uses:
    """What happens to the values of some names in a function."""

    names: set[str]
    """The names whose values are followed, and the variables that were computed from them."""
    is_known: Callable[[ast.AST], bool]
    """Whether an expression depends on the restored state."""
    is_aligned: Callable[[ast.If], bool] = lambda _: False
    """Whether a condition is at the same phase after a restart."""
    end: int = 1 << 30
    """The last line of the loop that carries the names."""
    divisor: str | None = None
    """The first of the names by which a line after the loop divides."""
    divided_at: int = 0
    """The number of that line."""
    guarded: bool = False
    """Whether a condition checks one of the names before the present line divides by it."""
    returned: bool = False
    """Whether the function returns a value that is computed from them."""
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
                self._derive(names_in(one.target, ast.Store), found)
            handlers = [part for handler in getattr(one, "handlers", ()) for part in handler.body]
            ends = [*getattr(one, "orelse", ()), *getattr(one, "finalbody", ())]
            return self.first(one.body, after) or self._perhaps(handlers, after) or self.first(ends, after)
        if one.lineno < after:
            return None
        self._divided(one)
        if isinstance(one, ast.Return):
            self.returned |= one.value is not None and self._mentioned(one.value) is not None
        elif isinstance(one, ast.Assign | ast.AnnAssign | ast.AugAssign) and one.value is not None:
            return self._assigned(one, one.value)
        elif isinstance(one, ast.Expr) and isinstance(one.value, ast.Call):
            return self._called(one.value)
        return None

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
        found = self._mentioned(value)
        for target in one.targets if isinstance(one, ast.Assign) else [one.target]:
            stored = names_in(target, ast.Store)
            if found is None:
                if not isinstance(one, ast.AugAssign):
                    self.names -= stored  # Its new value does not depend on the old one.
            elif stored:
                self._derive(stored, found)
            elif self.is_known(target) or (isinstance(target, ast.Subscript) and ast.unparse(target.slice) == "'lr'"):
                return found
        return None

    def _called(self, call: ast.Call) -> str | None:
        if name_of(call) in _SHOWING:
            return None
        found = next((name for one in (*call.args, *call.keywords) if (name := self._mentioned(one))), None)
        if found is not None and name_of(call) in _MUTATING and not self.is_known(call.func):
            self._derive({root_of(call.func)}, found)
            return None
        return found or (self._mentioned(call.func) if name_of(call) == "backward" else None)

    def _derive(self, names: set[str], found: str) -> None:
        for name in names - self.names:
            self.cause[name] = self.cause.get(found, found)
        self.names |= names

    def _mentioned(self, node: ast.AST) -> str | None:
        # The last item of a list is one that the last pass has added.
        last = {
            one.value for one in ast.walk(node) if isinstance(one, ast.Subscript) and ast.unparse(one.slice) == "-1"
        }
        found = {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and one not in last}
        return min(found & self.names, default=None)

    def _shows(self, one: ast.stmt) -> bool:
        """Return whether a statement only shows values, or sets variables."""
        if isinstance(one, ast.If | ast.For | ast.With):
            return all(self._shows(part) for part in (*one.body, *getattr(one, "orelse", ())))
        if isinstance(one, ast.Assign):
            return all(isinstance(target, ast.Name) for target in one.targets)
        if isinstance(one, ast.Expr) and isinstance(one.value, ast.Call):
            return name_of(one.value) in _SHOWING | _MUTATING and not self.is_known(one.value.func)
        return isinstance(one, ast.Expr | ast.Pass | ast.AugAssign)
