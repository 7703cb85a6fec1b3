"""Reads values of Python expressions without running them: literals, names of literals, ranges and similar forms."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any

_MOST = 100_000
_LISTS = (list, tuple, range)
_CALLS = {"range", "list", "tuple", "str", "int", "float", "enumerate", "zip", "product"}
_LARGEST_POWER = 64
_MOST_STEPS = 200_000
_MOST_CHARACTERS = 2_000_000


class NotLiteral(ValueError):
    """The value of an expression cannot be read without running the program."""


@dataclass
class Constants:
    """Expressions that names have, if they are assigned once."""

    named: dict[str, ast.expr] = field(default_factory=dict)
    steps: Iterator[int] = field(default_factory=lambda: iter(range(_MOST_STEPS)))
    """Counts the expressions that are read, up to a limit: nested lists of names can expand to very many."""

    def value(self, node: ast.expr) -> Any:
        """Return the value of an expression.

        Raises:
            NotLiteral: the expression does not have a supported form.
        """
        return self._value(node, 0)

    def expression(self, node: ast.expr) -> str:
        """Return the expression with the names of literals replaced.

        Raises:
            NotLiteral: as for `value`.
        """
        value = self.value(node)
        return f"range({value.start}, {value.stop}, {value.step})" if isinstance(value, range) else repr(value)

    def _value(self, node: ast.expr, depth: int) -> Any:
        if next(self.steps, None) is None:
            raise NotLiteral(f"it has more than {_MOST_STEPS} parts")
        if depth > 20:
            raise NotLiteral("it is nested more than 20 levels deep")
        if isinstance(node, ast.Constant) and isinstance(node.value, (str, int, float, bool, type(None))):
            return node.value
        if isinstance(node, ast.Name) and node.id in self.named:
            return self._value(self.named[node.id], depth + 1)
        if isinstance(node, (ast.List, ast.Tuple)):
            found = [self._value(one, depth + 1) for one in node.elts]
            return found if isinstance(node, ast.List) else tuple(found)
        if isinstance(node, ast.Dict):
            return self._dict(node, depth)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            operand = self._value(node.operand, depth + 1)
            if isinstance(operand, (int, float)):
                return -operand
        if isinstance(node, ast.BinOp):
            return self._calculation(node, depth)
        if isinstance(node, ast.Call) and not node.keywords:
            return self._call(node, depth)
        if isinstance(node, ast.ListComp) and len(node.generators) == 1 and not node.generators[0].ifs:
            return self._comprehension(node, depth)
        raise NotLiteral(f"{ast.unparse(node)[:60]!r} is not a literal")

    def _dict(self, node: ast.Dict, depth: int) -> dict[Any, Any]:
        if any(key is None for key in node.keys):
            raise NotLiteral("** in a mapping is not a literal")
        return {
            self._value(key, depth + 1): self._value(value, depth + 1)
            for key, value in zip(node.keys, node.values, strict=True)
            if key is not None
        }

    def _calculation(self, node: ast.BinOp, depth: int) -> int | float:
        left, right = self._value(node.left, depth + 1), self._value(node.right, depth + 1)
        is_small = all(isinstance(one, (int, float)) and abs(one) < 1e15 for one in (left, right))
        if is_small and isinstance(node.op, (ast.Mult, ast.Add, ast.Sub)):
            result: int | float = (
                left * right
                if isinstance(node.op, ast.Mult)
                else left + right
                if isinstance(node.op, ast.Add)
                else left - right
            )
            return result
        if is_small and isinstance(node.op, ast.Div) and right:
            return float(left / right)
        if is_small and isinstance(node.op, ast.Pow) and left > 0 and abs(right) <= _LARGEST_POWER and left <= 1000:
            return left**right if isinstance(right, int) and right >= 0 else float(left**right)
        raise NotLiteral(f"{ast.unparse(node)[:60]!r} is not a literal")

    def _comprehension(self, node: ast.ListComp, depth: int) -> list[Any]:
        generator = node.generators[0]
        values = self._value(generator.iter, depth + 1)
        if not isinstance(generator.target, ast.Name) or not isinstance(values, _LISTS) or len(values) > 1000:
            raise NotLiteral(f"{ast.unparse(node)[:60]!r} is not a literal")
        inner = [Constants({**self.named, generator.target.id: ast.Constant(value)}, self.steps) for value in values]
        return [one._value(node.elt, depth + 1) for one in inner]

    def _call(self, node: ast.Call, depth: int) -> Any:
        name = ast.unparse(node.func).removeprefix("itertools.")
        given = [self._value(one, depth + 1) for one in node.args if name in _CALLS]
        if name == "range" and given and all(type(one) is int and abs(one) < 10**12 for one in given):
            found = range(*given[:3]) if len(given) < 3 or given[2] else range(0)
            if len(found) > _MOST:
                raise NotLiteral(f"a range of {len(found)} elements; at most {_MOST} are read")
            return found
        if name in ("enumerate", "zip", "product") and given and all(isinstance(one, _LISTS) for one in given):
            size = prod(len(one) for one in given) if name == "product" else len(given[0])
            longest = max((len(repr(element)) for one in given for element in one), default=0)
            if size * longest * len(given) > _MOST_CHARACTERS or (name == "enumerate" and len(given) > 1):
                raise NotLiteral(f"{name} of {size} elements is too long")
            return list({"enumerate": enumerate, "zip": zip, "product": product}[name](*given))
        if name in ("list", "tuple") and len(given) == 1 and isinstance(given[0], _LISTS):
            return list(given[0])
        if name in ("str", "int", "float") and len(given) == 1 and isinstance(given[0], (str, int, float)):
            return {"str": str, "int": int, "float": float}[name](given[0])
        raise NotLiteral(f"{ast.unparse(node)[:60]!r} is not a literal")


def constants_of(tree: ast.Module) -> Constants:
    """Return the names that are assigned exactly once, to any expression."""
    assigned: dict[str, list[ast.expr | None]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                for one in target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]:
                    if isinstance(one, ast.Name):
                        assigned.setdefault(one.id, []).append(node.value if one is target else None)
        elif isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.For)) and isinstance(node.target, ast.Name):
            value = node.value if isinstance(node, ast.AnnAssign) else None
            assigned.setdefault(node.target.id, []).append(value)
        elif isinstance(node, ast.arg):
            assigned.setdefault(node.arg, []).append(None)
    return Constants(
        {name: values[0] for name, values in assigned.items() if len(values) == 1 and values[0] is not None}
    )
