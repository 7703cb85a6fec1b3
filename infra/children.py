"""Command lines and environments of the Python processes that mizzen starts.

The current folder must not decide what they run: it may contain a package `server` or `domain`, or a module with the
name of one of Python's own.
"""

import os
import sys
from collections.abc import Mapping


def python(*arguments: str) -> list[str]:
    """Returns the command line of this Python with `arguments`. It does not import from the current folder (`-P`)."""
    return [sys.executable, "-P", *arguments]


def environment(inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns `inherited`, changed so that a Python process imports from this process's folders in the same order.

    The order differs from that of `PYTHONPATH`: `mizzen.cli.main` puts installed packages before a project's packages.
    """
    return {**inherited, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
