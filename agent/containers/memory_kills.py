"""Whether the kernel has killed a process of a container at the container's memory limit.

Engines make and remove the cgroup with the limit, and can miss such a kill. How full the memory was does not tell: it
contains the cache of files, of which the kernel frees a part instead. Uses the standard library only.
"""

import contextlib
import os
import time

from agent.cgroups import engine_folders, engine_parent, memory_kills

_REMOVAL_S = 0.2
"""The kernel signals a watcher of a removed cgroup at most so long after the removal."""


class ContainerMemory:
    """Counts the kills at the memory limits of the cgroups that an engine has made below a task's cgroup."""

    def __init__(self, cgroup: str) -> None:
        """`cgroup` is the path of the task's cgroup v2 (`engine_parent`). The engine has started the container."""
        parent = engine_parent(cgroup)
        self._folders = [] if parent is None else engine_folders(parent)
        # A cgroup v2 counts the kills in those below it, also after their removal. One of v1 does not, so each is
        # watched. What was killed in it before is known from its own count.
        self._watched: dict[str, int] = {}
        """Descriptors of the watched cgroups of v1. Each counts how often the limit was hit, and the removal."""
        self._kills = 0
        """Kills in cgroups of v1 before they were watched."""
        for folder in self._folders:
            with contextlib.suppress(OSError):
                for name in os.listdir(folder):
                    self._watch(os.path.join(folder, name))

    def _watch(self, path: str) -> None:
        with contextlib.suppress(OSError), open(f"{path}/memory.oom_control") as told:
            counter = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._watched[path] = counter
            with open(f"{path}/cgroup.event_control", "w") as control:
                control.write(f"{counter} {told.fileno()}")
            self._kills += memory_kills([path])

    def was_killed(self) -> bool:
        """Whether a process was killed at the limit. Blocks for `_REMOVAL_S` if a cgroup of v1 is gone."""
        if self._kills or memory_kills([*self._folders, *self._watched]):
            return True
        gone = {path for path in self._watched if not os.path.exists(path)}
        if gone:
            time.sleep(_REMOVAL_S)
        return any(_count(counter) > (path in gone) for path, counter in self._watched.items())


def _count(counter: int) -> int:
    try:
        return os.eventfd_read(counter)
    except BlockingIOError:
        return 0
