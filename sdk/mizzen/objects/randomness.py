"""Keeps the clouds' libraries away from the random generator that a training shares with them.

They draw from the module `random`: boundaries of uploads, pauses before a request is tried again. A save would so
change what the training draws next, and a run that was interrupted would not be the run that was not.
"""

import random
import sys

_own = random.Random()


def detach(*libraries: str) -> None:
    """Give what is loaded of these libraries a generator of its own in the place of the module `random`."""
    for name, module in list(sys.modules.items()):
        if name.split(".", 1)[0] in libraries and getattr(module, "random", None) is random:
            module.random = _own  # type: ignore[attr-defined]
