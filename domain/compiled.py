"""The decision packages' inner loops are compiled to machine code, and the code is kept for the next process."""

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., object])


def compiled(function: F) -> F:
    """Compiles `function` at its first call with new types of arguments: a second or so, once for each machine.

    The code is cached in a folder that is named after the sources of the function's whole package: the machine code of
    one module holds that of others which it calls, and numba itself looks at one file only. Where nothing may be
    written, each process compiles anew.

    A division by zero gives what numpy gives, not an exception: checking for one made the loops up to 60 times slower.
    """
    folder = _folder(str(Path(function.__code__.co_filename).parent))
    if folder is None:
        return cast(F, numba.njit(error_model="numpy")(function))
    config: Any = numba.config
    before = config.CACHE_DIR
    config.CACHE_DIR = folder  # Read while the function is decorated.
    try:
        return cast(F, numba.njit(cache=True, error_model="numpy")(function))
    finally:
        config.CACHE_DIR = before


@cache
def _folder(package: str) -> str | None:
    """Where a package's machine code is kept: beside its sources, else in the user's cache folder; None: nowhere."""
    digest = hashlib.sha256(numba.__version__.encode())
    for source in sorted(Path(package).glob("*.py")):
        digest.update(source.read_bytes())
    name = f"compiled-{digest.hexdigest()[:16]}"
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mizzen"
    for root in (Path(package) / "__pycache__", user / Path(package).name):
        with contextlib.suppress(OSError):
            root.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=root):
                pass
            for old in root.glob("compiled-*"):
                if old.name != name:
                    shutil.rmtree(old, ignore_errors=True)
            (root / name).mkdir(exist_ok=True)
            return str(root / name)
    return None
