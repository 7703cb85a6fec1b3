"""Private `/tmp`, `/var/tmp` and `/dev/shm` for each attempt on a machine, which its tasks there share.

What tasks write there must not stay on the machine, and tenants must not see each other's files. The tasks of an
attempt still meet there: NCCL and torch pass data through `/dev/shm`. The attempt's folder contains

    private/lock            each shim of the attempt holds a shared lock on it while its task runs
    private/making          a shim locks it while it creates the other folders
    private/tmp, var-tmp    bound to `/tmp` and `/var/tmp` in the mount namespaces of the tasks
    private/shm             a file system in memory, bound to `/dev/shm`

Only root may enter `private`, because every task on the machine can read the path of this folder in the list of mounts.
The shim that ends last removes them, and the agent removes what a killed shim has left. Mounting needs root. Uses the
standard library only, because the shim imports this module.
"""

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable

from agent.mount_view import bind, detach, mount_memory, new_namespace

PLACES = {"tmp": "/tmp", "var-tmp": "/var/tmp", "shm": "/dev/shm"}
_LOCK = "lock"
_MAKING = "making"
_PROBE = """
import os, sys
sys.path.insert(0, sys.argv[1])
from agent.scratch import enter, hold, release
lock = hold(sys.argv[2])
pid = os.fork()
if pid == 0:
    enter(sys.argv[2], [])
    os.close(os.open("/tmp/x", os.O_CREAT | os.O_WRONLY))
    os._exit(0)
status = os.waitpid(pid, 0)[1]
release(lock, sys.argv[2])
sys.exit(bool(status))
"""


def hidden(paths: Iterable[str]) -> list[str]:
    """Returns those of `paths` that are below one of the private folders, so that `enter` must bind them."""
    real = sorted({os.path.realpath(path) for path in paths})
    return [
        path for path in real if os.path.isdir(path) and any(path.startswith(f"{place}/") for place in PLACES.values())
    ]


def hold(folder: str) -> int:
    """Creates the private folders in `folder` if they are missing; returns a descriptor with a shared lock on them.

    Raises:
        OSError: this process may not mount, or the disk is full.
    """
    while True:
        os.makedirs(os.path.dirname(folder), exist_ok=True)
        # Not `makedirs`: it fails if another process removes the folder between its two steps.
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        try:
            os.chmod(folder, 0o700)  # Tasks reach the folders in it by their mounts, and those of others not at all.
            lock = _open(f"{folder}/{_LOCK}")
        except FileNotFoundError:
            continue  # Another process has removed the folder meanwhile.
        fcntl.flock(lock, fcntl.LOCK_SH)
        if _is_current(lock, folder):
            break
        os.close(lock)  # Another process has removed the folders meanwhile.
    making = -1
    try:
        making = _open(f"{folder}/{_MAKING}")
        fcntl.flock(making, fcntl.LOCK_EX)
        for name in PLACES:
            path = f"{folder}/{name}"
            if not os.path.isdir(path):
                os.mkdir(path)
            if name == "shm" and not os.path.ismount(path):
                mount_memory(path)
            os.chmod(path, 0o1777)
    except OSError:
        release(lock, folder)
        raise
    finally:
        if making >= 0:
            os.close(making)
    return lock


def enter(folder: str, paths: Iterable[str]) -> None:
    """Moves this process into a new mount namespace with the private folders, in which `paths` are still visible.

    Raises:
        OSError: the kernel does not allow it.
    """
    places = [(f"{folder}/{name}", place) for name, place in PLACES.items() if os.path.isdir(place)]
    new_namespace()
    # Opened first, because the private folders themselves may be below one of the places.
    opened = [(os.open(source, os.O_PATH), target) for source, target in [*places, *((path, path) for path in paths)]]
    for descriptor, target in opened:
        os.makedirs(target, mode=0o755, exist_ok=True)
        bind(f"/proc/self/fd/{descriptor}", target)
        os.close(descriptor)


def release(lock: int, folder: str) -> None:
    """Closes the descriptor of `hold`. Removes the private folders if no other process holds them."""
    try:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(folder)
    finally:
        os.close(lock)


def clear(folder: str) -> bool:
    """Removes the private folders in `folder` unless a shim holds or removes them. Returns whether none are left."""
    try:
        lock = _open(f"{folder}/{_LOCK}")  # Made if it is missing: somebody may have deleted all but what is mounted.
    except FileNotFoundError:
        return not os.path.exists(folder)
    try:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_current(lock, folder):
                _remove(folder)
    finally:
        os.close(lock)
    return not os.path.exists(folder)


def why_shared(folder: str) -> str | None:
    """Returns why tasks on this machine cannot have private folders, or None if they can. Takes about 0.1 s.

    `folder` is where the test creates some, and removes them.
    """
    if os.geteuid() != 0:
        return "mizzen does not run as root"
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    code = [sys.executable, "-I", "-S", "-c", _PROBE, root, folder]
    done = subprocess.run(code, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode == 0:
        return None
    said = done.stderr.strip().splitlines()
    return f"this machine does not allow mounts ({said[-1] if said else f'status {done.returncode}'})"


def _open(path: str) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _remove(folder: str) -> None:
    with contextlib.suppress(OSError):
        if os.path.ismount(f"{folder}/shm"):
            detach(f"{folder}/shm")
    with contextlib.suppress(OSError):
        # The lock last: until then, a process that wants the folders waits for it.
        for name in sorted(os.listdir(folder), key=lambda name: name == _LOCK):
            path = f"{folder}/{name}"
            (shutil.rmtree(path, ignore_errors=True) if os.path.isdir(path) else os.unlink(path))
        os.rmdir(folder)


def _is_current(lock: int, folder: str) -> bool:
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(lock), os.stat(f"{folder}/{_LOCK}"))
    return False
