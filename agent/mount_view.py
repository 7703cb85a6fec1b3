"""Mount namespaces that give a task access to the paths it needs below folders that only root may enter.

mizzen's code or data may be below a folder such as /root, which a task of another user cannot enter. Instead of opening
that folder to all users, or running tasks as root, the task gets its own mount namespace, in which the folder contains
only the paths that the task needs. Uses the standard library only, because the shim imports this module.
"""

import ctypes
import os
import stat

_CLONE_NEWNS = 0x00020000
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_SLAVE = 2, 4, 4096, 16384, 1 << 19
_MNT_DETACH = 2
_libc = ctypes.CDLL(None, use_errno=True)


def view_for(uid: int, paths: list[str]) -> dict[str, list[str]]:
    """Maps each topmost folder that `uid` may not enter to the folders in `paths` below it. Skips missing paths."""
    view: dict[str, list[str]] = {}
    for path in sorted({os.path.realpath(path) for path in paths}):
        parts = path.strip("/").split("/")
        for depth in range(1, len(parts)):
            above = "/" + "/".join(parts[:depth])
            if not os.path.exists(path):
                break
            if not _may_enter(above, uid):
                view.setdefault(above, []).append(path)
                break
    return view


def _may_enter(path: str, uid: int) -> bool:
    status = os.stat(path)
    return bool(status.st_mode & (stat.S_IXUSR if status.st_uid == uid else stat.S_IXOTH))


def enter_view(view: dict[str, list[str]]) -> None:
    """Moves this process into a new mount namespace in which each folder in `view` contains only its listed paths.

    The process must run as root.

    Raises:
        OSError: the kernel does not allow it.
    """
    new_namespace()
    for folder, paths in view.items():
        opened = [(os.open(path, os.O_PATH), path) for path in paths if os.path.isdir(path)]
        _mount("tmpfs", folder, "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=0755,size=1m")
        for descriptor, path in opened:
            os.makedirs(path, mode=0o755, exist_ok=True)
            bind(f"/proc/self/fd/{descriptor}", path)
            os.close(descriptor)


def new_namespace() -> None:
    """Moves this process into a new mount namespace. Mounts in it are not visible outside.

    What is unmounted outside is unmounted in it, too: a task must not keep the memory of others' `/dev/shm`.

    Raises:
        OSError: the kernel does not allow it.
    """
    _check(_libc.unshare(_CLONE_NEWNS))
    _mount("none", "/", None, _MS_REC | _MS_SLAVE, None)


def bind(source: str, target: str) -> None:
    """Makes the folder `source` visible at `target`, with the mounts below it.

    Raises:
        OSError: the kernel does not allow it.
    """
    _mount(source, target, None, _MS_BIND | _MS_REC, None)


def mount_memory(target: str) -> None:
    """Mounts an empty file system in memory at `target`, in which every user may create files.

    Raises:
        OSError: the kernel does not allow it.
    """
    _mount("tmpfs", target, "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=1777")


def detach(target: str) -> None:
    """Unmounts what is mounted at `target`; processes that still use it keep it.

    Raises:
        OSError: nothing is mounted there, or the kernel does not allow it.
    """
    _check(_libc.umount2(os.fsencode(target), _MNT_DETACH), target)


def _mount(source: str, target: str, kind: str | None, flags: int, options: str | None) -> None:
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    _check(_libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3]), target)


def _check(result: int, path: str | None = None) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), path)
