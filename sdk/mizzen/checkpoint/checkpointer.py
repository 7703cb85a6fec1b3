"""`Checkpointer`: what a training script uses."""

import os
import re
import time
from collections.abc import Mapping
from typing import Any, TypeVar

from mizzen import notices, report
from mizzen.checkpoint import parts, writing
from mizzen.checkpoint.errors import CheckpointError, StateError
from mizzen.checkpoint.manifest import Manifest
from mizzen.checkpoint.reading import Checkpoint, Skipped, read_latest
from mizzen.environment import TaskEnvironment, local_path

DEFAULT_INTERVAL_S = 600.0
DEFAULT_KEEP = 2

_PART_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")

_Number = TypeVar("_Number", int, float)


def _given(argument: _Number | None, told: _Number | None, default: _Number) -> _Number:
    if argument is not None:
        return argument
    return default if told is None else told


class Checkpointer:
    """Saves and loads the full state of a training in one folder.

        checkpointer = Checkpointer()
        if found := checkpointer.load_latest():
            restore(found.state)
        while step < steps:
            step = train_one_step()
            if checkpointer.should_save(step):
                checkpointer.save(step, state())
            if checkpointer.preempted:
                exit_preempted()

    In a data-parallel gang every rank makes one and loads; rank 0 saves. Whichever rank is first claims the folder for
    the gang's attempt, so that all of them load the same checkpoint: nothing of an older attempt can be committed
    between one rank's load and another's.
    """

    def __init__(
        self,
        uri: str | os.PathLike[str] | None = None,
        *,
        attempt: int | None = None,
        keep: int | None = None,
        interval_s: float | None = None,
        writer: bool | None = None,
    ) -> None:
        """Claim the folder, and let SIGTERM set `preempted` (in the main thread).

        What is not given comes from the environment (`mizzen.environment`), and without it from the defaults.

        Args:
            uri: folder of the checkpoints, a path or `file://` URI; made if it is not there.
            attempt: fencing number, from 1. Without one a writer takes the next after the newest in the folder, and a
                process that is no writer claims nothing.
            keep: how many checkpoints to keep, 1 or more; 2 by default.
            interval_s: seconds from one save to the next, for `should_save`; 600 by default.
            writer: whether this process may save; by default if it is rank 0 or alone.

        Raises:
            ValueError: there is no folder, its scheme is not supported, or a number is too small.
            StaleAttemptError: a newer attempt has claimed the folder.
        """
        told = TaskEnvironment.from_environ()
        uri = uri if uri is not None else told.checkpoint_uri
        if uri is None:
            raise ValueError("no folder for checkpoints: give uri, or set MIZZEN_CHECKPOINT_URI")
        self.root = local_path(uri)
        self.keep = _given(keep, told.checkpoint_keep, DEFAULT_KEEP)
        self.interval_s = _given(interval_s, told.checkpoint_interval_s, DEFAULT_INTERVAL_S)
        self.writer = told.rank == 0 if writer is None else writer
        attempt = attempt if attempt is not None else told.attempt
        if self.keep < 1:
            raise ValueError(f"keep={self.keep}: at least 1 checkpoint must be kept")
        if not self.interval_s >= 0:
            raise ValueError(f"interval_s={self.interval_s}: must be 0 or more seconds")
        if attempt is not None and attempt < 1:
            raise ValueError(f"attempt={attempt}: attempts are numbered from 1")
        self.attempt = writing.claim(self.root, attempt) if attempt is not None or self.writer else None
        """The fencing number; None for a process that claimed nothing."""
        self.skipped: tuple[Skipped, ...] = ()
        """What the last `load_latest` passed over, newest first, and why."""
        self._saved_step: int | None = None
        self._due_at_s = time.monotonic() + self.interval_s
        notices.watch_sigterm()

    @property
    def preempted(self) -> bool:
        """Whether this process was told (SIGTERM) that it will be stopped soon."""
        return notices.preempted()

    def should_save(self, step: int | None = None) -> bool:
        """Whether it is time to save: the interval has passed since the last save or the start, or a notice came.

        False where `step` is the one that was saved last.
        """
        if step is not None and step == self._saved_step:
            return False
        return notices.preempted() or time.monotonic() >= self._due_at_s

    def load_latest(self) -> Checkpoint | None:
        """The newest valid checkpoint, or None if there is none. Call it at every start: a first one finds nothing.

        Damaged and partial ones are passed over, each with a `CheckpointWarning` and an entry in `skipped`.

        Raises:
            CheckpointError: something cannot be read for another reason than being damaged.
        """
        found, self.skipped = read_latest(self.root)
        report.resumed(found.step if found else None)
        return found

    def save(self, step: int, state: Mapping[str, Any]) -> Manifest:
        """Commit `state` as the checkpoint of `step`, durably; then remove all but the newest `keep`.

        At whatever instant the process or the machine dies, either the new checkpoint is there whole or the ones
        before it are as they were.

        Args:
            step: number of steps done, 0 or more.
            state: part name (letters, digits, `.`, `_`, `-`) to value. A value is bytes, or a tree of dicts with
                string keys, lists and JSON values that may hold numpy arrays. Tuples come back as lists. Save all
                that the training needs: weights, optimiser, step, random generators, position in the data.

        Raises:
            StateError: a part has a bad name or holds something that is not stored; nothing was written.
            StaleAttemptError: a newer attempt has claimed the folder; nothing was committed.
            CheckpointError: this process is not the writer.
            OSError: it could not be written; earlier checkpoints are as they were.
        """
        if not self.writer or self.attempt is None:
            raise CheckpointError(f"{self.root}: this process does not save (writer=False, or a rank other than 0)")
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise StateError(f"step={step!r}: must be a whole number, 0 or more")
        for name in state:
            if not isinstance(name, str) or not _PART_NAME.fullmatch(name):
                rule = "a name is 1 to 100 letters, digits, '.', '_' and '-', the first a letter or digit"
                raise StateError(f"part {name!r}: {rule}")
        started_s = time.monotonic()
        encoded = {name: parts.encode(name, value) for name, value in state.items()}
        manifest = writing.save(self.root, self.attempt, step, encoded, self.keep)
        ended_s = time.monotonic()
        self._saved_step = step
        self._due_at_s = ended_s + self.interval_s
        report.saved(step, manifest.created_at_s, manifest.size_bytes, ended_s - started_s)
        return manifest
