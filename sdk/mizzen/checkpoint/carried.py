"""Finds variables that a loop carries from one pass to the next."""

import ast
from collections.abc import Callable, Iterable, Iterator

MUTATING = {"append", "extend", "update", "add"}
"""Methods that add to an object, such as a list or a meter."""


def name_of(call: ast.expr) -> str:
    """Return the name of the function or method that a call calls, such as `step` for `scheduler.step()`; or ""."""
    function = call.func if isinstance(call, ast.Call) else None
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def variable(name: str) -> ast.Name:
    """Return the expression of a variable."""
    return ast.Name(name, ast.Load())


def names_in(node: ast.AST, kind: type[ast.expr_context] = ast.Load) -> set[str]:
    """Return the names that a node reads (or stores)."""
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, kind)}


def root_of(node: ast.expr) -> str:
    """Return the name at the beginning of an expression such as `state["a"].b`; or ""."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def taken_by(loop: ast.For | ast.comprehension) -> list[tuple[ast.expr, ast.expr]]:
    """Return the targets of a loop, each with the iterable that it takes; for `zip` several pairs."""
    if isinstance(loop.iter, ast.Call) and name_of(loop.iter) == "zip" and isinstance(loop.target, ast.Tuple):
        return [*zip(loop.target.elts, loop.iter.args, strict=False)]
    return [(loop.target, loop.iter)]


def place_of(node: ast.expr) -> str:
    """Return an expression such as `context.teacher`, or the name at its beginning if it is no attribute."""
    inner = node
    while isinstance(inner, ast.Attribute):
        inner = inner.value
    return ast.unparse(node) if isinstance(inner, ast.Name) else root_of(node)


def is_in_place(call: ast.Call) -> bool:
    """Return whether a call changes a tensor in place, by a method of torch such as `mul_`, but not its gradient."""
    name = name_of(call)
    if not isinstance(call.func, ast.Attribute) or not name.endswith("_") or name.endswith("__"):
        return False
    return name not in _NOT_VALUES and ".grad" not in ast.unparse(call.func)


_NOT_VALUES = ("requires_grad_", "detach_", "share_memory_")


def read_first(statements: Iterable[ast.stmt]) -> set[str]:
    """Return the names that statements read before they have assigned them."""
    flow = _Flow()
    flow.run(statements, set())
    return flow.read


def carried(loop: ast.For | ast.While) -> set[str]:
    """Return the names that a pass of a loop reads as the pass before has left them, such as sums and counters.

    Also the objects to which a pass adds, the iterators that it advances, the lists that it shuffles, and those whose
    items it computes from their former values: `sums[i] += x`.
    """
    flow = _Flow()
    flow.run(loop.body, flow.reads(loop.test, set()) if isinstance(loop, ast.While) else set())
    found = flow.read & names_in(loop, ast.Store)
    for call in (one for one in ast.walk(loop) if isinstance(one, ast.Call)):
        if name_of(call) in MUTATING and isinstance(call.func, ast.Attribute):
            found |= {place_of(call.func.value)} & flow.read
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
        if not all(is_known(variable(name)) for name in names_in(one.test)):
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
    found = read_first(statements)
    return [one for part in statements for one in _uses(part) if one.id in found]


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
