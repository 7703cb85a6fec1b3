"""Checkpoints that a framework writes as files of its own: each file is a part, and comes back as a file.

A framework knows best what it needs to go on. So it writes its own checkpoint to a folder, whose files are then saved
as any state is: atomically, with checksums, fenced. At a start they are written to a folder again, whose path the
framework is given. What is in them, pickles too, is between the framework and its files; that nothing is missing which
its loader needs is checked before a save and after a load.
"""

import re
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mizzen import notices, report
from mizzen.checkpoint import Checkpoint, Checkpointer, CheckpointError, CheckpointWarning
from mizzen.checkpoint.pressure import StepAction

INDEX = "files"
"""The part that says which part is which file."""

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]")


class FileCheckpoints:
    """Saves folders by a `Checkpointer`, and gives them back."""

    def __init__(
        self,
        checkpointer: Checkpointer,
        agree: Callable[[int], int],
        lacks: Callable[[Path], str | None] = lambda _: None,
    ) -> None:
        """`checkpointer` must not be sharded; `agree` as below; `lacks` says what a folder lacks, if anything."""
        self.checkpointer = checkpointer
        self.lacks = lacks
        self.agree = agree
        """Gives the maximum of a number over all ranks, which all call it together."""

    def action(self, step: int) -> StepAction:
        """Report `step`, and decide together with all ranks what to do after it."""
        report.progress(step)
        action = StepAction.NOTHING
        # Asked on every rank: a notice may come to any of them, and only one that saves knows when a save is due.
        if self.checkpointer.writer or notices.current() is not None:
            action = StepAction.SAVE if self.checkpointer.should_save(step) else StepAction.NOTHING
        if notices.preempted():
            action = StepAction.FLUSH if action is StepAction.SAVE else StepAction.LEAVE
        return StepAction(self.agree(action))

    def meet(self) -> None:
        """Wait until all ranks are here."""
        self.agree(0)

    def save(
        self, step: int, folder: Path, extra: Mapping[str, Any] | None = None, beside: Mapping[str, Path] | None = None
    ) -> None:
        """Save all files under `folder` and the parts of `extra`; nothing on a rank that does not save.

        `beside` are further folders, which come back below the given names in the same one.

        A save that fails, or a folder that lacks something, is told by a `CheckpointWarning`, as by
        `Checkpointer.step`, and the training goes on.

        Raises:
            StateError: a part is not stored.
            StaleAttemptError: a newer attempt has claimed the root: this process must not go on.
        """
        if not self.checkpointer.writer:
            return
        state: dict[str, Any] = {}
        index: dict[str, str] = {}
        # The folder's own files come first: so those beside it keep their parts' names, and are not written again.
        for below, tree in {"": folder, **(beside or {})}.items():
            for path in sorted(path for path in tree.rglob("*") if path.is_file()):
                relative = (Path(below) / path.relative_to(tree)).as_posix()
                # Begins with a letter, and is no other part's, whatever the file's name.
                name = f"file.{len(index):04d}.{_NOT_IN_NAMES.sub('-', relative)[-80:]}"
                index[name] = relative
                state[name] = path
        missing = self.lacks(folder) if index else "any file"
        if missing is not None:
            self.checkpointer.cadence.missed()
            root = self.checkpointer.root
            warnings.warn(
                f"{root}: step {step} was not saved: {folder} lacks {missing}", CheckpointWarning, stacklevel=2
            )
            return
        self.checkpointer.try_save(step, {**state, **(extra or {}), INDEX: index})

    def load(self) -> "Loaded | None":
        """The newest valid checkpoint, its files in a temporary folder; None if there is none.

        Raises:
            CheckpointError: as `Checkpointer.load_latest`; or it is not one that was saved by this, or lacks something.
        """
        found = self.checkpointer.load_latest()
        if found is None:
            return None
        missing = "the files of a framework" if INDEX not in found.state else None
        if missing is None:
            loaded = Loaded(found)
            missing = self.lacks(loaded.folder)
            if missing is None:
                return loaded
            loaded.close()
        raise CheckpointError(f"{self.checkpointer.root}: the checkpoint of step {found.step} lacks {missing}")

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
