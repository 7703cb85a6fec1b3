"""The user that this process runs as, which may be a bare number without an entry in the user database (passwd).

Containers often run with such a number. Programs that look up their user, such as Temporal's server and Python's
`Path.home`, then depend on the variables USER and HOME.
"""

import os
import pwd
from pathlib import Path


def user_name(uid: int) -> str:
    """Returns the name of a user, or its number if it has no name."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def is_bare() -> bool:
    """Returns whether this process's user has no entry in the user database."""
    return user_name(os.geteuid()).isdigit()


def complete_environment(folder: Path) -> None:
    """If this process's user is a bare number, sets those of the variables USER and HOME that are not set.

    If the home folder is not writable, caches are kept below `folder`, which also replaces a missing home folder.
    """
    if is_bare():
        os.environ.setdefault("USER", str(os.geteuid()))
        os.environ.setdefault("HOME", str(folder))
    if not os.access(Path.home(), os.W_OK):
        os.environ.setdefault("XDG_CACHE_HOME", str(folder / "cache"))
