"""What attacks have gained, as the machine shows it: what stores do through links, and who runs programs as whom."""

import contextlib
import stat
import subprocess
from pathlib import Path

from mizzen.objects import MissingObject, open_store

_STRANGER = 54_321
"""The uid of a user of the machine, who may use whatever a task has left for them."""
LINKS = """
own="${MIZZEN_CHECKPOINT_URI#file://}"
if [ -L "$own/log" ]; then exit 0; fi
mkdir -p "$own"
ln -s "DATA" "$own/.staging"
ln -s "DATA" "$own/log"
ln -s "DATA/report.json" "$own/k"
mkfifo "$own/pipe"
exit 1
"""
"""Script of a task that leaves links to `DATA` in its checkpoints, and ends well when it is started again."""


def owners(data: Path) -> dict[str, tuple[int, int]]:
    """Returns owner and mode of the data folder and of files of mizzen in it."""
    names = (".", "report.json", "operator.key", "master.key")
    return {name: ((found := (data / name).stat()).st_uid, found.st_mode) for name in names}


def followed(data: Path, workload: str) -> list[str]:
    """Returns what stores, opened as workers and agents open them, do through the links in a workload's checkpoints."""
    [own] = (path for path in data.glob(f"buckets/*/**/{workload}") if (path / "log").is_symlink())
    [bucket] = (path for path in own.parents if path.parent == data / "buckets")
    found, secret = [], (data / "report.json").read_bytes()
    for root, before in ((own, ""), (bucket, f"{own.relative_to(bucket)}/")):
        store, here = open_store(root.as_uri()), f"through {root.name}"
        found += [f"lists {info.key} {here}" for info in store.list(before) if info.key != f"{before}marker"]
        for key in ("k", "log/report.json", "pipe"):
            with contextlib.suppress(MissingObject):
                found.append(f"reads {store.get(before + key) == secret} {key} {here}")
        store.delete(f"{before}log/report.json")
        for key in ("log/planted", "new"):
            with contextlib.suppress(OSError, ValueError):
                store.put(before + key, b"x")
        # A store of the workload's own stages in the folder that is a link.
        if before == "" and (own / "new").exists():
            found.append(f"stages {here}")
        if (data / "planted").exists() or not (data / "report.json").exists():
            return [*found, f"changes the data folder {here}"]
    return found


def gained(data: Path, name: str) -> set[int]:
    """Returns the users as whom another user of the machine runs the set-user-id programs `name` in a data folder."""
    programs = [path for path in data.rglob(name) if path.is_file() and path.stat().st_mode & stat.S_ISUID]
    assert programs, "none was left"
    found = set()
    for path in programs:
        with contextlib.suppress(PermissionError):
            told = subprocess.run(
                [path, "-u"], user=_STRANGER, group=_STRANGER, extra_groups=(), cwd="/", capture_output=True, check=True
            )
            found.add(int(told.stdout))
    return found - {_STRANGER}
