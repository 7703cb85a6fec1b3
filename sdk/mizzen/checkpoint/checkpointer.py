"""`Checkpointer`, the class with which a training script saves and loads its state."""

import os
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, SupportsIndex

from mizzen import notices, report
from mizzen.cadence import Cadence
from mizzen.checkpoint import loops, rng
from mizzen.checkpoint.departure import Sender, StepAction
from mizzen.checkpoint.errors import CheckpointError, StaleAttemptError
from mizzen.checkpoint.layout import Encoder
from mizzen.checkpoint.module_layout import ModuleLayout
from mizzen.checkpoint.optimizers import OptimizerWatch
from mizzen.checkpoint.place import CheckpointSettings, Gang, Place, place_of
from mizzen.checkpoint.presync import Unsent
from mizzen.checkpoint.reader import Checkpoint, Reader, Skipped, read_latest
from mizzen.checkpoint.roots import open_root
from mizzen.checkpoint.save_failures import StepStatus
from mizzen.checkpoint.state_saver import OWN_PARTS, StateSaver, whole_step
from mizzen.checkpoint.tiers import Roots
from mizzen.checkpoint.tracked_objects import Tracked
from mizzen.objects import checksums

if TYPE_CHECKING:
    from mizzen.checkpoint.first_run import FirstRun, Verification
    from mizzen.checkpoint.second_run import SecondRun


class Checkpointer(StateSaver):
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

    In a gang, rank 0 saves for all ranks and every rank loads (the default). With
    `settings=CheckpointSettings(sharded=True)` each rank saves its own parts: all ranks must call `save` at the same
    steps, and a checkpoint is committed when all ranks have written.
    """

    def __init__(
        self,
        uri: str | os.PathLike[str] | None = None,
        /,
        *,
        local: str | os.PathLike[str] | None = None,
        background: bool = False,
        keep: int | None = None,
        best: tuple[str, int] | tuple[str, int, str] | None = None,
        interval_s: float | None = None,
        attempt: int | None = None,
        verify: bool = False,
        settings: CheckpointSettings | None = None,
    ) -> None:
        """Read the root's log and start watching for notices (in the main thread).

        If an attempt number is given, also claim the root (see `claim`). If the store cannot be written at that moment,
        the first save claims it. The defaults of `uri`, `attempt`, `keep` and `interval_s`, and some of those of
        `settings`, are read from the environment (`mizzen.environment`).

        Args:
            uri: root of the checkpoints: a path, or a `file://`, `s3://` or `gs://` URI.
            local: a folder on this machine. Each checkpoint is written there before it is uploaded to `uri`, and is
                loaded from there if it still exists. A sharded gang can use it only if all ranks run on one machine.
            background: whether `step` saves in a background thread, from a copy of the state in memory.
            keep: how many of the newest valid checkpoints to keep, 1 or more; 2 by default.
            best: `("val_loss", 3)` also keeps the three checkpoints whose `progress["val_loss"]` was least at the save;
                `("accuracy", 3, "max")` those with the greatest.
            interval_s: seconds between two saves. By default the interval is computed from the cost of a save and the
                interruption rate of the gang.
            attempt: fencing token, 1 or more. Without it, a process that saves takes the number after the greatest one
                in the log, at its first save. Of several processes with the same number, only the last to claim saves.
            verify: after the first save of `step`, start the script once more from that checkpoint, in another process,
                and compare both runs; see `verification`. Whatever the script does before its first step happens twice.
            settings: rank and size of a gang, limits of failing saves, and what few scripts need.

        Raises:
            ValueError: no root is given, the scheme of the URI is unknown, or a number is out of range.
            StaleAttemptError: an attempt newer than `attempt` has claimed the root.
            CheckpointError: the root cannot be read. Or it has parts of checkpoints, but their records are lost, and
                `settings.start_over` is not set.
        """
        chosen = settings or CheckpointSettings()
        place = place_of(uri, attempt, keep, best, chosen)
        self._second = _second_run()
        if self._second is not None:
            place, local, verify = self._second.redirected(place), None, False
        tiers = chosen.tiers if self._second is None else None
        self.retention = place.retention
        if interval_s is not None and not interval_s >= 0:
            raise ValueError(f"interval_s={interval_s}: must be 0 or more seconds")
        algorithm = checksums.known(chosen.checksum or checksums.fastest())
        rng.spare_persistent_workers()
        notices.watch()
        watcher = notices.watcher()
        cadence = Cadence.from_environ(interval_s=interval_s, platform=watcher.platform if watcher else None)
        self.gang = place.gang
        writer = chosen.sharded or place.gang.rank == 0
        self.background = background
        self.skipped: tuple[Skipped, ...] = ()
        """Checkpoints that the last `load_latest` skipped, newest first, each with the reason."""
        alone = Gang() if not chosen.sharded else place.gang
        stores = [open_root(root) for root in (local, place.uri) if root is not None]
        tier_cadence = None
        if tiers is not None:
            from mizzen.checkpoint.memory_tier import with_memory  # Few scripts need it.

            stores, tier_cadence = with_memory(stores, tiers, cadence)
        roots = Roots(
            stores, place.attempt, alone, place.retention, algorithm, chosen.shard_timeout_s,
            commits=writer, start_over=chosen.start_over, tiers=tier_cadence,
        )  # fmt: skip
        encoder = Encoder(chosen.pinned_bytes, chosen.gpu_copy_bytes)
        super().__init__(roots, cadence, place.limits, encoder, writer=writer)
        self._reader = Reader(
            alone.rank, alone.world_size, chosen.trusted, chosen.other_world, chosen.start_over, chosen.agree
        )
        self._agree = chosen.agree
        self._tracked = Tracked({})
        self._own = set(OWN_PARTS)
        self._restored: loops.Stack = []
        self._optimizers: OptimizerWatch | None = None
        self._first = _first_run(self.root, place, self._tracked) if verify else None

    @property
    def progress(self) -> MutableMapping[str, Any]:
        """The dict that is saved as the part `progress`, with the step. Store the epoch and other counters in it."""
        return self._tracked.progress

    @property
    def verifies(self) -> bool:
        """Whether `verify=True` was given."""
        return self._first is not None

    @property
    def verification(self) -> "Verification | None":
        """The result of `verify=True`; None before the second run has ended."""
        return self._first.result if self._first is not None else None

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
                functions, dicts, which are updated in place, or other objects of the script's own classes.

        Raises:
            StateError: a name is not a valid part name or is already tracked, or an object cannot be tracked.
        """
        self._tracked.add(objects)
        self._own |= set(own)

    def restore(self, *, missing_ok: bool = False, extra_ok: bool = False, parts: Collection[str] | None = None) -> int:
        """Load the newest valid checkpoint into the tracked objects, and return its step; 0 if there is no checkpoint.

        The objects are changed only after the whole checkpoint was read and verified. If this raises an error, they are
        as they were before. Large modules are then read from local files once more, in place, without a second copy in
        memory; if this second read fails, the process ends (`SystemExit`).

        Args:
            missing_ok: whether the checkpoint may lack tracked parts; their objects are not changed.
            extra_ok: whether the checkpoint may have parts that are not tracked; they are ignored.
            parts: names of the only parts to restore, such as `["model"]`; all other objects are not changed.

        Raises:
            StateError: the checkpoint does not match the tracked objects. Or a tracked object holds a value that cannot
                be stored; this is checked here so that the first save does not fail later.
            CheckpointError: a file or object cannot be read for a reason other than damage. Or checkpoints exist, none
                can be loaded, and `settings.start_over` is not set.
        """
        self._restored = loops.stack()
        self._optimizers = OptimizerWatch()
        # A script that reads first how far the training is changes its objects before the restore.
        self._tracked.tells_changes &= parts is None
        with self._loading():
            found = self._newest(self._tracked.layouts(check=self.writer))
            self._take(found)
            if found is not None:
                self._tracked.restore(found.state, missing_ok=missing_ok, extra_ok=extra_ok, parts=parts)
            else:
                self._tracked.begin()
        if self._second is not None:
            self._second.restored(self._tracked.state)
        return self._begin(found)

    def step(self, step: SupportsIndex) -> StepStatus:
        """Report that `step` steps are done, save if a save is due, and exit if a notice requires it.

        Call it after every training step. A failed save causes a `CheckpointWarning` and is retried after a tenth of
        the interval; the last save after a notice is retried until the time does not suffice for another one.

        Raises:
            SystemExit: with code 143, after a notice.
            StaleAttemptError: a newer attempt has claimed the root; this process must stop training.
            CheckpointError: saves have failed in a row up to a limit (`max_failing_s`, `max_failures`). Or the gang has
                several ranks and `agree` was not given.
        """
        step = whole_step(step)
        if self._second is not None:
            self._second.stepped(step)
            return StepStatus.NOT_DUE
        if self._first is not None:
            self._first.stepped(step)
        report.progress(step)
        self._tracked.has_stepped = True
        action = self._action(step)
        reach = self._roots.due(self.background, notices.current() is not None)
        if self.gang.world_size > 1:
            if self._agree is None:
                raise CheckpointError(
                    "in a gang, all ranks must save at the same step: set agree in settings (see mizzen.integrations)"
                )
            action = StepAction(self._agree(action))
            if action is StepAction.SAVE and self._roots.has_tiers and self._roots.is_shared:
                reach = self._agree(reach)
        if action is StepAction.SAVE and not reach:
            self.cadence.missed()
            action = StepAction.NOTHING
        self._roots.insist(action in (StepAction.NOTHING, StepAction.SAVE))
        if action is StepAction.NOTHING or (action is StepAction.FLUSH and self._is_sending_ahead(step)):
            self._tracked.look()
            return self._status(False)
        if action is StepAction.FLUSH and self._saving.holds(step):
            self._saving.wait_tolerating()
        if self.writer and (action is StepAction.SAVE or (action is StepAction.FLUSH and self._saved_step != step)):
            if self._saved_step is None:
                from mizzen.checkpoint.lost_positions import warn_of_lost_position  # It parses scripts.

                objects, optimizers = [*self._tracked.objects, self.progress], self._optimizers
                untold = (lambda: optimizers.told(self._tracked.state(step))) if optimizers else None
                warn_of_lost_position(objects, self._restored, untold, stacklevel=2)
            if action is StepAction.SAVE:
                self._roots.only(reach)
                done = self.try_save(step, self._tracked.capture(step), own=self._own, background=self.background)
                if done and self._first is not None:
                    self._first.saved(step, lambda: self._saving.join(None))
                return self._status(done)
            self.save_last(step, self._tracked.capture(step), own=self._own)
        if action is not StepAction.SAVE:
            self._departure.exit(action, self._agree)
        return self._status(False)

    def only_due_tiers(self) -> None:
        """Let the next `try_save` write only the tiers that are due, as `step` does; see `Tiers`.

        Does nothing if several ranks save one checkpoint: there only `step` agrees on the tiers with the other ranks.
        """
        if not self._roots.is_shared:
            self._roots.only(self._roots.due(self.background, notices.current() is not None))

    def should_save(self, step: SupportsIndex) -> bool:
        """Return whether to save now: a save is due, or a notice was received and there is time for a save.

        Returns False if `step` was the last step saved. In a gang, call it on one rank and broadcast the result.
        """
        step = whole_step(step)
        if step == self._saved_step or (not self.cadence.should_save(step) and notices.current() is None):
            return False
        return self._action(step) in (StepAction.SAVE, StepAction.FLUSH)

    def load_latest(self) -> Checkpoint | None:
        """Load the newest valid checkpoint; None if there is none. Call it at every start, including the first.

        Damaged and incomplete checkpoints are skipped, each with a `CheckpointWarning` and an entry in `skipped`.

        Raises:
            CheckpointError: a file or object cannot be read for a reason other than damage. Or checkpoints exist, none
                can be loaded, and `settings.start_over` is not set.
        """
        with self._loading():
            found = self._newest()
            self._take(found)
        self._begin(found)
        return found

    def _action(self, step: int) -> StepAction:
        """Return the action that this process alone would take after `step`."""
        if not self._saving.is_running:
            self._saving.wait_tolerating()
        pressing = self._departure.action(step == self._saved_step)
        if pressing is not StepAction.NOTHING:
            return pressing
        due = self.writer and step != self._saved_step and self.cadence.should_save(step)
        return StepAction.SAVE if due else StepAction.NOTHING

    def _status(self, done: bool) -> StepStatus:
        """Return the status of a step; `done`: whether it was saved, or its save was started."""
        if done:
            return StepStatus.STARTED if self.background else StepStatus.SAVED
        return StepStatus.FAILED if self._failures.are_failing else StepStatus.NOT_DUE

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

    def _newest(self, layouts: Mapping[str, ModuleLayout] | None = None) -> Checkpoint | None:
        logs = self._roots.unread()
        found, self.skipped = read_latest(logs, self._reader, layouts or {})
        self._roots.seen(logs)
        return found

    def _take(self, found: Checkpoint | None) -> None:
        """Update the roots after a checkpoint was read; see `Roots.loaded`."""
        self._roots.loaded(*((found.manifest, found.verified) if found is not None else (None, frozenset())))

    def _begin(self, found: Checkpoint | None) -> int:
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


def _first_run(where: str, place: Place, tracked: Tracked) -> "FirstRun":
    """Return the part of `verify=True` in this process. Few scripts need its module, so it is imported here."""
    from mizzen.checkpoint.first_run import FirstRun

    return FirstRun(where, place.gang, place.retention.held, tracked)


def _second_run() -> "SecondRun | None":
    """Return the part of `verify=True` in a process that it has started; None in all others."""
    if "MIZZEN_VERIFY" not in os.environ:
        return None
    from mizzen.checkpoint.second_run import SecondRun

    return SecondRun.from_environ()
