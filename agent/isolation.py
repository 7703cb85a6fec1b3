"""Determines a machine's mode of isolation (`domain.isolation`), and the files that a tenant's tasks can access.

If the agent runs as root, each tenant's tasks run with their own user id (`AgentConfig.tenant_uids`). They cannot read
private files of the agent and the installation, or files of other tenants' tasks.
"""

import contextlib
import json
import logging
import os
import stat
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from agent.launch import Owner
from agent.sandbox_view import bubblewrap, existing, sandbox_command
from agent.state import make_folder
from agent.task_network import slirp4netns
from agent.tasks import RunFolder
from domain.ids import checkpoint_marker_key, checkpoint_prefix
from domain.isolation import Isolation, TaskNetwork, sandbox_path
from domain.launch import LaunchDescription
from infra.errors import ConfigurationError
from mizzen.objects.disk import was_made

TENANT_UIDS = (2_000_000, 100_000)
"""Default first user id and number of user ids, above the ranges that distributions and containers use."""
_PRIVATE = ("launches", "logs", "outputs", "archives", "tetris", ".staging")
_PRIVATE_MODE = 0o700
_warned: set[Path] = set()
_log = logging.getLogger(__name__)
_PROBE = """
import json, os, sys
told = json.load(sys.stdin)
sys.path.insert(0, told["agent"])
from agent import sandbox, seccomp
held = None
if told["sandbox"] is not None:
    held = sandbox.hold(**told["sandbox"])
    held.fork_inside()
pid = os.fork()
if pid == 0:
    if held is not None:
        held.enter()
    if told["uid"] is not None:
        os.setgroups([]); os.setgid(told["uid"]); os.setuid(told["uid"])
    if held is not None:
        seccomp.restrict()
    if held is None:
        os.stat(told["folder"] + "/.")  # Sandboxes see folders of tasks wherever these are.
    os.execv(sys.executable, [sys.executable, "-I", "-c", "import mizzen; print('ok')"])
os.waitpid(pid, 0)
if held is not None:
    held.release()
"""
_PROBE_S = 60.0
_COUNTS = """
import ctypes, os, resource, sys
if ctypes.CDLL(None).unshare(0x10000000) != 0:
    sys.exit(1)
resource.setrlimit(resource.RLIMIT_NPROC, (2, 2))
if os.fork() == 0:
    os._exit(0)
"""
"""In a user namespace (CLONE_NEWUSER) of two processes: both are allowed, in addition to others of this user."""


def sandbox_of(
    private: Path,
    launch: LaunchDescription,
    runs: Sequence[RunFolder],
    paths: Sequence[str],
    shm_bytes: int,
    devices: Mapping[str, str],
    network: Mapping[str, Any] | None = None,
    processes: int = 0,
) -> dict[str, Any]:
    """Returns the arguments of `agent.sandbox.hold` for the tasks `runs` of an attempt.

    They see their own folders, those of Python and the SDK, `paths` (`AgentConfig.paths`), and, if the bucket is a
    local folder, their checkpoints and tables. They can change only their working directories, reports and checkpoints.
    At the absolute paths of the job's mounts they see the files of the first task (`RunFolder.mounted`). `shm_bytes` is
    the size of `/dev/shm`; 0: half of the machine's memory. `devices` is as in `sandbox_command`; `network` and
    `processes` are as in `agent.sandbox.hold`.
    """
    program = bubblewrap()
    if program is None:
        raise FileNotFoundError("bubblewrap is not installed any more")
    reads, writes = task_paths(launch, runs, paths)
    mounted = (run.mounted(launch.jobs[run.job].mounts) for run in reversed(runs))
    mounts = {path: str(place) for one in mounted for path, place in one.items()}
    command = sandbox_command(
        program,
        private,
        reads=reads,
        writes=writes,
        shm_bytes=shm_bytes,
        devices=devices,
        mounts=mounts,
        own_network=network is not None,
    )
    return {"folder": str(private), "command": command, "network": network, "processes": processes}


def task_paths(
    launch: LaunchDescription, runs: Sequence[RunFolder], paths: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Returns two lists of existing paths of this machine: what the tasks `runs` may read, and what they may write.

    `paths` has the meaning of `AgentConfig.paths`.
    """
    listed = [sandbox_path(path) for path in paths]
    for entry in map(Path, dict(listed)):
        if not entry.exists() and entry not in _warned:
            _warned.add(entry)
            _log.warning("tasks.paths: %s does not exist on this machine, so tasks do not see it", entry)
    tables = [str(path) for uri in launch.tables.values() if (path := _local(uri)) is not None]
    reads = [*tables, *(str(run.path) for run in runs), *(path for path, may in listed if not may)]
    writes = [*(str(path) for run in runs for path in (run.work, run.report.parent)), *(p for p, may in listed if may)]
    if (own := local_checkpoints(launch)) is not None:
        writes.append(str(own))
    return existing(reads), existing(writes)


@cache
def counts_processes() -> bool:
    """Whether the kernel applies an ordinary user's limits on processes to each user namespace alone (Linux 5.14).

    Older ones count all processes of the user. False for root.
    """
    probe = [sys.executable, "-I", "-S", "-c", _COUNTS]
    return os.geteuid() != 0 and subprocess.run(probe, stderr=subprocess.DEVNULL, check=False).returncode == 0


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

    The worker that staged the attempt has checked or written a marker in the store. If the marker is missing, the store
    is not mounted on this machine or on the worker's host: the tasks would start from the beginning, and save to a
    place that nothing reads. `bucket_url` is the region's bucket.

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
    """Returns the folder of the cluster's store with the checkpoints; None: they are stored elsewhere."""
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
        # Change the folder itself last: until then no other user can add files to it.
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


def choose(wanted: Isolation | None, state_dir: Path, *, uid: int | None, is_lent: bool) -> tuple[Isolation, str]:
    """Returns the mode of a machine, and why no stronger mode is used (empty: it is the strongest, or was set).

    Args:
        wanted: the mode that the operator or owner has set; None: the strongest that the machine supports.
        state_dir: the folder of the agent's state.
        uid: a user id for tasks, if the agent runs as root; None: tasks run as the agent's user.
        is_lent: whether the machine has an owner; it then has at least a sandbox, unless `wanted` says less.

    Raises:
        ConfigurationError: the machine does not support the wanted mode, or a lent machine has no sandbox.
    """
    why = ""
    for mode in [wanted] if wanted is not None else sorted(Isolation, key=lambda mode: -mode.rank):
        reason = why_not(mode, state_dir, uid)
        if reason is None:
            return mode, why
        why = f"{why}; {reason}" if why else reason
        if wanted is not None:
            raise ConfigurationError(f"isolation {wanted}: not possible on this machine: {why}")
        if is_lent:
            raise ConfigurationError(
                f"isolation: a lent machine needs a sandbox, which is not possible here: {why}. To lend it without,"
                f" set isolation to {Isolation.USER} or {Isolation.NONE}"
            )
    raise AssertionError("every machine has the mode none")


@cache
def why_not(mode: Isolation, state_dir: Path, uid: int | None, network: TaskNetwork = TaskNetwork.HOST) -> str | None:
    """Returns why this computer does not support a mode of isolation; None if it does. Takes about 0.2 s.

    Starts a test process. `uid` is as in `choose`. `network` is the network of the tasks; `ports` needs the mode
    `sandbox`.
    """
    if mode is Isolation.NONE:
        return None
    if mode is Isolation.USER and os.geteuid() != 0:
        return "mizzen does not run as root"
    make_folder(state_dir)
    folder, held = state_dir.resolve(), None
    if mode is Isolation.SANDBOX:
        program = bubblewrap()
        if program is None:
            return "bubblewrap is not installed"
        private, slirp = folder / f"probe.{os.getpid()}", slirp4netns()
        if (own := network is TaskNetwork.PORTS) and slirp is None:
            return "slirp4netns is not installed"
        command = sandbox_command(program, private, reads=[], writes=[], own_network=own)
        network_of = {"program": slirp, "cgroup": None} if own else None
        held = {"folder": str(private), "command": command, "network": network_of}
    told = {"agent": str(Path(__file__).parents[1]), "sandbox": held, "uid": uid, "folder": str(folder)}
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _PROBE], input=json.dumps(told), capture_output=True, text=True,
            errors="replace", check=False, timeout=_PROBE_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"a test of mode {mode} did not end within {_PROBE_S:g} s"
    if done.stdout.strip() == "ok":
        return None
    said = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
    if mode is Isolation.SANDBOX:
        return f"this machine does not allow sandboxes ({said})"
    return f"another user cannot run {sys.executable} here ({said})"


def _local(url: str) -> Path | None:
    """Returns the path in a `file:` URL, or None for other URLs."""
    parts = urlsplit(url)
    return Path(unquote(parts.path)) if parts.scheme == "file" else None
