"""Cgroups of tasks: limits of memory and processes, weights of CPU, and finding and killing all of a task at once.

Both versions are used, whichever has the controller. A task's cgroups are children of the agent's own; where that is a
cgroup v2 whose children cannot have controllers, because processes are in it, of a cgroup `mizzen` below the root.
Standard library only: the shim imports it.
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
class Limits:
    """What a task may use."""

    memory_bytes: int
    processes: int
    """Threads count."""
    cpus_milli: int
    """A share where CPUs are scarce, not a cap."""

    def v1(self) -> dict[str, list[tuple[str, int]]]:
        """Controller to files and values; what follows the first of a controller may be absent."""
        return {
            "memory": [
                ("memory.limit_in_bytes", self.memory_bytes),
                ("memory.memsw.limit_in_bytes", self.memory_bytes),
            ],
            "pids": [("pids.max", self.processes)],
            "cpu": [("cpu.shares", max(2, self.cpus_milli * 1024 // 1000))],
        }

    def v2(self) -> dict[str, list[tuple[str, int]]]:
        """The same for the unified hierarchy."""
        shares = min(262_144, max(2, self.cpus_milli * 1024 // 1000))
        return {
            "memory": [("memory.max", self.memory_bytes), ("memory.swap.max", 0)],
            "pids": [("pids.max", self.processes)],
            "cpu": [("cpu.weight", 1 + (shares - 2) * 9999 // 262_142)],
        }


def make_cgroup(run_id: str) -> str | None:
    """A cgroup v2 for a run, in which all of it can be killed at once; None where the agent may not make one."""
    parent = _own().get("")
    if parent is None:
        return None
    path = os.path.join(parent, f"mizzen-{run_id}")
    try:
        os.makedirs(path, exist_ok=True)
    except OSError:
        return None
    return path if os.path.exists(os.path.join(path, "cgroup.kill")) else None


def limit(run_id: str, limits: Limits) -> tuple[list[str], list[str]]:
    """Cgroups with `limits`, to be joined by the run's first process, and the controllers that could not be had."""
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


def _set(path: str, values: list[tuple[str, int]]) -> bool:
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
        with contextlib.suppress(OSError):
            os.rmdir(path)
        return False
    return True


def join(folders: Iterable[str]) -> None:
    """Move this process into the cgroups.

    Raises:
        OSError: one of them does not take it.
    """
    for path in folders:
        with open(f"{path}/cgroup.procs", "w") as file:
            file.write("0")


def processes_in(folders: Iterable[str]) -> set[int]:
    """Processes in the cgroups, those below them left out."""
    found = set()
    for path in folders:
        with contextlib.suppress(OSError), open(f"{path}/cgroup.procs") as file:
            found |= {int(line) for line in file if line.strip() not in ("", "0")}
    return found


def memory_use(folders: Iterable[str]) -> tuple[int, int] | None:
    """Limit and peak in bytes, where the kernel killed a process for reaching the limit; None: it has not."""
    for path in folders:
        for kills, limit_file, peak_file in (
            ("memory.oom_control", "memory.limit_in_bytes", "memory.max_usage_in_bytes"),
            ("memory.events", "memory.max", "memory.peak"),
        ):
            with contextlib.suppress(OSError, ValueError):
                if _keyed(f"{path}/{kills}").get("oom_kill"):
                    limit_bytes = _number(f"{path}/{limit_file}")
                    try:
                        return limit_bytes, _number(f"{path}/{peak_file}")
                    except OSError:  # Kernels before 5.19 do not keep it.
                        return limit_bytes, limit_bytes
    return None


def kill_cgroup(path: str) -> None:
    """Kill every process of a cgroup."""
    try:
        with open(f"{path}/cgroup.kill", "w") as file:
            file.write("1")
    except OSError:  # Version 1 has no such file.
        for pid in processes_in([path]):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def remove_cgroup(path: str) -> None:
    """Kill what is left in a cgroup and remove it; after a second with something unkillable in it, leave it."""
    give_up_s = time.monotonic() + 1.0
    while True:
        try:
            os.rmdir(path)
            return
        except FileNotFoundError:
            return
        except OSError:  # The killed leave it only when the kernel has taken them apart.
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


@cache
def _own() -> dict[str, str]:
    """This process's cgroup in each hierarchy, as a folder: by controller, the unified one as ''."""
    own, found = dict[str, str](), dict[str, str]()
    try:
        with open("/proc/self/cgroup") as file:
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
    """A cgroup v2 whose children have controllers, and which of `CONTROLLERS`; makes it so where that is allowed."""
    own = _own().get("")
    if own is None:
        return None, frozenset()
    found = _enable(own)
    if not found and os.geteuid() == 0:
        # Processes are in it, so it cannot: a sibling below the root can. The root itself is free of that rule.
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
