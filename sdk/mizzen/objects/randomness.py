"""Gives the clouds' client libraries a random generator of their own.

The libraries draw from the global generator of `random`, for example for boundaries of uploads and for retry delays. A
save would thus change the numbers that the training draws next, and a resumed run would differ from an uninterrupted
one.
"""

import random
import sys

_own = random.Random()


def detach(*libraries: str) -> None:
    """Replace the module `random` in all loaded modules of these libraries by a separate generator."""
    for name, module in list(sys.modules.items()):
        if name.split(".", 1)[0] in libraries and getattr(module, "random", None) is random:
            module.random = _own  # type: ignore[attr-defined]
