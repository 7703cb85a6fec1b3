"""The lock of a network interface: one process at a time shapes its traffic."""

import contextlib
import fcntl
import os
import time
from pathlib import Path

_FOLDER = Path("/run")
PATIENCE_S = 5.0
_RETRY_S = 0.02


def lock_interface(interface: str, index: int) -> tuple[int, Path]:
    """Locks an interface of this network namespace; returns the descriptor that holds the lock, and the lock's file.

    The lock is held until every copy of the descriptor is closed. Waits, because after the end of an agent its guardian
    still restores the interface.

    Raises:
        OSError: another process holds the lock, or this process is not root.
    """
    namespace = Path("/proc/thread-self/ns/net").stat().st_ino
    path = _FOLDER / f"mizzen-shaping-{namespace}-{index}"
    give_up_s = time.monotonic() + PATIENCE_S
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_ino == os.fstat(descriptor).st_ino:
                    return descriptor, path
            os.close(descriptor)  # The last holder removed the file in between.
        except OSError:
            os.close(descriptor)
            if time.monotonic() > give_up_s:
                raise OSError(f"interface {interface}: another process of mizzen shapes its traffic") from None
            time.sleep(_RETRY_S)


def unlock_interface(descriptor: int, path: Path) -> None:
    """Removes the file and closes this process's copy of the descriptor."""
    path.unlink(missing_ok=True)
    os.close(descriptor)
