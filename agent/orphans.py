"""Ends the tasks of a state folder that was deleted, without the records in it."""

import contextlib
import os
import signal
import time
from pathlib import Path

from agent import scratch, shim
from agent.processes import ProcessIdentity, kill_until_gone

_GRACE_S = 30.0
"""How long the tasks have to save. What their workloads ask for was in the folder."""
_POLL_S = 0.2
_SHIM = "mizzen-shim"


def end_tasks(folder: Path) -> None:
    """Gives the tasks of a state folder their notice, and kills what is left of them and of their shims.

    `folder` is its present path (`StateFolder.place`). Then removes what is still mounted below it.
    """
    shims = _shims(folder)
    for one in shims:
        one.send(signal.SIGTERM)
    give_up_s = time.monotonic() + _GRACE_S
    # A shim goes on after the end of its task: it tries to write the exit status.
    while _alive(shim.descendants(_pids(shims))) and time.monotonic() < give_up_s:
        time.sleep(_POLL_S)
    table, roots = shim.process_table(), _pids(shims)
    tree = {pid: table[pid][2] for pid in roots | shim.descendants(roots, table) if pid in table}
    kill_until_gone(lambda: {pid for pid, stat in shim.process_table().items() if tree.get(pid) == stat[2]})
    for private in folder.glob("runs/*/private"):
        with contextlib.suppress(OSError):
            scratch.clear(str(private))


def _pids(shims: list[ProcessIdentity]) -> set[int]:
    return {one.pid for one in shims if one.alive()}


def _alive(pids: set[int]) -> bool:
    stats = map(shim.process_stat, pids)
    return any(stat is not None and stat[0] not in "ZX" for stat in stats)


def _shims(folder: Path) -> list[ProcessIdentity]:
    """Returns the shims of a folder: each holds the lock in the folder of its task open."""
    runs, found = f"{folder / 'runs'}/", []
    for name in os.listdir("/proc"):  # noqa: PTH208 - of every process, and only names are needed
        if not name.isdigit() or _name(name) != _SHIM:
            continue
        with contextlib.suppress(OSError), os.scandir(f"/proc/{name}/fd") as descriptors:
            identity = ProcessIdentity.of(int(name))
            if any(_target(one.path).startswith(runs) for one in descriptors):
                found.append(identity)
    return found


def _target(link: str) -> str:
    with contextlib.suppress(OSError):
        return str(Path(link).readlink())
    return ""


def _name(pid: str) -> str:
    """Returns the name of a process (at most 15 bytes), or an empty string if the process does not exist."""
    with contextlib.suppress(OSError, ValueError):
        return Path("/proc", pid, "comm").read_text().rstrip("\n")
    return ""
