"""Stores the checkpoint files that a framework writes: each file becomes a part of a checkpoint.

The framework writes its own checkpoint to a folder. Its files are then saved like other state: atomically, with
checksums, and fenced. At the next start, the files are written to a temporary folder, and the framework loads that
folder. The content of the files, including pickles, is not interpreted. Before a save and after a load, the folder is
checked for all files that the framework needs to resume.
"""

import re
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from mizzen import notices, report
from mizzen.checkpoint import Checkpoint, Checkpointer, CheckpointError, CheckpointWarning
from mizzen.checkpoint.departure import StepAction

INDEX = "files"
"""The name of the part that maps parts to file names."""

ENDED = set[str]()
"""The roots at which trainings of this process have ended."""

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]")


def by_kind(callbacks: Iterable[Any]) -> dict[str, Any]:
    """Return callbacks by class and number, because a script may add others before them when it is restarted."""
    found: dict[str, Any] = {}
    for one in callbacks:
        kind = f"callback-{type(one).__qualname__}"
        found[f"{kind}-{sum(name.startswith(f'{kind}-') for name in found)}"] = one
    return found


class FileCheckpoints:
    """Saves folders with a `Checkpointer`, and restores them."""

    def __init__(
        self,
        checkpointer: Checkpointer,
        agree: Callable[[int], int],
        lacks: Callable[[Path], str | None] = lambda _: None,
    ) -> None:
        """Use `checkpointer`, which must not be sharded. `lacks` returns what a folder lacks, or None if complete."""
        if checkpointer.verifies:
            raise ValueError("verify=True: needs `track` and `step`, and cannot be used with a framework's Trainer")
        self.checkpointer = checkpointer
        self.lacks = lacks
        self._has_loaded = False
        self.agree = agree
        """Computes the maximum of a number over all ranks. All ranks must call it together."""

    def action(self, step: int) -> StepAction:
        """Report `step`, and return the action after it, on which all ranks agree."""
        report.progress(step)
        action = StepAction.NOTHING
        # Every rank decides: any rank may receive a notice, but only a rank that saves can tell whether a save is due.
        if self.checkpointer.writer or notices.current() is not None:
            action = StepAction.SAVE if self.checkpointer.should_save(step) else StepAction.NOTHING
        if notices.preempted():
            action = StepAction.FLUSH if action is StepAction.SAVE else StepAction.LEAVE
        return StepAction(self.agree(action))

    def meet(self) -> None:
        """Wait until all ranks have called this method."""
        self.agree(0)

    def save(
        self, step: int, folder: Path, extra: Mapping[str, Any] | None = None, beside: Mapping[str, Path] | None = None
    ) -> None:
        """Save all files under `folder`, and the parts in `extra`. A rank that does not save does nothing.

        If the save fails or the folder is incomplete, a `CheckpointWarning` is issued, as by `Checkpointer.step`, and
        the training continues. After a notice, the save is repeated as long as there is time.

        Args:
            step: number of steps done.
            folder: the folder that the framework has written.
            extra: further parts of the checkpoint, by name.
            beside: further folders, by the relative path below which a load restores them.

        Raises:
            StateError: a part cannot be stored.
            StaleAttemptError: a newer attempt has claimed the root. This process must stop.
            CheckpointError: saves have failed in a row up to a limit; see `Checkpointer`.
        """
        if not self.checkpointer.writer:
            return
        state: dict[str, Any] = {}
        index: dict[str, str] = {}
        # The files of `folder` come first. So the files in `beside` keep their part names, and are not written again.
        for below, tree in {"": folder, **(beside or {})}.items():
            for path in sorted(path for path in tree.rglob("*") if path.is_file()):
                relative = (Path(below) / path.relative_to(tree)).as_posix()
                # A valid part name for any file name: it begins with a letter and is unique.
                name = f"file.{len(index):04d}.{_NOT_IN_NAMES.sub('-', relative)[-80:]}"
                index[name] = relative
                state[name] = path
        missing = self.lacks(folder) if index else "any file"
        if missing is not None:
            self.checkpointer.not_saved(step, CheckpointError(f"{folder} lacks {missing}"))
            return
        save = self.checkpointer.save_last if notices.preempted() else self.checkpointer.try_save
        if not notices.preempted():
            self.checkpointer.only_due_tiers()
        save(step, {**state, **(extra or {}), INDEX: index})

    def begin(self, loaded: "Loaded | None", step: int, resuming: str) -> None:
        """Check how a training begins. Issue a `CheckpointWarning` if it does not load what it saves.

        Args:
            loaded: the checkpoint that was loaded for it.
            step: the step at which it begins.
            resuming: the argument of the framework that resumes a training.

        Raises:
            ValueError: an earlier training of this process has ended at the same root, or the framework has not
                continued the loaded checkpoint.
        """
        self._refuse_second()
        if not self._has_loaded:
            message = f"a restart would train from the beginning, without {resuming}=resilient.latest()"
            warnings.warn(message, CheckpointWarning, stacklevel=2)
        elif loaded is not None and loaded.step and not step:
            raise ValueError(
                f"{self.checkpointer.root}: the checkpoint of step {loaded.step} was loaded, but the training begins "
                f"at step 0: give {resuming}= what latest() returns"
            )

    def end(self) -> None:
        """Note that a training has ended, not by an error."""
        ENDED.add(self.checkpointer.root)

    def _refuse_second(self) -> None:
        root = self.checkpointer.root
        if root in ENDED:
            raise ValueError(
                f"{root}: a training of this process has ended there, and another one would continue it. Each training "
                f"needs its own root, as by ResilientCallback({root.rstrip('/') + '/2'!r})"
            )

    def load(self) -> "Loaded | None":
        """Load the newest valid checkpoint, with its files in a temporary folder. Return None if there is none.

        Raises:
            ValueError: an earlier training of this process has ended at the same root.
            CheckpointError: as for `Checkpointer.load_latest`; or the checkpoint was not saved by this class, or it
                lacks a file.
        """
        self._refuse_second()
        self._has_loaded = True
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
    """A loaded checkpoint. Its files are in a temporary folder until `close` or the end of the process."""

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
        """Remove the temporary folder."""
        self._temporary.cleanup()
