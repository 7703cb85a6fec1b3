"""Sandboxes of tasks: namespaces that the tasks of an attempt on a machine share, and that nothing else is in.

A small process per attempt, the holder, keeps a PID, a mount, an IPC and a UTS namespace, and a user namespace if the
agent is not root. bubblewrap makes them, with the folders that the tasks may see (`agent.sandbox_view`). Each shim of
the attempt joins the PID namespace, and its task joins the others: ranks on one machine meet in `/dev/shm` and by IPC.
The network is that of the machine. The attempt's folder contains

    private/lock            each shim of the attempt holds a shared lock on it while its task runs
    private/making          a shim locks it while it starts the holder
    private/holder.json     identity of the holder: pid, start time, boot id
    private/tmp, var-tmp    `/tmp` and `/var/tmp` of the tasks

The holder waits for an exclusive lock and then ends, and the kernel kills what is left in the namespaces. So nothing
survives the last shim, whatever killed it. Uses the standard library only, because the shim imports this module.
"""

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from agent.records import publish

FOLDERS = {"tmp": "/tmp", "var-tmp": "/var/tmp"}
"""Folders in `private`, and where the tasks see them."""
_LOCK, _MAKING, _HOLDER = "lock", "making", "holder.json"
_FIRST, _OTHERS = ("user", "pid"), ("ipc", "uts", "mnt")
"""Namespaces in the order in which shims and then tasks join them."""
_WAITS = "echo; exec flock 0"
"""What the holder runs: it writes that the namespaces are complete, and waits for the lock, which is its input."""
_ENDING_S = 1.0
_setns = ctypes.CDLL(None, use_errno=True).setns


@dataclass(frozen=True)
class Sandbox:
    """A sandbox that this process keeps alive."""

    folder: str
    lock: int
    namespaces: dict[str, int]
    """Descriptors of the namespaces to join, by name."""
    proc: str
    """Path of `/proc` as the processes in the sandbox see it."""

    def fork_inside(self) -> None:
        """Continues in a child in the sandbox's PID namespace. This process ends, and a subreaper adopts the child.

        Raises:
            OSError: the holder was killed.
        """
        self._join(_FIRST)
        if os.fork() != 0:
            os._exit(0)

    def enter(self) -> None:
        """Joins the other namespaces: this process then sees only the folders of the sandbox.

        Raises:
            OSError: the holder was killed.
        """
        self._join(_OTHERS)

    def enter_view(self) -> None:
        """Joins all namespaces but that of processes, which only a child could join.

        Raises:
            OSError: the holder was killed.
        """
        self._join(name for name in (*_FIRST, *_OTHERS) if name != "pid")

    def release(self) -> None:
        """Lets the sandbox go. The last process that does so removes the folders, and is then killed with the sandbox
        if it is inside.
        """
        let_go(self.folder, self.lock)

    def _join(self, names: Iterable[str]) -> None:
        for name in names:
            if name in self.namespaces and _setns(self.namespaces[name], 0) != 0:
                code = ctypes.get_errno()
                raise OSError(code, f"{os.strerror(code)}: the {name} namespace of the sandbox")


def hold(folder: str, command: Sequence[str]) -> Sandbox:
    """Returns the sandbox of `folder` (`private`), which it starts with the bubblewrap `command` if there is none.

    The process must have one thread.

    Raises:
        OSError: the machine does not allow the namespaces, or the disk is full. bubblewrap writes why to descriptor 2.
    """
    lock = claim(folder)
    making = -1
    try:
        making = _open(f"{folder}/{_MAKING}")
        fcntl.flock(making, fcntl.LOCK_EX)
        return _opened(folder, lock, _holder(folder) or _start(folder, command))
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
        lock = _open(f"{folder}/{_LOCK}")  # Made if it is missing: somebody may have deleted it.
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
    """Takes a lock, unless others hold it."""
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
        return True
    return False


def _start(folder: str, command: Sequence[str]) -> int:
    """Starts the holder, waits until its namespaces are complete, and returns its pid."""
    info, telling = os.pipe()
    ready, saying = os.pipe()
    waiting = _open(f"{folder}/{_LOCK}")
    try:
        # It outlives this process, and the terminal's signals do not reach it.
        holder = subprocess.Popen(
            [*command, "--info-fd", str(telling), "--", "/bin/sh", "-c", _WAITS],
            pass_fds=(telling,), stdin=waiting, stdout=saying, cwd="/", env={}, start_new_session=True,
        )  # fmt: skip
        os.close(telling)
        os.close(saying)
        telling = saying = -1
        if os.read(ready, 1):
            pid = int(json.loads(os.read(info, 4096))["child-pid"])
            publish(f"{folder}/{_HOLDER}", {"pid": pid, "start": _started(pid), "boot_id": _boot_id()})
            holder.returncode = 0  # It is not to be waited for.
            return pid
        holder.wait()
    finally:
        for descriptor in (info, ready, waiting, telling, saying):
            if descriptor >= 0:
                os.close(descriptor)
    raise PermissionError(f"bubblewrap cannot make a sandbox (status {holder.returncode})")


def of_process(pid: int) -> Sandbox:
    """Returns the namespaces of another process, such as one in a container. They are not held, and not to be released.

    Raises:
        OSError: the process has ended.
    """
    return _opened("", -1, pid)


def _opened(folder: str, lock: int, pid: int) -> Sandbox:
    """Opens the namespaces of the holder, so that they can be joined from any mount namespace."""
    own = os.open(f"/proc/{pid}/ns", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        namespaces = {
            name: os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=own)
            for name in (*_FIRST, *_OTHERS)
            if os.readlink(name, dir_fd=own) != os.readlink(f"/proc/self/ns/{name}")
        }
    finally:
        os.close(own)
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
