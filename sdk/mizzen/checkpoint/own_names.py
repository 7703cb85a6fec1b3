"""Tells the private attributes of a script's own class from those of the library's class that it extends.

An optimizer, a LightningModule or a callback has private attributes of its library, which a restart must not set. An
attribute is the script's own if its name is in the script's code and not in the code of the library's classes.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from types import CodeType, FunctionType
from typing import Any

from mizzen.checkpoint.libraries import is_of_library

_HIDING = ("torch.optim", "lightning.", "pytorch_lightning.")
"""Libraries whose classes have private attributes that no restart may set."""
_STRICT = "transformers.trainer"
"""Also attributes that are not private belong to the classes of this module."""


def _is_of_script(kind: type) -> bool:
    """Return whether a class is not of a library."""
    if kind.__module__ == "__main__":  # Its file may be that of a profiler or a debugger, which runs the script.
        return True
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return file is not None and not kind.__module__.startswith("mizzen.") and not is_of_library(file)


def _hides(kind: type) -> Callable[[str], bool] | None:
    """Return a function that tells whether an attribute belongs to a library; None if none does."""
    is_strict = any(one.__module__ == _STRICT for one in kind.__mro__)
    if not is_strict and not any(one.__module__.startswith(_HIDING) for one in kind.__mro__):
        return None
    ours = [one for one in kind.__mro__ if _is_of_script(one)]
    scopes = {id(scope): scope for one in ours for code in _codes(vars(one).values()) if (scope := code[1])}
    # Also functions and other classes of the script: a callback may set attributes of a module.
    inside = [value for scope in scopes.values() for value in scope.values() if _is_in(scope, value)]
    own = _names([*ours, *inside], texts=True)
    own -= _names([one for one in kind.__mro__ if one not in ours], texts=False)
    return lambda name: (is_strict or name.startswith("_")) and name not in own


def _is_in(scope: dict[str, Any], value: Any) -> bool:
    return isinstance(value, type | FunctionType) and value.__module__ == scope.get("__name__")


def _names(values: Iterable[Any], *, texts: bool) -> set[str]:
    """Return the names of attributes and variables in the code of functions and classes; `texts`: also texts."""
    found = set[str]()
    left = [code for code, _ in _codes(values)]
    while left:
        code = left.pop()
        found.update(code.co_names)
        left += [one for one in code.co_consts if isinstance(one, CodeType)]
        found.update(one for one in code.co_consts if texts and isinstance(one, str))
    return found


def _codes(values: Iterable[Any]) -> Iterator[tuple[CodeType, dict[str, Any]]]:
    """Yield the code of functions, methods and properties, and of those of classes, each with its global names."""
    for value in values:
        if isinstance(value, type):
            yield from _codes(one for one in vars(value).values() if not isinstance(one, type))
            continue
        for one in (value, *(getattr(value, name, None) for name in ("fget", "fset", "__func__", "__wrapped__"))):
            if isinstance(code := getattr(one, "__code__", None), CodeType):
                yield code, one.__globals__


# With the types of plain functions: mypy takes a class of any kind for unhashable.
is_of_script: Callable[[type], bool] = cache(_is_of_script)
hides: Callable[[type], Callable[[str], bool] | None] = cache(_hides)
