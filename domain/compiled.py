"""Compiles the inner loops of the decision packages to machine code, and caches the code on disk."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

# Numba also reads `.numba_config.yaml` in the current folder, where a project may have disabled compilation.
os.environ["NUMBA_DISABLE_JIT"] = "0"

import numba
from numba.core.types import Literal, int8, int16, int32, int64

from domain.machine_code import folder_of

F = TypeVar("F", bound=Callable[..., object])
_NARROW = (int8, int16, int32)


def compiled(function: F) -> F:
    """Compiles `function` when it is first called with new argument types: about one second, once per machine.

    The code is cached in a folder whose name contains a hash of all sources of the function's package. A hash of one
    file, as numba uses it, is not enough: the machine code of a module includes functions of other modules that it
    calls. If no folder is writable, each process compiles again.

    Calls between compiled functions do not specialise on constant arguments. (Numba does by default: a loop variable
    that starts at 0 cost one more copy of every function that receives it, a sixth of the total compile time.) They do
    not specialise on narrow integers either: an int32 from an array is widened, because otherwise a function with three
    such arguments is compiled up to eight times.

    A division by zero returns what numpy returns instead of raising: the check made the loops up to 60 times slower.
    """
    folder = folder_of(str(Path(function.__code__.co_filename).parent))
    config: Any = numba.config
    before = config.CACHE_DIR
    if folder is not None:
        config.CACHE_DIR = folder  # Read while the function is decorated.
    try:
        dispatcher: Any = numba.njit(cache=folder is not None, error_model="numpy")(function)
    finally:
        config.CACHE_DIR = before
    template = dispatcher.get_call_template

    def without_literals(args: Any, kws: Any) -> Any:
        return template(tuple(map(_plain, args)), {name: _plain(given) for name, given in kws.items()})

    dispatcher.get_call_template = without_literals
    return cast(F, dispatcher)


def _plain(given: Any) -> Any:
    plain = given.literal_type if isinstance(given, Literal) else given
    return int64 if plain in _NARROW else plain
