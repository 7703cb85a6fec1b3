"""Separate user ids for tenants: which files a tenant's tasks can access, and whether this machine supports it.

If the agent runs as root, each tenant's tasks run with their own user id (`AgentConfig.tenant_uids`). They cannot read
private files of the agent and the installation, or files of other tenants' tasks.
"""

import contextlib
import logging
import os
import stat
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import mizzen
from agent.launch import Owner
from agent.tasks import RunFolder
from domain.ids import checkpoint_marker_key, checkpoint_prefix
from domain.launch import LaunchDescription
from mizzen.objects.disk import was_made

TENANT_UIDS = (2_000_000, 100_000)
"""Default first user id and number of user ids, above the ranges that distributions and containers use."""
_PRIVATE = ("launches", "logs", "archives", "tetris", ".staging")
_PRIVATE_MODE = 0o700
_warned: set[Path] = set()
_log = logging.getLogger(__name__)
_PROBE = """
import os, sys
root, uid, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
sys.path.insert(0, root)
from agent.mount_view import enter_view, view_for
view = view_for(uid, [folder, *sys.argv[4:]])
if view:
    enter_view(view)
os.setgroups([]); os.setgid(uid); os.setuid(uid)
os.stat(folder + "/.")
os.execv(sys.executable, [sys.executable, "-I", "-c", "import mizzen"])
"""


def needed_paths(launch: LaunchDescription, run: RunFolder) -> list[str]:
    """Returns the folders that a task must be able to enter.

    These are its own folder, those of Python and the SDK, and, if the bucket is a local folder, its checkpoints and
    tables.
    """
    uris = [launch.checkpoint.uri, *launch.tables.values()]
    return [*_python_paths(), str(run.path), *(str(path) for uri in uris if (path := _local(uri)) is not None)]


def local_checkpoints(launch: LaunchDescription) -> Path | None:
    """Returns the folder of the workload's checkpoints; None: they are in an object store."""
    return _local(launch.checkpoint.uri)


def give_bucket(bucket_url: str, launch: LaunchDescription, owner: Owner) -> None:
    """If the bucket is a local folder, makes `owner` the owner of the workload's checkpoints, and removes tasks' access
    to folders that tasks do not need.

    Only changes the mode of folders that mizzen created. Only changes the owner of files that belong to this process's
    user. Skips symbolic links and files with several hard links.
    """
    root = _local(bucket_url)
    if root is None:
        return
    _restrict(
        root, ("", 0o711), ("checkpoints", 0o711), ("tables", 0o755), *((name, _PRIVATE_MODE) for name in _PRIVATE)
    )
    _give_checkpoints(root / checkpoint_prefix(launch.workload_id), owner)


def check_store(bucket_url: str, launch: LaunchDescription) -> None:
    """If the checkpoints are in a cluster's store, and this is a local folder, checks that it is the right folder.

    The worker that staged the attempt has checked or written a marker there. Without it, the store is not mounted on
    this machine or on the worker's host, and the tasks would start from the beginning, and save where nothing is read.
    `bucket_url` is the region's bucket.

    Raises:
        FileNotFoundError: the marker is missing. The message names the store and what to do.
    """
    root = _store(bucket_url, launch)
    key = checkpoint_marker_key(launch.workload_id)
    if root is not None and not os.path.lexists(root / key):
        raise FileNotFoundError(
            f"the store {root}: the marker {key} is missing: mount the store on this machine and on the hosts of the"
            " region's workers"
        )


def give_store(bucket_url: str, launch: LaunchDescription, owner: Owner) -> None:
    """If the checkpoints are in a cluster's store, and this is a local folder, makes `owner` their owner.

    See `give_bucket`. The folders exist (`check_store`). `bucket_url` is the region's bucket.
    """
    root = _store(bucket_url, launch)
    if root is not None:
        _restrict(root, ("", 0o711), ("checkpoints", 0o711))
        _give_checkpoints(root / checkpoint_prefix(launch.workload_id), owner)


def _store(bucket_url: str, launch: LaunchDescription) -> Path | None:
    """Returns the folder of the cluster's store that has the checkpoints; None: another place has them."""
    own, bucket, prefix = _local(launch.checkpoint.uri), _local(bucket_url), checkpoint_prefix(launch.workload_id)
    if own is None or not launch.checkpoint.uri.endswith(f"/{prefix}"):
        return None  # The folders above `own` are changed only if they are known to be those of a store.
    root = own.parent.parent
    return None if root in (bucket, root.parent) else root


def _restrict(root: Path, *modes: tuple[str, int]) -> None:
    """Creates folders, by name below `root`, and sets their modes if a store created them as this process's user.

    Other folders may be shared with other programs. Logs a warning if such a folder contains private files of mizzen
    and other users can list it.
    """
    for name, mode in modes:
        path = root / name
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=mode, parents=True)
            continue
        status = path.stat()
        now = stat.S_IMODE(status.st_mode)
        if now == mode:
            continue
        if status.st_uid == os.geteuid() and was_made(path):
            path.chmod(mode)
        elif mode == _PRIVATE_MODE and now & 0o004 and path not in _warned:
            _warned.add(path)
            _log.warning("%s: mode %o lets tasks of all tenants list it; mizzen did not create it", path, now)


def _give_checkpoints(own: Path, owner: Owner) -> None:
    own.mkdir(mode=0o700, exist_ok=True)
    for _, _, names, folder in os.fwalk(own, follow_symlinks=False):
        for name in names:
            _give(name, folder, owner)
        # The folder last: until then no other user can add files to it.
        if os.fstat(folder).st_uid == os.geteuid():
            os.fchown(folder, owner.uid, owner.gid)
            os.fchmod(folder, 0o700)


def _give(name: str, folder: int, owner: Owner) -> None:
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError:
        return
    try:
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and status.st_uid == os.geteuid():
            os.fchown(descriptor, owner.uid, owner.gid)
    finally:
        os.close(descriptor)


def why_not_separate(state_dir: Path, uids: tuple[int, int] = TENANT_UIDS) -> str | None:
    """Returns why this computer cannot run each tenant's tasks as a separate user, or None if it can.

    Starts a test process, which takes about 0.1 s.
    """
    if os.geteuid() != 0:
        return "mizzen does not run as root"
    state_dir.mkdir(parents=True, exist_ok=True)
    code = ["-I", "-c", _PROBE, str(Path(__file__).parents[1]), str(sum(uids) - 1), str(state_dir.resolve())]
    done = subprocess.run(
        [sys.executable, *code, *_python_paths()], capture_output=True, text=True, errors="replace", check=False
    )
    if done.returncode == 0:
        return None
    said = done.stderr.strip().splitlines()
    return f"another user cannot run {sys.executable} here ({said[-1] if said else f'status {done.returncode}'})"


def _python_paths() -> list[str]:
    return [sys.prefix, sys.base_prefix, str(Path(mizzen.__file__).parents[1])]


def _local(url: str) -> Path | None:
    """Returns the path in a `file:` URL, or None for other URLs."""
    parts = urlsplit(url)
    return Path(unquote(parts.path)) if parts.scheme == "file" else None
