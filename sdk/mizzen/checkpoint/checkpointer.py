"""`Checkpointer`, the class with which a training script saves and loads its state."""

import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from typing import Any

from mizzen import notices, report
from mizzen.cadence import Cadence
from mizzen.checkpoint import parts
from mizzen.checkpoint.background import BackgroundSave, Saving
from mizzen.checkpoint.departure import Departure, Sender, StepAction
from mizzen.checkpoint.errors import (
    CheckpointError,
    NotYetError,
    StaleAttemptError,
    StateError,
)
from mizzen.checkpoint.layout import Encoder
from mizzen.checkpoint.lost_positions import warn_of_lost_position
from mizzen.checkpoint.manifest import Manifest, check_part_name
from mizzen.checkpoint.place import Gang, place_of
from mizzen.checkpoint.presync import Unsent
from mizzen.checkpoint.reader import Checkpoint, GetLive, Reader, Skipped, read_latest
from mizzen.checkpoint.roots import open_root
from mizzen.checkpoint.save_failures import Failures, may_pass
from mizzen.checkpoint.snapshot import Snapshot
from mizzen.checkpoint.tiers import Roots
from mizzen.checkpoint.tracked_objects import Tracked
from mizzen.checkpoint.writer import SHARD_TIMEOUT_S, Encoded
from mizzen.objects import checksums

OWN_PARTS = frozenset({"rng"})
"""Parts that every rank of a sharded checkpoint saves for itself, in addition to those passed as `own`."""


class Checkpointer:
    """Saves and loads the full state of a training under one root.

        checkpointer = Checkpointer("s3://bucket/run-7")
        checkpointer.track(model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler)
        step = checkpointer.restore()
        while step < steps:
            train_one_step()
            step += 1
            checkpointer.step(step)

    `step` reports the progress and saves when a save is due (`mizzen.cadence`). After a notice that the process or the
    machine will be stopped, `step` saves once more if there is time, and exits the process with code 143. `track`,
    `restore` and `step` are built on `save`, `save_async`, `load_latest`, `should_save` and `preempted`, which can also
    be called directly.

    In a gang, rank 0 saves for all ranks and every rank loads (the default). With `sharded=True` each rank saves its
    own parts: all ranks must call `save` at the same steps, and a checkpoint is committed when all ranks have written.
    """

    def __init__(
        self,
        uri: str | os.PathLike[str] | None = None,
        *,
        local: str | os.PathLike[str] | None = None,
        background: bool = False,
        attempt: int | None = None,
        keep: int | None = None,
        keep_every: int | None = None,
        interval_s: float | None = None,
        sharded: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        agree: Callable[[int], int] | None = None,
        shard_timeout_s: float = SHARD_TIMEOUT_S,
        trusted: bool = False,
        other_world: bool = False,
        start_over: bool = False,
        checksum: str | None = None,
        max_failing_s: float | None = None,
        max_failures: int | None = None,
    ) -> None:
        """Read the root's log and start watching for notices (in the main thread).

        If an attempt number is given, also claim the root (see `claim`). If the store cannot be written at that moment,
        the first save claims it. The defaults of `uri`, `attempt`, `keep`, `rank`, `world_size`, `interval_s`,
        `max_failing_s` and `max_failures` are read from the environment (`mizzen.environment`).

        Args:
            uri: root of the checkpoints: a path, or a `file://`, `s3://` or `gs://` URI.
            local: a folder on this machine. Each checkpoint is written there before it is uploaded to `uri`, and is
                loaded from there if it still exists. A sharded gang can use it only if all ranks run on one machine.
            background: whether `step` saves in a background thread, from a copy of the state in memory.
            attempt: fencing token, 1 or more. Without it, a process that saves takes the number after the greatest one
                in the log, at its first save. Of several processes with the same number, only the last to claim saves.
            keep: how many of the newest valid checkpoints to keep, 1 or more; 2 by default.
            keep_every: checkpoints whose step is a multiple of this number are never removed.
            interval_s: seconds between two saves. By default the interval is computed from the cost of a save and the
                interruption rate of the gang.
            sharded: whether each rank saves its own parts. All ranks must pass the same `attempt`.
            rank: rank of this process, from 0.
            world_size: number of ranks in the gang.
            agree: returns the maximum of a number over all ranks. All ranks call it together: at each `step`, and for
                each checkpoint that `load_latest` tries. `step` needs it in a gang.
            shard_timeout_s: how long a sharded save waits for the other ranks, in seconds.
            trusted: whether parts that were saved as `Pickled` may be loaded. Loading a pickle can run any code.
            other_world: whether a sharded checkpoint of a gang of another size may be loaded. The parts that belong to
                single ranks are then left out.
            start_over: whether to start without a checkpoint if checkpoints exist but none can be loaded. By default
                that is an error.
            checksum: `xxh3_128` or `sha256`; by default the fastest that is installed.
            max_failing_s: how long saves may fail in a row before a failed save is an error, in seconds; 3600 by
                default, and at most 60 while there is no checkpoint.
            max_failures: how many saves in a row may fail before that; by default not limited.

        Raises:
            ValueError: no root is given, the scheme of the URI is unknown, or a number is out of range.
            StaleAttemptError: an attempt newer than `attempt` has claimed the root.
            CheckpointError: the root cannot be read.
        """
        place = place_of(
            uri,
            attempt,
            keep=keep,
            keep_every=keep_every,
            rank=rank,
            world_size=world_size,
            sharded=sharded,
            max_failing_s=max_failing_s,
            max_failures=max_failures,
        )
        self.retention = place.retention
        if interval_s is not None and not interval_s >= 0:
            raise ValueError(f"interval_s={interval_s}: must be 0 or more seconds")
        algorithm = checksums.known(checksum or checksums.fastest())
        notices.watch()
        watcher = notices.watcher()
        self.cadence = Cadence.from_environ(interval_s=interval_s, platform=watcher.platform if watcher else None)
        """Decides when to save; `explain()` returns the reasons."""
        self.gang = place.gang
        self.writer = sharded or place.gang.rank == 0
        """Whether this process saves: rank 0, or every rank if the checkpoint is sharded."""
        self.background = background
        self.skipped: tuple[Skipped, ...] = ()
        """Checkpoints that the last `load_latest` skipped, newest first, each with the reason."""
        alone = Gang() if not sharded else place.gang
        stores = [open_root(root) for root in (local, place.uri) if root is not None]
        self._roots = Roots(
            stores, place.attempt, alone, place.retention, algorithm, shard_timeout_s, commits=self.writer
        )
        self._reader = Reader(alone.rank, alone.world_size, trusted, other_world, start_over, agree)
        self._agree = agree
        self._tracked = Tracked({})
        self._own = set(OWN_PARTS)
        self._encoder = Encoder()
        self._snapshot = Snapshot()
        self._failures = Failures(place.limits, self.root)
        self._saving = BackgroundSave(self.not_saved)
        self._departure = Departure(self.cadence, self._saving)
        self._saved_step: int | None = None

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

    @property
    def progress(self) -> MutableMapping[str, Any]:
        """The dict that is saved as the part `progress`, with the step. Store the epoch and other counters in it."""
        return self._tracked.progress

    @property
    def preempted(self) -> bool:
        """Whether a notice was received that this process or its machine will certainly be stopped soon."""
        return notices.preempted()

    def track(self, *, own: Collection[str] = (), **objects: Any) -> None:
        """Add objects to the saved state, each as the part of its name. See `docs/state.md`.

        The parts `rng` and `progress` are always saved.

        Args:
            own: names of the objects that differ between ranks, such as the position in a rank's data.
            objects: objects with `state_dict` and `load_state_dict`, random generators, pairs (save, load) of
                functions, or dicts, which are updated in place.

        Raises:
            StateError: a name is not a valid part name or is already tracked, or an object cannot be tracked.
        """
        self._tracked.add(objects)
        self._own |= set(own)

    def restore(self) -> int:
        """Load the newest valid checkpoint into the tracked objects, and return its step; 0 if there is no checkpoint.

        Tensors of tracked modules are read in place, without a second copy in memory. If this raises, the tracked
        objects may be partly overwritten.

        Raises:
            StateError: the checkpoint does not match the tracked objects. Or a tracked object holds a value that cannot
                be stored; this is checked here so that the first save does not fail later.
            CheckpointError: a file or object cannot be read for a reason other than damage. Or checkpoints exist, none
                can be loaded, and `start_over` is not set.
        """
        with self._loading():
            found = self._newest(self._tracked.live)
            if found is not None:
                self._tracked.restore(found.state)
            if self.writer:
                for name, value in self._tracked.capture(found.step if found else 0).items():
                    with suppress(NotYetError):
                        parts.check(name, value)
        return self._begin(found)

    def step(self, step: int) -> None:
        """Report that `step` steps are done, save if a save is due, and exit if a notice requires it.

        Call it after every training step. A failed save causes a `CheckpointWarning` and is retried after a tenth of
        the interval; the last save after a notice is retried until the time does not suffice for another one.

        Raises:
            SystemExit: with code 143, after a notice.
            StaleAttemptError: a newer attempt has claimed the root; this process must stop training.
            CheckpointError: saves have failed in a row up to a limit (`max_failing_s`, `max_failures`). Or the gang has
                several ranks and `agree` was not given.
        """
        report.progress(step)
        action = self._action(step)
        if self.gang.world_size > 1:
            if self._agree is None:
                raise CheckpointError(
                    "in a gang, all ranks must save at the same step: pass agree (see mizzen.integrations)"
                )
            action = StepAction(self._agree(action))
        self._roots.insist(action in (StepAction.NOTHING, StepAction.SAVE))
        if action is StepAction.NOTHING or (action is StepAction.FLUSH and self._is_sending_ahead(step)):
            return
        if action is StepAction.FLUSH and self._saving.holds(step):
            self._saving.wait_tolerating()
        if self.writer and (action is StepAction.SAVE or (action is StepAction.FLUSH and self._saved_step != step)):
            if self._saved_step is None:
                warn_of_lost_position(stacklevel=2)
            if action is StepAction.SAVE:
                self.try_save(step, self._tracked.capture(step), own=self._own, background=self.background)
            else:
                self.save_last(step, self._tracked.capture(step), own=self._own)
        if action is not StepAction.SAVE:
            self._departure.exit(action, self._agree)

    def should_save(self, step: int) -> bool:
        """Return whether to save now: a save is due, or a notice was received and there is time for a save.

        Returns False if `step` was the last step saved. In a gang, call it on one rank and broadcast the result.
        """
        if step == self._saved_step or (not self.cadence.should_save(step) and notices.current() is None):
            return False
        return self._action(step) in (StepAction.SAVE, StepAction.FLUSH)

    def load_latest(self) -> Checkpoint | None:
        """Load the newest valid checkpoint; None if there is none. Call it at every start, including the first.

        Damaged and incomplete checkpoints are skipped, each with a `CheckpointWarning` and an entry in `skipped`.

        Raises:
            CheckpointError: a file or object cannot be read for a reason other than damage. Or checkpoints exist, none
                can be loaded, and `start_over` is not set.
        """
        with self._loading():
            found = self._newest()
        self._begin(found)
        return found

    def save(self, step: int, state: Mapping[str, Any], *, own: Collection[str] = OWN_PARTS) -> Manifest:
        """Commit `state` as the checkpoint of `step`, durably; then remove checkpoints that retention does not keep.

        The commit is atomic: if the process or the machine dies at any time, either the new checkpoint is complete or
        the earlier ones are unchanged.

        If the store fails and an earlier checkpoint exists, this method waits and tries again, up to `max_failing_s` or
        `max_failures`; each failure is a `CheckpointWarning`. A training that should go on meanwhile calls `try_save`.

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
        self, step: int, state: Mapping[str, Any], *, own: Collection[str] = OWN_PARTS, background: bool = False
    ) -> bool:
        """Try once to save, or start a background save, and return whether that succeeded.

        A failure is a `CheckpointWarning`, and the save is due again after a tenth of the interval.

        Raises:
            StateError: see `save`.
            StaleAttemptError: a newer attempt has claimed the root; this process must stop training.
            CheckpointError: saves have failed in a row up to a limit (`max_failing_s`, `max_failures`).
        """
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

    def save_last(self, step: int, state: Mapping[str, Any], *, own: Collection[str] = OWN_PARTS) -> bool:
        """Save a last time within a notice, and return whether that succeeded.

        If it fails, try again as long as there is time; a sharded gang tries once. Without a notice, as `try_save`.

        Raises:
            StateError: see `save`.
            StaleAttemptError: a newer attempt has claimed the root; this process must stop training.
            CheckpointError: saves have failed in a row up to a limit (`max_failing_s`, `max_failures`).
        """
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

    def save_async(self, step: int, state: Mapping[str, Any], *, own: Collection[str] = OWN_PARTS) -> Saving:
        """Copy `state` in memory and save the copy in a background thread; return when the copy is made.

        If the previous background save is still running, wait for it first. The interpreter waits for the last one
        before it exits.

        Raises:
            StateError: see `save`.
            StaleAttemptError: a newer attempt has claimed the root. The previous background save may have detected it.
            CheckpointError: this process does not save.
        """
        self._saving.wait_tolerating()
        self._roots.begin()
        began_s = time.monotonic()
        encoded = self._snapshot.take(self._encoded(step, state), self._encoder.owns)
        held_s = time.monotonic() - began_s
        self.cadence.saved(step, held_s, writing=True)

        def ended(saving: Saving) -> None:
            if saving.manifest is None:
                self.cadence.failed()
                return
            self.cadence.written(time.monotonic() - saving.began_s)
            self._saved(saving.manifest, held_s, time.monotonic() - began_s)

        return self._saving.start(step, lambda: self._roots.write(step, encoded, own), ended)

    def wait(self) -> None:
        """Wait for the background save, if there is one.

        Raises:
            CheckpointError: the save failed. A `StaleAttemptError` if a newer attempt has claimed the root.
        """
        self._saving.wait()

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()

    def _action(self, step: int) -> StepAction:
        """Return the action that this process alone would take after `step`."""
        if not self._saving.is_running:
            self._saving.wait_tolerating()
        pressing = self._departure.action(step == self._saved_step)
        if pressing is not StepAction.NOTHING:
            return pressing
        due = self.writer and step != self._saved_step and self.cadence.should_save(step)
        return StepAction.SAVE if due else StepAction.NOTHING

    def _tolerate(self, step: int, error: BaseException) -> float:
        """Report a failed save; see `Failures.tolerate`."""
        return self._failures.tolerate(step, error, saved=self._saved_step is not None)

    def _is_sending_ahead(self, step: int) -> bool:
        """Return whether the training continues within a notice, because parts of the state are sent ahead."""

        def unsent() -> Mapping[str, Unsent]:
            if not self.writer or not self._is_claimed():
                return {}
            encoded = self._encoded(step, self._tracked.capture(step))
            return self._roots.writers[-1].unsent(encoded, self._own)

        def save() -> None:
            if self.writer:
                self.try_save(step, self._tracked.capture(step), own=self._own, background=True)

        def abandon(saving: int) -> None:
            for writer in self._roots.writers:
                writer.abandon(saving)

        # Without `background`, there may be no memory for a copy of the state.
        can = (self.background or not self.writer) and step != self._saved_step
        agree = self._agree if self.gang.world_size > 1 else None
        return self._departure.is_sending_ahead(Sender(can, self.writer, unsent, save, abandon), agree)

    def _is_claimed(self) -> bool:
        """Return whether the root is claimed, after a try to claim it."""
        try:
            self.claim()
        except StaleAttemptError:
            raise
        except Exception:
            return False  # The last save tries again.
        return True

    def _encoded(self, step: int, state: Mapping[str, Any]) -> Encoded:
        if not self.writer:
            raise CheckpointError(f"{self.root}: this process does not save; only rank 0 does")
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise StateError(f"step={step!r}: must be an integer, 0 or more")
        for name in state:
            check_part_name(name)
        encoded = {name: self._encoder.encode(name, value) for name, value in state.items()}
        self._roots.claim_to_save()
        return encoded

    def _saved(self, manifest: Manifest, held_s: float, durable_s: float) -> None:
        self._saved_step = manifest.step
        self._failures.succeeded()
        self._departure.measured(durable_s)
        report.saved(manifest.step, manifest.created_at_s, manifest.size_bytes, held_s, durable_s, manifest.sent_bytes)
        choice = self.cadence.explain()
        report.cadence(choice.interval_s, choice.save_s, choice.mtbf.mtbf_s, choice.step_s, choice.mtbf.source)

    def _newest(self, live: GetLive = lambda _: {}) -> Checkpoint | None:
        logs = self._roots.unread()
        found, self.skipped = read_latest(logs, self._reader, live)
        self._roots.seen(logs)
        return found

    def _begin(self, found: Checkpoint | None) -> int:
        self._roots.loaded(*((found.manifest, found.verified) if found is not None else (None, frozenset())))
        step = found.step if found else 0
        report.loaded(found.step if found else None, len(self.skipped))
        self.cadence.begin(step)
        self._saved_step = found.step if found else None
        return step

    @contextmanager
    def _loading(self) -> Iterator[None]:
        report.loading()
        try:
            yield
        except Exception as error:
            report.load_failed(error, len(self.skipped))
            raise
