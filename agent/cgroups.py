"""Cgroups of tasks: limits on memory and processes, CPU weights, and killing all processes of a task at once.

Supports cgroup v1 and v2; for each controller it uses the version that has it. A task's cgroups are children of the
agent's own cgroup. A cgroup v2 that contains processes cannot give controllers to its children; in that case the
parent is a cgroup `mizzen` below the root, or, if the agent is not root, the parent of its own. A process is in one
cgroup v2 only, so a task has one for all its purposes. Uses the standard library only, because the shim imports this
module.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

CONTROLLERS = ("memory", "pids", "cpu")


@dataclass(frozen=True)
class TaskLimits:
    """Limits on the resources of one task."""

    memory_bytes: int
    processes: int
    """Maximum number of processes and threads."""
    cpus_milli: int
    """Weight when CPUs are contended, in thousandths of a CPU; not an upper limit."""

    @property
    def cpu_shares(self) -> int:
        """The weight in the unit of cgroup v1."""
        return max(2, self.cpus_milli * 1024 // 1000)

    def v1(self) -> dict[str, list[tuple[str, int]]]:
        """Returns the files and values to write in cgroup v1, by controller. Files after the first may be absent."""
        return {
            "memory": [
                ("memory.limit_in_bytes", self.memory_bytes),
                ("memory.memsw.limit_in_bytes", self.memory_bytes),
            ],
            "pids": [("pids.max", self.processes)],
            "cpu": [("cpu.shares", self.cpu_shares)],
        }

    def v2(self) -> dict[str, list[tuple[str, int]]]:
        """Returns the files and values to write in cgroup v2, by controller. Files after the first may be absent."""
        shares = min(262_144, self.cpu_shares)
        return {
            "memory": [("memory.max", self.memory_bytes), ("memory.swap.max", 0)],
            "pids": [("pids.max", self.processes)],
            "cpu": [("cpu.weight", 1 + (shares - 2) * 9999 // 262_142)],
        }


def make_cgroup(run_id: str) -> str | None:
    """Creates a cgroup v2 through which all processes of a run can be killed at once, and returns its path.

    The limits of `limit` on controllers of cgroup v2 apply to the same cgroup. Returns None if the agent may not create
    it or the kernel has no `cgroup.kill`.
    """
    parent, _ = _unified()
    if parent is None:
        return None
    path = os.path.join(parent, f"mizzen-{run_id}")
    try:
        os.makedirs(path, exist_ok=True)
    except OSError:
        return None
    return path if os.path.exists(os.path.join(path, "cgroup.kill")) else None


def limit(run_id: str, limits: TaskLimits) -> tuple[list[str], list[str]]:
    """Creates cgroups with `limits` for a run. Returns their paths, and the controllers that cannot be used.

    The run's first process must join them.
    """
    folders, missing = [], []
    parent, unified = _unified()
    for controller in CONTROLLERS:
        own = parent if controller in unified else _own().get(controller)
        values = (limits.v2() if controller in unified else limits.v1())[controller]
        path = None if own is None else os.path.join(own, f"mizzen-{run_id}")
        if path is None or not _set(path, values):
            missing.append(controller)
        elif path not in folders:
            folders.append(path)
    return folders, missing


def device_cgroup(run_id: str) -> str:
    """Creates a cgroup v1 of the controller `devices` for a run, without rules of its own, and returns its path.

    Raises:
        OSError: this process may not create it, or the machine does not have the controller in cgroup v1.
    """
    own = _own().get("devices")
    if own is None:
        raise FileNotFoundError("the controller devices of cgroup v1 is not mounted")
    path = os.path.join(own, f"mizzen-{run_id}")
    os.makedirs(path, exist_ok=True)
    return path


def _set(path: str, values: list[tuple[str, int]]) -> bool:
    made = not os.path.isdir(path)
    try:
        os.makedirs(path, exist_ok=True)
        for number, (name, value) in enumerate(values):
            try:
                with open(os.path.join(path, name), "w") as file:
                    file.write(str(value))
            except OSError:
                if number == 0:
                    raise
    except OSError:
        if made:
            with contextlib.suppress(OSError):
                os.rmdir(path)
        return False
    return True


def join(folders: Iterable[str]) -> None:
    """Moves this process into the cgroups at `folders`.

    Raises:
        OSError: the process cannot join one of the cgroups.
    """
    for path in folders:
        with open(f"{path}/cgroup.procs", "w") as file:
            file.write("0")


def processes_in(folders: Iterable[str]) -> set[int]:
    """Returns the pids of processes in the cgroups, without those in child cgroups."""
    found = set()
    for path in folders:
        with contextlib.suppress(OSError), open(f"{path}/cgroup.procs") as file:
            found |= {int(line) for line in file if line.strip() not in ("", "0")}
    return found


def processes_below(path: str) -> set[int]:
    """Returns the pids of processes in a cgroup and in all cgroups below it."""
    return processes_in(folder for folder, _, _ in os.walk(path))


_MEMORY = (
    ("memory.oom_control", "memory.limit_in_bytes", "memory.max_usage_in_bytes"),
    ("memory.events", "memory.max", "memory.peak"),
)
"""Names of the files with the kills at the memory limit, the limit and the peak, in both versions of cgroups."""


def memory_kills(folders: Iterable[str]) -> int:
    """Returns how many processes the kernel has killed at the memory limit."""
    found = 0
    for path in folders:
        for kills, _, _ in _MEMORY:
            with contextlib.suppress(OSError, ValueError):
                found = max(found, _keyed(f"{path}/{kills}").get("oom_kill", 0))
    return found


def memory_use(folders: Iterable[str], kills_before: int = 0) -> tuple[int, int] | None:
    """Returns the memory limit and peak in bytes if the kernel killed a process at the limit, else None.

    `kills_before`: the kills that do not count (`memory_kills`).
    """
    for path in folders:
        for kills, limit_file, peak_file in _MEMORY:
            with contextlib.suppress(OSError, ValueError):
                if _keyed(f"{path}/{kills}").get("oom_kill", 0) > kills_before:
                    limit_bytes = _number(f"{path}/{limit_file}")
                    try:
                        return limit_bytes, _number(f"{path}/{peak_file}")
                    except OSError:  # Kernels before 5.19 have no `memory.peak`.
                        return limit_bytes, limit_bytes
    return None


def engine_parent(path: str) -> str | None:
    """Returns the path of a cgroup v2 relative to the root of its hierarchy, for engines that make cgroups below it.

    None: this process does not see the root of the hierarchy.
    """
    for root, point, kind in _mounts():
        if kind == "cgroup2" and root == "/" and path.startswith(f"{point}/"):
            return path.removeprefix(point)
    return None


def engine_folders(parent: str) -> list[str]:
    """Returns the paths of the cgroup of `engine_parent` in the hierarchies in which it exists."""
    points = (f"{point}{parent}" for root, point, kind in _mounts() if kind.startswith("cgroup") and root == "/")
    return [path for path in points if os.path.isdir(path)]


def remove_engine_parent(parent: str) -> None:
    """Removes the cgroups of `engine_parent` that an engine has made in all hierarchies, if they are empty."""
    for path in engine_folders(parent):
        with contextlib.suppress(OSError):
            os.rmdir(path)


def _mounts() -> list[tuple[str, str, str]]:
    """Returns root, mount point and kind of the file system of each mount."""
    with open("/proc/self/mountinfo") as file:
        lines = [line.partition(" - ") for line in file]
    return [(*mount.split(" ")[3:5], source.split(" ")[0]) for mount, _, source in lines]  # type: ignore[misc]


def kill_cgroup(path: str) -> None:
    """Kills every process in a cgroup."""
    try:
        with open(f"{path}/cgroup.kill", "w") as file:
            file.write("1")
    except OSError:  # Cgroup v1 has no `cgroup.kill`.
        for pid in processes_in([path]):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def remove_cgroup(path: str) -> None:
    """Kills the processes left in a cgroup and removes it. Gives up if a process is still there after 1 s."""
    give_up_s = time.monotonic() + 1.0
    while True:
        try:
            os.rmdir(path)
            return
        except FileNotFoundError:
            return
        except OSError:  # A killed process stays in the cgroup until the kernel has released it.
            if time.monotonic() > give_up_s:
                return
        kill_cgroup(path)
        time.sleep(0.005)


def _keyed(path: str) -> dict[str, int]:
    with open(path) as file:
        return {key: int(value) for key, value in (line.split() for line in file)}


def _number(path: str) -> int:
    with open(path) as file:
        return int(file.read())


def cgroups_of(pid: int) -> list[str]:
    """Returns the paths of the cgroups of a process; none if this process does not see them."""
    return sorted(set(_cgroups(str(pid)).values()))


def unified_cgroup_of(pid: int) -> str | None:
    """Returns the path of the cgroup v2 of a process; None: this process does not see it, or it is the root."""
    path = _cgroups(str(pid)).get("")
    return path if path is not None and os.path.exists(f"{path}/cgroup.type") else None


@cache
def _own() -> dict[str, str]:
    return _cgroups("self")


def _cgroups(process: str) -> dict[str, str]:
    """Returns the path of a process's cgroup for each v1 controller, and for cgroup v2 under the key ''."""
    own, found = dict[str, str](), dict[str, str]()
    try:
        with open(f"/proc/{process}/cgroup") as file:
            for line in file:
                _, controllers, path = line.rstrip("\n").split(":", 2)
                own |= dict.fromkeys(controllers.split(","), path)
        with open("/proc/self/mountinfo") as file:
            for line in file:
                mount, _, source = line.partition(" - ")
                root, point = mount.split(" ")[3:5]
                kind, _, options = source.rstrip("\n").split(" ", 2)
                names = [""] if kind == "cgroup2" else options.split(",") if kind == "cgroup" else []
                for name in (n for n in names if n in own and n not in found):
                    inside = own[name].removeprefix(root) if root != "/" else own[name]
                    path = os.path.join(point, inside.lstrip("/")).rstrip("/")
                    if os.path.isdir(path):
                        found[name] = path
    except OSError:
        pass
    return found


@cache
def _unified() -> tuple[str | None, frozenset[str]]:
    """Returns a cgroup v2 to use as parent of tasks' cgroups, and the controllers that its children have.

    Enables `CONTROLLERS` for its children as far as this process may. The path is None if there is no cgroup v2.
    """
    own = _own().get("")
    if own is None:
        return None, frozenset()
    found = _enable(own)
    if found:
        return own, found
    # The cgroup contains processes, so its children cannot have controllers.
    above = os.path.dirname(own)
    if os.geteuid() != 0:
        # With `DelegateSubgroup`, systemd starts the agent in a child of the cgroup that the agent may use.
        found = _enable(above) if os.access(above, os.W_OK) else found
        return (above if found else own), found
    # The children of a new cgroup below the root can have controllers: the root itself is exempt from that rule.
    root = own
    while os.path.exists(os.path.join(os.path.dirname(root), "cgroup.controllers")):
        root = os.path.dirname(root)
    if _enable(root):
        parent = os.path.join(root, "mizzen")
        with contextlib.suppress(OSError):
            os.makedirs(parent, exist_ok=True)
            return parent, _enable(parent)
    return own, found


def _enable(path: str) -> frozenset[str]:
    found = set()
    for controller in CONTROLLERS:
        with contextlib.suppress(OSError), open(f"{path}/cgroup.controllers") as file:
            if controller not in file.read().split():
                continue
            with contextlib.suppress(OSError), open(f"{path}/cgroup.subtree_control", "w") as control:
                control.write(f"+{controller}")
            with open(f"{path}/cgroup.subtree_control") as control:
                if controller in control.read().split():
                    found.add(controller)
    return frozenset(found)
