"""Lets an analysis of functions treat an attribute of `self`, such as the best loss of a trainer, as a variable."""

import ast
from collections.abc import Mapping
from typing import Any

SELF = "self."
"""How the names of such variables begin."""


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
