"""Tells the files of libraries from those of a script."""

import os
import re
from functools import cache

_PACKAGES = re.compile(r"[\\/](site|dist)-packages[\\/]")
"""Also the folders of a user (`pip install --user`), or of a distribution of Linux."""


@cache
def _folders() -> tuple[str, ...]:
    import sysconfig  # Not at the start: few scripts need it there.

    return tuple(sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "purelib", "platlib"))


def is_of_library(file: str) -> bool:
    """Return whether a source file belongs to an installed library or to Python."""
    return file.startswith(_folders()) or _PACKAGES.search(file) is not None
