"""`StateSaver`, the base class of `Checkpointer` that saves: synchronously, in the background, and with retries."""

import atexit
import operator
import os
import sys
import time
from collections.abc import Collection, Mapping
from typing import Any, Self, SupportsIndex

from mizzen import notices, report
from mizzen.cadence import Cadence
from mizzen.checkpoint.attributes import ATTRIBUTES
from mizzen.checkpoint.background import BackgroundSave, Saving
from mizzen.checkpoint.departure import Departure
from mizzen.checkpoint.errors import CheckpointError, StaleAttemptError, StateError
from mizzen.checkpoint.layout import Encoder
from mizzen.checkpoint.manifest import Manifest, check_part_name
from mizzen.checkpoint.save_failures import Failures, Limits, may_pass
from mizzen.checkpoint.snapshot import Snapshot
from mizzen.checkpoint.tiers import Roots
from mizzen.checkpoint.writer import Encoded
from mizzen.notices.current_notice import flush_output

OWN_PARTS = frozenset({"rng", ATTRIBUTES})
"""Parts that every rank of a sharded checkpoint saves for itself, in addition to those passed as `own`."""


def whole_step(step: Any) -> int:
    """Return a number of steps as an int; numpy's integers are accepted.

    Raises:
        StateError: it is not an integer, or is negative.
    """
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        raise StateError(f"step={step!r}: must be an integer, 0 or more")
    return number


def _tell(saving: BackgroundSave) -> None:
    """Warn at the end of the process if the last background save has failed; exit with 1 if a limit is reached."""
    try:
        saving.wait_tolerating()
    except CheckpointError as error:
        print(f"mizzen: {error}", file=sys.stderr)
        flush_output()
        os._exit(1)


class StateSaver:
    """Saves the states of one process to its roots."""

    def __init__(self, roots: Roots, cadence: Cadence, limits: Limits, encoder: Encoder, *, writer: bool) -> None:
        """`writer`: whether this process saves; `limits`: how long and how often saves may fail in a row."""
        self.cadence = cadence
        """Decides when to save; `explain()` returns the reasons."""
        self.writer = writer
        """Whether this process saves: rank 0, or every rank if the checkpoint is sharded."""
        self._roots = roots
        self._encoder = encoder
        self._snapshot = Snapshot()
        self._failures = Failures(limits, self.root)
        self._saving = BackgroundSave(self.not_saved)
        self._departure = Departure(self.cadence, self._saving)
        self._saved_step: int | None = None
        self._tells_at_exit = False

    @property
    def root(self) -> str:
        """URI of the root."""
        return self._roots.logs[-1].where

    @property
    def attempt(self) -> int | None:
        """The fencing token of this process; None until it has claimed the root."""
        return self._roots.attempt

    def claim(self) -> int:
        """Claim the root, so that no older attempt can commit there, and return the attempt number.

        If the constructor was given an attempt number, it has already claimed the root. Otherwise the first save does,
        so that a process that only reads does not fence the process that trains.

        Raises:
            StaleAttemptError: a newer attempt has claimed the root. Or no attempt number was given, and another process
                has claimed the root since this one read the log.
            CheckpointError: the root cannot be read.
        """
        return self._roots.claim()

    def save(self, step: SupportsIndex, state: Mapping[str, Any], *, own: Collection[str] = OWN_PARTS) -> Manifest:
        """Commit `state` as the checkpoint of `step`, durably; then remove checkpoints that retention does not keep.

        The commit is atomic: if the process or the machine dies at any time, either the new checkpoint is complete or
        the earlier ones are unchanged.

        If the store fails and an earlier checkpoint exists, this method waits and tries again, up to `max_failing_s` or
        `max_failures`; each failure is a `CheckpointWarning`. A training that should continue meanwhile calls
        `try_save`.

        Args:
            step: number of steps done, 0 or more.
            state: part name (letters, digits, `.`, `_`, `-`) to value. A value is bytes, the `Path` of a file, or a
                tree of dicts, lists, tuples and JSON values that may hold numpy arrays and torch tensors. Include
                everything that the training needs: weights, optimizer, step, random generators, position in the data.
            own: names of the parts that belong to this rank alone, if the checkpoint is sharded.

        Raises:
            StateError: a part has an invalid name or holds a value that cannot be stored; nothing was written.
            StaleAttemptError: a newer attempt has claimed the root; nothing was committed.
            CheckpointError: this process does not save, another rank did not write before the timeout, or saves have
                failed in a row up to a limit.
            Exception: an error of the store, such as OSError for files, and there is no earlier checkpoint.
        """
        step = whole_step(step)
        while True:
            try:
                return self._save(step, state, own)
            except Exception as error:
                if self._saved_step is None or self._roots.is_shared or not may_pass(error):
                    raise
                self._tolerate(step, error)
            time.sleep(self._failures.pause_s())

    def _save(self, step: int, state: Mapping[str, Any], own: Collection[str]) -> Manifest:
        """Try once to save; see `save`."""
        self._saving.wait_tolerating()
        self._roots.begin()
        began_s = time.monotonic()
        encoded = self._encoded(step, state)
        manifest = self._roots.write(step, encoded, own)
        held_s = time.monotonic() - began_s
        self.cadence.saved(step, held_s)
        self._saved(manifest, held_s, held_s)
        return manifest

    def try_save(
        self,
        step: SupportsIndex,
        state: Mapping[str, Any],
        *,
        own: Collection[str] = OWN_PARTS,
        background: bool = False,
    ) -> bool:
        """Try once to save, or start a background save, and return whether that succeeded.

        A failure is a `CheckpointWarning`, and the save is due again after a tenth of the interval.

        Raises:
            StateError: see `save`.
            StaleAttemptError: a newer attempt has claimed the root; this process must stop training.
            CheckpointError: saves have failed in a row up to a limit (`max_failing_s`, `max_failures`).
        """
        step = whole_step(step)
        self._saving.wait_tolerating()
        try:
            if background:
                self.save_async(step, state, own=own)
            else:
                self._save(step, state, own)
        except (StaleAttemptError, StateError):
            raise
        except Exception as error:
            self.not_saved(step, error)
            return False
        return True

    def save_last(self, step: SupportsIndex, state: Mapping[str, Any], *, own: Collection[str] = OWN_PARTS) -> bool:
        """Save a last time within a notice, and return whether that succeeded.

        If it fails, try again as long as there is time; a sharded gang tries once. Without a notice, as `try_save`.

        Raises:
            StateError: see `save`.
            StaleAttemptError: a newer attempt has claimed the root; this process must stop training.
            CheckpointError: saves have failed in a row up to a limit (`max_failing_s`, `max_failures`).
        """
        step = whole_step(step)
        notice = notices.current()
        self._saving.wait_tolerating()
        self._roots.insist(True)
        while not self.try_save(step, state, own=own):
            left_s = notice.left_s(time.time()) if notice else None
            pause_s = self._failures.pause_s()
            if self._roots.is_shared or left_s is None or left_s < pause_s + (self._departure.save_s or 0.0):
                return False
            time.sleep(pause_s)
        return True

    def not_saved(self, step: int, error: BaseException) -> None:
        """Record that the state of `step` could not be saved because of `error`, as `try_save` does.

        For a state that cannot even be passed to `try_save`: for example, a framework could not write its files.

        Raises:
            CheckpointError: saves have failed in a row up to a limit (`max_failing_s`, `max_failures`).
        """
        self.cadence.missed(self._tolerate(step, error))

    def save_async(self, step: SupportsIndex, state: Mapping[str, Any], *, own: Collection[str] = OWN_PARTS) -> Saving:
        """Copy `state` in memory and save the copy in a background thread; return when the copy is made.

        If the previous background save is still running, wait for it first. The interpreter waits for the last one
        before it exits.

        Raises:
            StateError: see `save`.
            StaleAttemptError: a newer attempt has claimed the root. The previous background save may have detected it.
            CheckpointError: this process does not save.
        """
        step = whole_step(step)
        self._saving.wait_tolerating()
        self._roots.begin()
        began_s = time.monotonic()
        try:
            encoded = self._snapshot.take(self._encoded(step, state, later=True), self._encoder.owns)
        except BaseException:
            self._encoder.drop()
            raise
        held_s = time.monotonic() - began_s
        self.cadence.saved(step, held_s, writing=True)

        def write() -> Manifest:
            self._encoder.finish()
            return self._roots.write(step, encoded, own)

        def ended(saving: Saving) -> None:
            if saving.manifest is None:
                self.cadence.failed()
                return
            self.cadence.written(time.monotonic() - saving.began_s)
            self._saved(saving.manifest, held_s, time.monotonic() - began_s)

        if not self._tells_at_exit:
            self._tells_at_exit = True
            atexit.register(_tell, self._saving)
        return self._saving.start(step, write, ended)

    def wait(self) -> None:
        """Wait for the background save, if there is one.

        Raises:
            CheckpointError: the save failed. A `StaleAttemptError` if a newer attempt has claimed the root.
        """
        self._saving.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()

    def _tolerate(self, step: int, error: BaseException) -> float:
        """Report a failed save; see `Failures.tolerate`."""
        return self._failures.tolerate(step, error, saved=self._saved_step is not None)

    def _encoded(self, step: int, state: Mapping[str, Any], *, later: bool = False) -> Encoded:
        if not self.writer:
            raise CheckpointError(f"{self.root}: this process does not save; only rank 0 does")
        if not state:
            raise StateError("state: has no parts; a checkpoint needs at least one")
        for name in state:
            check_part_name(name)
        encoded = self._encoder.encode(state, later=later)
        self._roots.claim_to_save()
        return encoded

    def _saved(self, manifest: Manifest, held_s: float, durable_s: float) -> None:
        if not self._roots.reaches_root:
            return  # Only the root's checkpoints count for the scheduler, and before the process ends.
        self._saved_step = manifest.step
        self._failures.succeeded()
        self._departure.measured(durable_s)
        report.saved(manifest.step, manifest.created_at_s, manifest.size_bytes, held_s, durable_s, manifest.sent_bytes)
        choice = self.cadence.explain()
        report.cadence(choice.interval_s, choice.save_s, choice.mtbf.mtbf_s, choice.step_s, choice.mtbf.source)
