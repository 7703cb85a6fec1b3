"""Paths of Unix sockets, which the kernel limits to 107 bytes."""

import hashlib
import os
import stat
import tempfile
from pathlib import Path

from infra.errors import StackError

_LONGEST_FOLDER = 80
"""Maximum length of the folder's path; the rest is for the name of the socket."""


def short_path(folder: Path) -> Path:
    """Returns a path of `folder` that is short enough for sockets in it: its own path, or a symbolic link to it.

    Links are in a folder of the system's temporary folder that only this user can enter.

    Raises:
        StackError: that folder belongs to another user, or cannot be made.
    """
    if len(os.fsencode(folder)) <= _LONGEST_FOLDER:
        return folder
    links = Path(tempfile.gettempdir()) / f"mizzen-{os.geteuid()}"
    link = links / hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]
    try:
        links.mkdir(mode=0o700, exist_ok=True)
        status = links.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise StackError(f"{links}: must be a folder of mode 700 that belongs to this user; remove it")
        if not link.is_symlink() or link.readlink() != folder:
            draft = links / f"{link.name}.{os.getpid()}"
            draft.unlink(missing_ok=True)
            draft.symlink_to(folder)
            draft.replace(link)
    except OSError as error:
        raise StackError(f"{links}: {error.strerror}; sockets in {folder} need a shorter path") from None
    return link
