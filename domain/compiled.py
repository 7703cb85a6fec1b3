"""The decision packages' inner loops are compiled to machine code, and the code is kept for the next process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from numba.core.types import Literal, int8, int16, int32, int64

from domain.machine_code import folder_of

F = TypeVar("F", bound=Callable[..., object])
_NARROW = (int8, int16, int32)


def compiled(function: F) -> F:
    """Compiles `function` at its first call with new types of arguments: a second or so, once for each machine.

    The code is cached in a folder that is named after the sources of the function's whole package: the machine code of
    one module holds that of others which it calls, and numba itself looks at one file only. Where nothing may be
    written, each process compiles anew.

    Calls between compiled functions do not compile a function anew for a constant argument. (Numba's default does: a
    loop variable that starts at 0 cost one more copy of all functions that it is given to, a sixth of all compiling.)
    Nor for a narrow integer: int32 out of an array is widened, else a function with three such arguments is compiled up
    to eight times.

    A division by zero gives what numpy gives, not an exception: checking for one made the loops up to 60 times slower.
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
