"""Finds which variables, attributes and functions of a script depend on the restored state, from its source."""

import ast
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any

from mizzen.checkpoint.carried import name_of, names_in
from mizzen.checkpoint.own_names import is_of_script

RANGES = ("range", "trange")
SELF = "self."
"""How the names of variables begin that stand for attributes of `self`, such as the best loss of a trainer."""
_RESTORING = {"restore", "progress", "load_latest", "latest"}
"""Attributes that yield restored values."""


@dataclass
class Values:
    """Tells the kinds of the values of a script's variables."""

    is_position: Callable[[Any], bool]
    """Whether a value is a tracked object that may hold a position."""
    is_loader: Callable[[Any], bool]
    """Whether it is a torch loader whose position is tracked."""
    is_plain: Callable[[Any], bool]
    """Whether it is a torch loader in order, or an iterator of one, whose position is not tracked."""
    is_kept: Callable[[Any], bool]
    """Whether it is any tracked object."""
    is_inside: Callable[[Any], bool]
    """Whether a tracked dict has it, and a restore fills it in place."""
    is_reached: Callable[[Any], bool]
    """Whether a tracked object refers to it."""
    generator: Callable[[Any], Any]
    """The value itself if it is a random generator, or that of a loader's order; None if a tracked object has it."""
    saved: Set[str]
    """Names of variables and attributes that the script's own functions save."""


class RestoredNames:
    """The names of a script's file whose values depend on the restored state."""

    def __init__(self, tree: ast.AST, names: Mapping[str, Any], known: Set[str], values: Values) -> None:
        """`names`: the script's variables, with their present values. `known`: names of variables that are restored."""
        self.known = set(known)
        """Variables and functions with restored values."""
        self._tree, self._names, self._values = tree, names, values
        self._attributes = set(_RESTORING)
        self._functions = {one.name for one in ast.iter_child_nodes(tree) if isinstance(one, ast.FunctionDef)}
        self._spread()

    def is_known(self, node: ast.AST) -> bool:
        """Return whether an expression depends on the restored state."""
        if isinstance(node, ast.Call) and name_of(node) == "len":
            return False
        if isinstance(node, ast.Call) and name_of(node) in self._functions:
            return name_of(node) in self.known
        if isinstance(node, ast.Name):
            return node.id in self.known or (is_own(node.id) and node.id.removeprefix(SELF) in self._attributes)
        if isinstance(node, ast.Attribute):
            value = self.value(node)
            if node.attr in self._attributes or self._values.is_position(value) or self._values.is_loader(value):
                return True
            if isinstance(value, int) and self._values.is_kept(self.value(node.value)):
                return True  # A position may be in a tracked object of the script; other attributes are not one.
        return any(self.is_known(one) for one in ast.iter_child_nodes(node))

    def _spread(self) -> None:
        """Find the variables, attributes and functions that depend on the restored state."""
        functions: dict[str, tuple[ast.FunctionDef, int]] = {}
        for one in ast.walk(self._tree):
            if isinstance(one, ast.ClassDef):
                for method in one.body:
                    if isinstance(method, ast.FunctionDef):
                        functions[one.name if method.name == "__init__" else method.name] = method, 1
            elif isinstance(one, ast.FunctionDef):
                functions.setdefault(one.name, (one, 0))
        size = -1
        while size != len(self.known) + len(self._attributes):
            size = len(self.known) + len(self._attributes)
            for one in ast.walk(self._tree):
                self._spread_from(one, functions)

    def _spread_from(self, one: ast.AST, functions: dict[str, tuple[ast.FunctionDef, int]]) -> None:
        if isinstance(one, ast.Assign | ast.AnnAssign | ast.NamedExpr) and one.value and self.is_known(one.value):
            for target in one.targets if isinstance(one, ast.Assign) else [one.target]:
                stored = names_in(target, ast.Store)
                self.known |= stored
                self._attributes |= {name.removeprefix(SELF) for name in stored if is_own(name)}
                self._attributes |= {part.attr for part in ast.walk(target) if isinstance(part, ast.Attribute)}
        elif isinstance(one, ast.For) and name_of(one.iter) in RANGES and self.is_known(one.iter):
            self.known |= names_in(one.target, ast.Store)
        elif isinstance(one, ast.FunctionDef):
            inner = [part.value for part in ast.walk(one) if isinstance(part, ast.Return | ast.Yield | ast.YieldFrom)]
            if any(part is not None and not isinstance(part, ast.Tuple) and self.is_known(part) for part in inner):
                self.known.add(one.name)
                self._attributes.add(one.name)
        elif isinstance(one, ast.Call) and name_of(one) in functions and not self._is_of_library(one.func):
            function, offset = functions[name_of(one)]
            parameters = [part.arg for part in function.args.args][offset:]
            given = [*zip(parameters, one.args, strict=False), *((part.arg, part.value) for part in one.keywords)]
            self.known |= {name for name, value in given if name and self.is_known(value)}

    def _is_of_library(self, function: ast.expr) -> bool:
        """Return whether a method is one of a library's object: `checkpointer.step` is no `step` of the script."""
        owner = self.value(function.value) if isinstance(function, ast.Attribute) else None
        return owner is not None and not is_of_script(type(owner))

    def value(self, node: ast.expr) -> Any:
        """Return the value of a variable or of an object's attribute now; None if it is not known."""
        if isinstance(node, ast.Name):
            return self._names.get(node.id)
        if isinstance(node, ast.Attribute):
            return getattr(self.value(node.value), "__dict__", {}).get(node.attr)  # Not a property, which may compute.
        return None


class OwnAttributes(ast.NodeTransformer):
    """Replaces `self.best` by a variable of that name; not in calls of methods."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """Replace an attribute of `self`."""
        if isinstance(node.value, ast.Name) and node.value.id == "self":
            return ast.copy_location(ast.Name(f"{SELF}{node.attr}", node.ctx), node)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Leave the name of the method."""
        if isinstance(node.func, ast.Attribute):
            node.func.value = self.visit(node.func.value)
            node.args = [self.visit(one) for one in node.args]
            node.keywords = [self.visit(one) for one in node.keywords]
            return node
        return self.generic_visit(node)


def is_own(name: str) -> bool:
    """Return whether a variable is an attribute of `self`."""
    return name.startswith(SELF)


def own_attributes(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of `self` by the names of such variables. Properties are left out: they may compute."""
    return {f"{SELF}{name}": value for name, value in getattr(variables.get("self"), "__dict__", {}).items()}
