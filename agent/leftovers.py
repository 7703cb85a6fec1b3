"""Which files a task leaves in its working directory."""

import os
from pathlib import Path

from agent.tasks import RunFolder
from domain.task_reports import LeftFiles

_MOST_ENTRIES = 100_000
"""Further entries of a working directory are not counted."""


def left_by(run: RunFolder, machine: str, keep_s: float) -> LeftFiles | None:
    """Returns the files that an ended task has left, with the time until which they are kept; None: there are none.

    Counts files that were written since the start of the task. Hidden files and folders are caches and settings, and
    are left out. `keep_s` is the time for which the folder is kept after the end, in seconds.
    """
    began_s, end = run.started_at_s(), run.exit()
    if began_s is None or end is None:
        return None
    size = _written_since(run.work, began_s)
    return LeftFiles(machine, str(run.work), size, end.ended_at_s + keep_s) if size else None


def _written_since(root: Path, began_s: float) -> int:
    total, seen, ahead = 0, 0, [str(root)]
    while ahead:
        try:
            with os.scandir(ahead.pop()) as entries:
                for entry in entries:
                    seen += 1
                    if seen > _MOST_ENTRIES:
                        return total
                    if entry.name.startswith("."):
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        ahead.append(entry.path)
                    elif entry.is_file(follow_symlinks=False):
                        status = entry.stat(follow_symlinks=False)
                        # A copy may keep the time of modification of its source, but it has a time of change.
                        total += status.st_size if status.st_ctime >= began_s else 0
        except OSError:  # The folder was removed, or is not readable.
            continue
    return total
