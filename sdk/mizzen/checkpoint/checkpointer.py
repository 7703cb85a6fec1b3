"""`Checkpointer`: what a training script uses."""

import os
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from typing import Any

from mizzen import notices, report
from mizzen.cadence import Cadence
from mizzen.checkpoint import parts
from mizzen.checkpoint.background import Saving
from mizzen.checkpoint.errors import (
    CheckpointError,
    CheckpointWarning,
    NotYetError,
    StaleAttemptError,
    StateError,
)
from mizzen.checkpoint.layout import Encoder
from mizzen.checkpoint.manifest import Manifest, check_part_name
from mizzen.checkpoint.pressure import Pressure, StepAction
from mizzen.checkpoint.reading import Checkpoint, GetLive, Reader, Skipped, read_latest
from mizzen.checkpoint.roots import open_root
from mizzen.checkpoint.snapshot import Snapshot
from mizzen.checkpoint.tiers import Roots, write
from mizzen.checkpoint.tracking import Tracked
from mizzen.checkpoint.writing import SHARD_TIMEOUT_S, Encoded, Gang, Retention
from mizzen.environment import TaskEnvironment
from mizzen.objects import checksums

DEFAULT_KEEP = 2
OWN_PARTS = frozenset({"rng"})
"""Parts that are each rank's own in a sharded checkpoint, besides those that are tracked as such."""


class Checkpointer:
    """Saves and loads the full state of a training in one root.

        checkpointer = Checkpointer("s3://bucket/run-7")
        checkpointer.track(model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler)
        step = checkpointer.restore()
        while step < steps:
            train_one_step()
            step += 1
            checkpointer.step(step)

    `step` reports the progress, saves when that is due (`mizzen.cadence`), and when the machine is about to be taken it
    saves once more, if there is time for it, and ends the process with code 143. `track`, `restore` and `step` rest on
    `save`, `save_async`, `load_latest`, `should_save` and `preempted`, which can be used alone.

    In a gang, either rank 0 saves for all and the others load (the default), or (`sharded`) each rank saves its own
    parts: then all ranks call `save` at the same steps, and a checkpoint is committed when all have written.
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
    ) -> None:
        """Look at the root, and watch for notices (in the main thread). With an `attempt` it is claimed, see `claim`.

        What is not given comes from the environment (`mizzen.environment`), and without it from the defaults.

        Args:
            uri: root of the checkpoints: a path, `file://`, `s3://` or `gs://` URI.
            local: a folder of this machine, to which each checkpoint is written before it is uploaded to `uri`, and
                from which it is loaded if the machine still has it. A sharded gang must be on one machine for it.
            background: whether `step` saves in the background, from a copy of the state in memory.
            attempt: fencing number, from 1. Without one a process that saves takes the next after those that it has
                seen, at its first save. Of processes with the same the one that came last saves.
            keep: how many checkpoints to keep, 1 or more; 2 by default.
            keep_every: never remove the checkpoints of steps that this divides.
            interval_s: seconds from one save to the next; by default they follow from what saves cost and how often
                the gang is interrupted.
            sharded: whether each rank saves its own parts. Needs `attempt`, the same for all ranks.
            rank: of this process, from 0.
            world_size: ranks in the gang.
            agree: gives the maximum of a number over all ranks, which all call it together: at each `step`, and for
                each checkpoint that is tried by `load_latest`. Without it a gang cannot use `step`.
            shard_timeout_s: how long a sharded save waits for the other ranks.
            trusted: whether parts that were saved as `Pickled` may be loaded: that can run any code.
            other_world: whether a sharded checkpoint of a gang of another size may be loaded, without the ranks' parts.
            start_over: whether to begin without a checkpoint where there are some and none of them can be loaded.
            checksum: `xxh3_128` or `sha256`; by default the faster one that is installed.

        Raises:
            ValueError: there is no root, its scheme is not known, or a number is out of its range.
            StaleAttemptError: a newer attempt than the given one has claimed the root.
            CheckpointError: the root cannot be read.
        """
        told = TaskEnvironment.from_environ()
        uri = uri if uri is not None else told.checkpoint_uri
        if uri is None:
            raise ValueError("no root for checkpoints: give uri, or set MIZZEN_CHECKPOINT_URI")
        given_keep = keep if keep is not None else told.checkpoint_keep
        self.retention = Retention(DEFAULT_KEEP if given_keep is None else given_keep, keep_every)
        place = Gang(
            told.rank if rank is None else rank,
            told.world_size if world_size is None else world_size,
        )
        attempt = told.attempt if attempt is None else attempt
        if attempt is not None and attempt < 1:
            raise ValueError(f"attempt={attempt}: attempts are numbered from 1")
        if sharded and attempt is None and place.world_size > 1:
            raise ValueError("attempt=None: the ranks of a sharded checkpoint need the same number: give one")
        if interval_s is not None and not interval_s >= 0:
            raise ValueError(f"interval_s={interval_s}: must be 0 or more seconds")
        algorithm = checksums.known(checksum or checksums.fastest())
        notices.watch()
        watcher = notices.watcher()
        self.cadence = Cadence.from_environ(interval_s=interval_s, platform=watcher.platform if watcher else None)
        """When to save; `explain()` says why."""
        self.gang = place
        self.writer = sharded or place.rank == 0
        """Whether this process saves."""
        self.background = background
        self.skipped: tuple[Skipped, ...] = ()
        """What the last `load_latest` passed over, newest first, and why."""
        alone = Gang() if not sharded else place
        stores = [open_root(root) for root in (local, uri) if root is not None]
        self._roots = Roots(stores, attempt, alone, self.retention, algorithm, shard_timeout_s, commits=self.writer)
        self._reader = Reader(alone.rank, alone.world_size, trusted, other_world, start_over, agree)
        self._agree = agree
        self._tracked = Tracked({})
        self._own = set(OWN_PARTS)
        self._encoder = Encoder()
        self._snapshot = Snapshot()
        self._saving: Saving | None = None
        self._saved_step: int | None = None
        self._pressure = Pressure(self.cadence)

    @property
    def root(self) -> str:
        """URI of the root."""
        return self._roots.logs[-1].where

    @property
    def attempt(self) -> int | None:
        """The fencing number; None for a process that has claimed nothing (yet)."""
        return self._roots.attempt

    def claim(self) -> int:
        """Claim the root, so that no older attempt can commit there any more; the attempt.

        With an `attempt` it is done at once, else by the first save: who only looks takes nothing from who trains.

        Raises:
            StaleAttemptError: a newer attempt has claimed the root; or, where none was given, another process has
                claimed it since this one looked.
            CheckpointError: the root cannot be read.
        """
        return self._roots.claim()

    @property
    def progress(self) -> MutableMapping[str, Any]:
        """What is saved as the part `progress` beside the step: put the epoch here, and what else counts."""
        return self._tracked.progress

    @property
    def preempted(self) -> bool:
        """Whether this process was told that it, or its machine, will certainly be stopped soon."""
        return notices.preempted()

    def track(self, *, own: Collection[str] = (), **objects: Any) -> None:
        """Make these objects the state, under these names, beside the parts `rng` and `progress`: see `docs/state.md`.

        Args:
            own: names of those that differ from rank to rank, such as the position in a rank's data.
            objects: what has `state_dict` and `load_state_dict`, or a dict that is updated in place.

        Raises:
            StateError: a name cannot be a part's, or an object is not of these kinds.
        """
        self._tracked.add(objects)
        self._own |= set(own)

    def restore(self) -> int:
        """Load the newest valid checkpoint into what is tracked; the step to go on from, 0 if there is none.

        Tensors of tracked modules are read into where they are, without a second copy. Where this raises they may hold
        parts of a checkpoint.

        Raises:
            StateError: it does not fit what is tracked; nothing of it is in use then, or only parts of it. Or what is
                tracked holds something that is not stored: the first save would only find it later.
            CheckpointError: something cannot be read for another reason than being damaged; or there are checkpoints,
                none of them can be loaded, and `start_over` was not given.
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
        """The training has done `step` steps: say so, save if that is due, and leave if the machine is to be taken.

        A save that fails is told by a `CheckpointWarning` and tried again after a tenth of the interval.

        Raises:
            SystemExit: with code 143, after a notice.
            StaleAttemptError: a newer attempt has claimed the root: this process must not go on.
            CheckpointError: this is a gang, and no way to `agree` was given.
        """
        report.progress(step)
        action = self._action(step)
        if self.gang.world_size > 1:
            if self._agree is None:
                raise CheckpointError(
                    "in a gang all ranks must save at the same step: give agree (mizzen.integrations)"
                )
            action = StepAction(self._agree(action))
        if action is StepAction.NOTHING:
            return
        if action is StepAction.FLUSH and self._saving is not None and self._saving.step == step:
            self._settle()  # This very step is being saved.
        if self.writer and (action is StepAction.SAVE or (action is StepAction.FLUSH and self._saved_step != step)):
            background = self.background and action is StepAction.SAVE
            self.try_save(step, self._tracked.capture(step), own=self._own, background=background)
        if action is StepAction.SAVE:
            return
        if self._saving is not None:
            notice = notices.current()
            self._saving.join(notice.left_s(time.time()) if notice else None)
        if self._agree is not None:
            # Where a rank that ends takes the others with it, nobody ends before all are done.
            self._agree(action)
        notices.acknowledge()
        notices.exit_preempted()

    def should_save(self, step: int) -> bool:
        """Whether to save now: it is due, or a notice came and a save fits in what is left.

        False where `step` is the one that was saved last. In a gang one rank asks and the others follow it.
        """
        if step == self._saved_step or (not self.cadence.should_save(step) and notices.current() is None):
            return False
        return self._action(step) in (StepAction.SAVE, StepAction.FLUSH)

    def load_latest(self) -> Checkpoint | None:
        """The newest valid checkpoint, or None if there is none. Call it at every start: a first one finds nothing.

        Damaged and partial ones are passed over, each with a `CheckpointWarning` and an entry in `skipped`.

        Raises:
            CheckpointError: something cannot be read for another reason than being damaged; or there are checkpoints,
                none of them can be loaded, and `start_over` was not given.
        """
        with self._loading():
            found = self._newest()
        self._begin(found)
        return found

    def save(self, step: int, state: Mapping[str, Any], *, own: Collection[str] = OWN_PARTS) -> Manifest:
        """Commit `state` as the checkpoint of `step`, durably; then remove what need not be kept.

        At whatever instant the process or the machine dies, either the new checkpoint is there whole or the ones
        before it are as they were.

        Args:
            step: number of steps done, 0 or more.
            state: part name (letters, digits, `.`, `_`, `-`) to value: bytes, a file's `Path`, or a tree of dicts,
                lists, tuples and JSON values that may hold numpy arrays and torch tensors. Save all that the training
                needs: weights, optimiser, step, random generators, position in the data.
            own: names of the parts that are this rank's own, where the checkpoint is sharded.

        Raises:
            StateError: a part has a bad name or holds something that is not stored; nothing was written.
            StaleAttemptError: a newer attempt has claimed the root; nothing was committed.
            CheckpointError: this process does not save, or another rank has not written in time.
            Exception: the store's own, an OSError for files; earlier checkpoints are as they were.
        """
        self._settle()
        began_s = time.monotonic()
        encoded = self._encoded(step, state)
        manifest = write(self._roots.writers, step, encoded, own)
        held_s = time.monotonic() - began_s
        self.cadence.saved(step, held_s)
        self._saved(manifest, held_s, held_s)
        return manifest

    def try_save(
        self, step: int, state: Mapping[str, Any], *, own: Collection[str] = OWN_PARTS, background: bool = False
    ) -> None:
        """As `save` or `save_async`; but a save that fails is told by a `CheckpointWarning`, and is due again soon.

        Raises:
            StateError: as for `save`.
            StaleAttemptError: a newer attempt has claimed the root: this process must not go on.
        """
        try:
            (self.save_async if background else self.save)(step, state, own=own)
        except (StaleAttemptError, StateError):
            raise
        except Exception as error:
            self.cadence.missed()
            warnings.warn(f"{self.root}: step {step} was not saved: {error}", CheckpointWarning, stacklevel=3)

    def save_async(self, step: int, state: Mapping[str, Any], *, own: Collection[str] = OWN_PARTS) -> Saving:
        """As `save`, but from a copy of `state` in memory, in the background: it returns when the copy is made.

        If the save before is still being written it waits for that. At the end of the process it is waited for.

        Raises:
            StateError: as for `save`.
            StaleAttemptError: the save before found that a newer attempt has claimed the root.
            CheckpointError: this process does not save.
        """
        self._settle()
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

        self._saving = Saving(step, lambda: write(self._roots.writers, step, encoded, own), ended)
        return self._saving

    def wait(self) -> None:
        """Wait for the save in the background, if there is one.

        Raises:
            CheckpointError: it failed; a `StaleAttemptError` if a newer attempt has claimed the root.
        """
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.wait()

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()

    def _action(self, step: int) -> StepAction:
        """What this process would do after `step`."""
        if self._saving is not None and self._saving.done:
            self._settle()
        if notices.current() is not None:
            pressing = self._pressure.action(step == self._saved_step)
            if pressing is not StepAction.NOTHING:
                return pressing
        due = self.writer and step != self._saved_step and self.cadence.should_save(step)
        return StepAction.SAVE if due else StepAction.NOTHING

    def _settle(self) -> None:
        """Let the save in the background end; what it failed of is a warning, or an error if nothing can be saved."""
        saving, self._saving = self._saving, None
        if saving is None:
            return
        saving.join()
        if isinstance(saving.error, StaleAttemptError):
            raise saving.error
        if saving.error is not None and not saving.told:
            message = f"{self.root}: step {saving.step} was not saved: {saving.error}"
            warnings.warn(message, CheckpointWarning, stacklevel=4)

    def _encoded(self, step: int, state: Mapping[str, Any]) -> Encoded:
        if not self.writer:
            raise CheckpointError(f"{self.root}: this process does not save: rank 0 does")
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise StateError(f"step={step!r}: must be a whole number, 0 or more")
        for name in state:
            check_part_name(name)
        encoded = {name: self._encoder.encode(name, value) for name, value in state.items()}
        self.claim()
        return encoded

    def _saved(self, manifest: Manifest, held_s: float, durable_s: float) -> None:
        self._saved_step = manifest.step
        self._pressure.measured(durable_s)
        report.saved(manifest.step, manifest.created_at_s, manifest.size_bytes, held_s, durable_s)
        choice = self.cadence.explain()
        report.cadence(choice.interval_s, choice.save_s, choice.mtbf.mtbf_s, choice.step_s, choice.mtbf.source)

    def _newest(self, live: GetLive = lambda _: {}) -> Checkpoint | None:
        logs = self._roots.unread()
        found, self.skipped = read_latest(logs, self._reader, live)
        self._roots.seen(logs)
        return found

    def _begin(self, found: Checkpoint | None) -> int:
        self._roots.loaded(found.manifest if found is not None else None)
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
