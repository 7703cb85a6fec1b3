"""Checkpoints that a framework writes as files of its own: each file is a part, and comes back as a file.

A framework knows best what it needs to go on. So it writes its own checkpoint to a folder, whose files are then saved
as any state is: atomically, with checksums, fenced. At a start they are written to a folder again, whose path the
framework is given. What is in them, pickles too, is between the framework and its files.
"""

import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mizzen import notices, report
from mizzen.checkpoint import Checkpoint, Checkpointer
from mizzen.checkpoint.pressure import Wish

INDEX = "files"
"""The part that says which part is which file."""

MARK = ".mizzen"
"""A file in a folder that was made to be stored and removed. So what a killed process left of one can be told."""

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]")


class FileCheckpoints:
    """Saves folders by a `Checkpointer`, and gives them back."""

    def __init__(self, checkpointer: Checkpointer, agree: Callable[[int], int]) -> None:
        """`checkpointer` must not be sharded; `agree` as below."""
        self.checkpointer = checkpointer
        self.agree = agree
        """Gives the maximum of a number over all ranks, which all call it together."""

    def wish(self, step: int) -> Wish:
        """Report `step`, and decide together with all ranks what to do after it."""
        report.progress(step)
        wish = Wish.NOTHING
        # Asked on every rank: a notice may come to any of them, and only one that saves knows when a save is due.
        if self.checkpointer.writer or notices.current() is not None:
            wish = Wish.SAVE if self.checkpointer.should_save(step) else Wish.NOTHING
        if notices.preempted():
            wish = Wish.FLUSH if wish is Wish.SAVE else Wish.LEAVE
        return Wish(self.agree(wish))

    def meet(self) -> None:
        """Wait until all ranks are here."""
        self.agree(0)

    def save(self, step: int, folder: Path, extra: Mapping[str, Any] | None = None) -> None:
        """Save all files under `folder` and the parts of `extra`; nothing on a rank that does not save.

        A save that fails is told by a `CheckpointWarning`, as by `Checkpointer.step`, and the training goes on.

        Raises:
            StateError: a part is not stored.
            StaleAttemptError: a newer attempt has claimed the root: this process must not go on.
        """
        if not self.checkpointer.writer:
            return
        state: dict[str, Any] = {}
        index: dict[str, str] = {}
        for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MARK):
            relative = path.relative_to(folder).as_posix()
            # Begins with a letter, and is no other part's, whatever the file's name.
            name = f"file.{len(index):04d}.{_NOT_IN_NAMES.sub('-', relative)[-80:]}"
            index[name] = relative
            state[name] = path
        self.checkpointer.try_save(step, {**state, **(extra or {}), INDEX: index})

    def load(self) -> "Loaded | None":
        """The newest valid checkpoint, its files in a temporary folder; None if there is none.

        Raises:
            CheckpointError: as `Checkpointer.load_latest`.
        """
        found = self.checkpointer.load_latest()
        return None if found is None else Loaded(found)

    def leave(self) -> None:
        """End this process after a notice.

        Raises:
            SystemExit: always, with code 143.
        """
        notices.acknowledge()
        notices.exit_preempted()


class Loaded:
    """A checkpoint whose files are in a temporary folder, until `close` or the end of the process."""

    def __init__(self, found: Checkpoint) -> None:
        self.step = found.step
        self.state = found.state
        """The parts that are not files."""
        self._temporary = tempfile.TemporaryDirectory(prefix="mizzen-", ignore_cleanup_errors=True)
        self.folder = Path(self._temporary.name)
        for name, relative in self.state.pop(INDEX).items():
            path = self.folder / relative
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.state.pop(name))

    def close(self) -> None:
        """Remove the files."""
        self._temporary.cleanup()
