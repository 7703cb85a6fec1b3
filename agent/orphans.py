"""Ends the tasks of a state folder that was deleted, without the records in it."""

import contextlib
import os
import signal
import time
from pathlib import Path

from agent import shim
from agent.processes import kill_until_gone

_GRACE_S = 30.0
"""How long the tasks have to save. What their workloads ask for was in the folder."""
_POLL_S = 0.2
_SHIM = "mizzen-shim"


def end_tasks(folder: Path) -> None:
    """Gives the tasks of a state folder their notice, and kills what is left of them and of their shims."""
    shims = _shims(folder)
    for pid in shims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    give_up_s = time.monotonic() + _GRACE_S
    # A shim goes on after the end of its task: it tries to write the exit status.
    while _alive(shim.descendants(shims)) and time.monotonic() < give_up_s:
        time.sleep(_POLL_S)
    table = shim.process_table()
    tree = {pid: table[pid][2] for pid in shims | shim.descendants(shims, table) if pid in table}
    kill_until_gone(lambda: {pid for pid, stat in shim.process_table().items() if tree.get(pid) == stat[2]})


def _alive(pids: set[int]) -> bool:
    stats = map(shim.process_stat, pids)
    return any(stat is not None and stat[0] not in "ZX" for stat in stats)


def _shims(folder: Path) -> set[int]:
    """Returns the pids of the shims of a folder: each holds the lock in the folder of its task open."""
    runs, found = f"{folder / 'runs'}/", set()
    for name in os.listdir("/proc"):  # noqa: PTH208 - of every process, and only names are needed
        if not name.isdigit() or _name(name) != _SHIM:
            continue
        with contextlib.suppress(OSError), os.scandir(f"/proc/{name}/fd") as descriptors:
            for one in descriptors:
                with contextlib.suppress(OSError):
                    if str(Path(one.path).readlink()).startswith(runs):
                        found.add(int(name))
    return found


def _name(pid: str) -> str:
    """Returns the name of a process (at most 15 bytes), or an empty string if the process does not exist."""
    with contextlib.suppress(OSError, ValueError):
        return Path("/proc", pid, "comm").read_text().rstrip("\n")
    return ""
