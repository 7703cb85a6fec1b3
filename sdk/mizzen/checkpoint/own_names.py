"""Tells the private attributes of a script's own class from those of the library's class that it extends.

An optimizer, a LightningModule or a callback has private attributes of its library, which a restart must not set. An
attribute is the script's own if its name is in the script's code and not in the code of the library's classes. The
script's code is that of its classes, of the functions that run when an object of such a class is first looked at (as
the main part of the script), and of the other functions and classes in their files.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from types import CodeType, FrameType, FunctionType
from typing import Any

from mizzen.checkpoint.loops import is_of_library

_HIDING = ("torch.optim", "torch.distributed.", "lightning.", "pytorch_lightning.", "transformers.")
"""Libraries whose classes have private attributes that no restart may set."""
_STRICT = "transformers.trainer"
"""Also attributes that are not private belong to the classes of this module."""


def _is_of_script(kind: type) -> bool:
    """Return whether a class is not of a library. Those of scikit-learn count, too: their state is in attributes."""
    if kind.__module__.startswith("sklearn."):
        return True
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
    codes = [*_running(), *_codes(ours)]
    # Also functions and other classes of the script: a callback may set attributes of a module.
    scopes = {id(scope): scope for _, scope in codes}
    codes += _codes(value for scope in scopes.values() for value in [*scope.values()] if _is_in(scope, value))
    own = _names((code for code, _ in codes), texts=True)
    own -= _names((code for code, _ in _codes(one for one in kind.__mro__ if one not in ours)), texts=False)
    return lambda name: (is_strict or name.startswith("_")) and name not in own


def _is_in(scope: dict[str, Any], value: Any) -> bool:
    return isinstance(value, type | FunctionType) and value.__module__ == scope.get("__name__")


def _running() -> Iterator[tuple[CodeType, dict[str, Any]]]:
    """Yield the code of the script's functions that run now, each with its global names."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        scope = frame.f_globals
        name, file = scope.get("__name__", ""), frame.f_code.co_filename
        if name == "__main__" or not (name.startswith("mizzen.") or is_of_library(file) or file.startswith("<")):
            yield frame.f_code, scope
        frame = frame.f_back


def _names(codes: Iterable[CodeType], *, texts: bool) -> set[str]:
    """Return the names of attributes and variables in the code of functions and classes; `texts`: also texts."""
    found = set[str]()
    left = [*codes]
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
_known = cache(_hides)
hides: Callable[[type], Callable[[str], bool] | None] = _known


def look_again() -> None:
    """Forget which attributes are hidden: a process, such as that of a notebook, may run several scripts."""
    _known.cache_clear()
