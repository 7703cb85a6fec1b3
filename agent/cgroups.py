"""Cgroups of tasks: kept only so that all of a task can be found and killed at once. No limits are set."""

from functools import cache
from pathlib import Path


def make_cgroup(run_id: str) -> str | None:
    """A cgroup v2 for a run, beside the agent's own processes; None where the agent may not make one."""
    parent = _own_cgroup()
    if parent is None:
        return None
    path = parent / f"mizzen-{run_id}"
    try:
        path.mkdir(exist_ok=True)
    except OSError:
        return None
    return str(path) if (path / "cgroup.kill").exists() else None


@cache
def _own_cgroup() -> Path | None:
    """The agent's cgroup in the unified hierarchy, as a folder; None: there is none that it can see."""
    try:
        own = next(
            line.rstrip("\n").partition("::")[2]
            for line in Path("/proc/self/cgroup").read_text().splitlines()
            if line.startswith("0::")
        )
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            mount, _, source = line.partition(" - ")
            if source.split(" ", 1)[0] == "cgroup2":
                root, point = mount.split(" ")[3:5]
                inside = own.removeprefix(root) if root != "/" else own
                folder = Path(point) / inside.lstrip("/")
                return folder if folder.is_dir() else None
    except (OSError, StopIteration):
        pass
    return None
