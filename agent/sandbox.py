"""Sandboxes of tasks: namespaces that are shared only by the tasks of one attempt on a machine.

A small process per attempt, the holder, keeps a PID, a mount, an IPC and a UTS namespace, and user namespaces if the
agent is not root. bubblewrap makes them, with the folders that the tasks may see (`agent.sandbox_view`). Each shim of
the attempt joins the PID namespace, and its task joins the others: ranks on one machine meet in `/dev/shm` and by IPC.
The network is that of the machine, or one of the sandbox (`agent.task_network`). The attempt's folder contains

    private/lock            each shim of the attempt holds a shared lock on it while its task runs
    private/making          a shim locks it while it starts the holder
    private/holder.json     identity of the holder: pid, start time, boot id
    private/tmp, var-tmp    `/tmp` and `/var/tmp` of the tasks

The holder waits for an exclusive lock and then ends, and the kernel kills what is left in the namespaces. So no process
survives the last shim, however the shim ended. Uses the standard library only, because the shim imports this module.
"""

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agent import task_network
from agent.records import publish
from agent.seccomp import program

FOLDERS = {"tmp": "/tmp", "var-tmp": "/var/tmp"}
"""Folders in `private`, and where the tasks see them."""
_LOCK, _MAKING, _HOLDER = "lock", "making", "holder.json"
_FIRST, _OTHERS = ("owner", "pid"), ("ipc", "uts", "net", "mnt", "user")
"""Namespaces in the order in which shims and then tasks join them. `owner` is the user namespace to which the others
belong, in which an ordinary user's shim is root. bubblewrap makes a second one for the tasks, in which they are not."""
_GET_OWNER = 0xB701
"""The request (ioctl) NS_GET_USERNS: opens the user namespace to which a namespace belongs."""
_WAITS = "echo; exec flock 0"
"""Shell script of the holder: it reports that the namespaces are complete, and waits for the lock, its input."""
_WAITS_CLOSED = """
import ctypes, fcntl, os
libc = ctypes.CDLL(None)
libc.prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
libc.signal(2, None)  # Python's handler of SIGINT. The kernel drops signals without a handler to the first process.
libc.signal(17, ctypes.c_void_p(1))  # Ignores SIGCHLD: so the kernel removes the ended children of killed shims.
os.write(1, b"x")
fcntl.flock(0, fcntl.LOCK_EX)
"""
"""The same program in Python, for sandboxes whose tasks run as the holder's user. Tasks cannot debug this process, and
cannot read its memory or its files."""
_ENDING_S = 1.0
_PR_SET_DUMPABLE = 4
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Sandbox:
    """A sandbox that this process keeps alive."""

    folder: str
    lock: int
    namespaces: dict[str, int]
    """Descriptors of the namespaces to join, by name."""
    proc: str
    """Path of `/proc` as the processes in the sandbox see it."""
    processes: int = 0
    """Maximum number of processes and threads in the user namespace; 0: no limit."""

    def fork_inside(self) -> None:
        """Continues in a child in the sandbox's PID namespace. This process ends, and a subreaper adopts the child.

        Raises:
            OSError: the holder was killed.
        """
        self._join(_FIRST)
        if os.fork() != 0:
            os._exit(0)
        # The tasks see this process. Those with its user can then not read or debug it.
        _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)

    def enter(self) -> None:
        """Joins the other namespaces: this process then sees only the folders of the sandbox.

        Raises:
            OSError: the holder was killed.
        """
        self._join(_OTHERS)
        if self.processes:
            resource.setrlimit(resource.RLIMIT_NPROC, (self.processes, self.processes))

    def release(self) -> None:
        """Releases the sandbox. The last process to do so removes the folders, and is killed if it is inside."""
        let_go(self.folder, self.lock)

    def _join(self, names: Iterable[str]) -> None:
        for name in names:
            if name in self.namespaces and _libc.setns(self.namespaces[name], 0) != 0:
                code = ctypes.get_errno()
                raise OSError(code, f"{os.strerror(code)}: the {name} namespace of the sandbox")


def hold(folder: str, command: Sequence[str], network: Mapping[str, Any] | None = None, processes: int = 0) -> Sandbox:
    """Returns the sandbox of `folder` (`private`), which it starts with the bubblewrap `command` if there is none.

    The process must have one thread. `network`: `program` and `cgroup` of `agent.task_network.serve`, if `command`
    makes a network namespace. `processes`: `Sandbox.processes`, without the holder.

    Raises:
        OSError: the machine does not allow the namespaces, or the disk is full. bubblewrap writes why to descriptor 2.
    """
    lock = claim(folder)
    making = -1
    try:
        making = _open(f"{folder}/{_MAKING}")
        fcntl.flock(making, fcntl.LOCK_EX)
        held = _opened(folder, lock, _holder(folder) or _start(folder, command, network))
        return replace(held, processes=processes + 1) if processes else held
    except BaseException as error:
        let_go(folder, lock)
        if isinstance(error, PermissionError) and error.errno == errno.EACCES:
            # Landlock lets no process into the namespaces of another scope.
            raise PermissionError(
                errno.EACCES, "the process that started the attempt's first task was killed"
            ) from None
        raise
    finally:
        if making >= 0:
            os.close(making)


def claim(folder: str) -> int:
    """Makes the folders in `folder` (`private`) if they are missing, and returns a lock that keeps them (`let_go`).

    Raises:
        OSError: the disk is full.
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
        os.close(lock)  # Another process has removed the folder meanwhile.
    try:
        for name in FOLDERS:
            path = f"{folder}/{name}"
            with contextlib.suppress(FileExistsError):
                os.mkdir(path)
            os.chmod(path, 0o1777)
    except BaseException:
        let_go(folder, lock)
        raise
    return lock


def let_go(folder: str, lock: int) -> None:
    """Closes a lock of `claim`, and removes the folders if no other process has one."""
    try:
        if _locked(lock, fcntl.LOCK_EX):
            _remove(folder)
    finally:
        os.close(lock)


def clear(folder: str) -> bool:
    """Removes the folders in `folder` unless a shim holds or removes them. Returns whether none are left."""
    try:
        lock = _open(f"{folder}/{_LOCK}")  # Created if it is missing, because it may have been deleted.
    except FileNotFoundError:
        return not os.path.exists(folder)
    give_up_s = time.monotonic() + _ENDING_S
    try:
        while not _locked(lock, fcntl.LOCK_EX):
            # A shim holds a shared lock. A holder that ends has an exclusive one for some milliseconds.
            if _locked(lock, fcntl.LOCK_SH) or time.monotonic() > give_up_s:
                return False
            time.sleep(0.005)
        if _is_current(lock, folder):
            _remove(folder)
    finally:
        os.close(lock)
    return not os.path.exists(folder)


def remove_tree(path: str | os.PathLike[str]) -> None:
    """Removes a folder with its content as far as possible. Folders that a task has nested can be of any depth."""
    with contextlib.suppress(RecursionError):  # From a depth of about a thousand.
        shutil.rmtree(path, ignore_errors=True)
    if os.path.lexists(path):
        subprocess.run(["rm", "-rf", "--one-file-system", "--", path], stderr=subprocess.DEVNULL, check=False)


def _locked(lock: int, kind: int) -> bool:
    """Takes a lock unless another process holds it; returns whether it was taken."""
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
        return True
    return False


def _start(folder: str, command: Sequence[str], network: Mapping[str, Any] | None) -> int:
    """Starts the holder, waits until its namespaces are complete, and returns its pid."""
    info, telling = os.pipe()
    ready, saying = os.pipe()
    ends, living = (-1, -1) if network is None else os.pipe()
    waiting = _open(f"{folder}/{_LOCK}")
    # The holder needs nothing that the filter of the tasks refuses.
    filtering = os.memfd_create("seccomp", os.MFD_CLOEXEC)
    try:
        os.pwrite(filtering, program(), 0)
        kept = ["--seccomp", str(filtering), *([] if network is None else ["--sync-fd", str(living)])]
        if network is not None:
            task_network.prepare(folder)
        # It outlives this process, and the terminal's signals do not reach it.
        holder = subprocess.Popen(
            [*command, *kept, "--info-fd", str(telling), *_waits()],
            pass_fds=(telling, filtering) if network is None else (telling, filtering, living),
            stdin=waiting, stdout=saying, cwd="/", env={}, start_new_session=True,
        )  # fmt: skip
        os.close(telling)
        os.close(saying)
        telling = saying = -1
        if os.read(ready, 1):
            pid = int(json.loads(os.read(info, 4096))["child-pid"])
            if network is not None:
                with _owner_of(pid) as owner:
                    task_network.serve(folder, **network, pid=pid, owner=owner, ends=ends)
            publish(f"{folder}/{_HOLDER}", {"pid": pid, "start": _started(pid), "boot_id": _boot_id()})
            holder.returncode = 0  # Prevents a warning: this process does not wait for it.
            return pid
        holder.wait()
    finally:
        for descriptor in (info, ready, waiting, telling, saying, ends, living, filtering):
            if descriptor >= 0:
                os.close(descriptor)
    raise PermissionError(f"bubblewrap cannot make a sandbox (status {holder.returncode})")


def _waits() -> Sequence[str]:
    if os.geteuid() == 0:
        return "--", "/bin/sh", "-c", _WAITS
    # Otherwise bubblewrap itself would be the first process, which tasks could debug.
    return "--as-pid-1", "--", sys.executable, "-I", "-S", "-c", _WAITS_CLOSED


@contextlib.contextmanager
def _owner_of(pid: int) -> Iterator[int | None]:
    """Opens the user namespace to which the namespaces of a process belong; yields None if it is the caller's."""
    if os.readlink(f"/proc/{pid}/ns/user") == os.readlink("/proc/self/ns/user"):
        yield None
        return
    mounts = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    try:
        owner = fcntl.ioctl(mounts, _GET_OWNER)
    finally:
        os.close(mounts)
    try:
        yield owner
    finally:
        os.close(owner)


def of_process(pid: int) -> Sandbox:
    """Returns the namespaces of another process, such as one in a container. The caller must not release them.

    Raises:
        OSError: the process has ended.
    """
    return _opened("", -1, pid)


def _opened(folder: str, lock: int, pid: int) -> Sandbox:
    """Opens the namespaces of the holder, so that they can be joined from any mount namespace."""
    # The kernel lists the folder only to the owner, which is root if the process is closed to others.
    own = os.open(f"/proc/{pid}/ns", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        namespaces = {
            name: os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=own)
            for name in ("pid", *_OTHERS)
            if os.readlink(name, dir_fd=own) != os.readlink(f"/proc/self/ns/{name}")
        }
    finally:
        os.close(own)
    if "user" in namespaces:
        namespaces["owner"] = fcntl.ioctl(namespaces["mnt"], _GET_OWNER)
        os.set_inheritable(namespaces["owner"], False)
        if os.path.sameopenfile(namespaces["owner"], namespaces["user"]):  # It can be joined once only.
            os.close(namespaces.pop("user"))
    proc = os.open(f"/proc/{pid}/root/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    return Sandbox(folder, lock, namespaces, f"/proc/self/fd/{proc}")


def _holder(folder: str) -> int | None:
    """Returns the pid of the holder if it is alive."""
    try:
        with open(f"{folder}/{_HOLDER}") as file:
            body = json.load(file)
        if body["boot_id"] == _boot_id() and body["start"] == _started(body["pid"]):
            return int(body["pid"])
    except (OSError, ValueError, KeyError):
        pass
    return None


def _started(pid: int) -> int:
    with open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    if fields[0] in b"ZX":
        raise ProcessLookupError(pid)
    return int(fields[19])


def _boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def _open(path: str) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _remove(folder: str) -> None:
    with contextlib.suppress(OSError):
        task_network.end(folder)
        # The lock last: until then, a process that wants the folders waits for it.
        for name in sorted(os.listdir(folder), key=lambda name: name == _LOCK):
            path = f"{folder}/{name}"
            if os.path.isdir(path):
                remove_tree(path)
            else:
                os.unlink(path)
        os.rmdir(folder)


def _is_current(lock: int, folder: str) -> bool:
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(lock), os.stat(f"{folder}/{_LOCK}"))
    return False
