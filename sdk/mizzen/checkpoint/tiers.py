"""Saving to several roots: memory, a local folder, and the remote root, which is authoritative.

Without `Tiers`, each checkpoint is written to all roots. With `Tiers`, it is written to the roots that are due
(`tier_cadence`).
"""

import time
import warnings
from collections.abc import Collection, Sequence
from dataclasses import replace

from mizzen.checkpoint.errors import CheckpointError, CheckpointWarning, StaleAttemptError
from mizzen.checkpoint.log import Log
from mizzen.checkpoint.lost_records import check_not_lost, ensure_copy, last_attempt
from mizzen.checkpoint.manifest import Manifest
from mizzen.checkpoint.place import Gang, Retention
from mizzen.checkpoint.removal import sweep
from mizzen.checkpoint.save_failures import may_pass, repeated
from mizzen.checkpoint.tier_cadence import TierCadence
from mizzen.checkpoint.writer import Encoded, Writer, open_writer
from mizzen.objects.store import ObjectStore

VOLATILE_SHARD_TIMEOUT_S = 30.0
"""How long a sharded save to memory waits for other ranks at most: the ranks may not reach the same servers."""


class Roots:
    """The roots of one process, fastest first and remote last: their logs, and their writers once they are claimed.

    If an attempt number is given, the roots are claimed at once, or by the first save if a store cannot be written now.
    Otherwise the first save claims them, so that a process that only reads does not fence the process that trains.
    """

    def __init__(
        self,
        stores: Sequence[ObjectStore],
        attempt: int | None,
        gang: Gang,
        retention: Retention,
        algorithm: str,
        shard_timeout_s: float,
        *,
        commits: bool,
        start_over: bool = False,
        tiers: TierCadence | None = None,
    ) -> None:
        """Open the roots. `attempt` is the fencing token, None for the next free one; see `open_writer` for the rest.

        Raises:
            StaleAttemptError: an attempt newer than the given one has claimed a root.
            CheckpointError: a log cannot be read.
        """
        self.logs = [Log(store) for store in stores]
        self.writers: list[Writer] = []
        """One writer for each root; empty until the roots are claimed."""
        self._far: Writer | None = None
        """The writer of the last root, claimed before the others."""
        self._begun = 0
        """Number of saves that this process has started."""
        self._tiers = tiers
        self._reach = self._next_reach = len(stores)
        self._last: Manifest | None = None
        """The newest checkpoint that this process has committed to the last root."""
        self._insists = True
        self._given, self._next = attempt, 1
        self._open = (gang, retention, algorithm)
        self._shard_timeout_s = shard_timeout_s
        self._commits = commits
        self._start_over = start_over
        self._found: Manifest | None = None
        self._verified: frozenset[str] = frozenset()
        if attempt is not None:
            try:
                self.claim()
            except CheckpointError:
                raise
            except Exception as error:
                message = f"{self.logs[-1].where}: not claimed yet: {error}; the first save claims it"
                warnings.warn(message, CheckpointWarning, stacklevel=4)
        elif commits:
            for log in self.logs:
                log.refresh()
            self.seen(self.logs)

    @property
    def is_shared(self) -> bool:
        """Whether several ranks save one checkpoint."""
        return self._open[0].world_size > 1

    @property
    def attempt(self) -> int | None:
        """The attempt that has claimed the roots; None if they are not claimed yet."""
        return self.writers[-1].attempt if self.writers else None

    def insist(self, insists: bool) -> None:
        """Set `Writer.insists` of all current and future writers."""
        self._insists = insists
        for writer in self.writers:
            writer.insists = insists

    def unread(self) -> list[Log]:
        """Return new `Log` objects of the roots, so that the logs are read from the beginning, as on every rank."""
        return [Log(log.store) for log in self.logs]

    def seen(self, logs: Sequence[Log]) -> None:
        """Set the attempt number to claim to one more than the greatest attempt in `logs`.

        If another process claims that number before this process's first save, that process owns the roots.
        """
        self._next = 1 + max(last_attempt(log) for log in logs)

    def loaded(self, newest: Manifest | None, verified: frozenset[str]) -> None:
        """If only a local root has the newest checkpoint, copy it to the remote root, now or after the claim.

        The next save takes over the parts in `verified`, given by URI, that have not changed. Uncommitted parts of
        older attempts are removed, unless nothing was loaded (`newest` is None): they may be all that is left.
        """
        self._found, self._verified = newest, verified
        for writer in self.writers:
            writer.restored = verified
        if newest is not None and self.writers:
            bring_up(self.writers, newest)
        for writer in self.writers:
            if writer.claimed.first:
                sweep(writer.log, writer.attempt, parts=newest is not None)
            if newest is not None and writer.name:
                ensure_copy(writer.log, newest)

    def claim(self) -> int:
        """See `Checkpointer.claim`. The remote root is claimed first: its log decides between concurrent claims."""
        if not self.writers:
            *others, last = [log.store for log in self.logs]
            attempt, alone = self._given or self._next, self._given is None
            if self._far is None:
                if not self._start_over and self._found is None:
                    check_not_lost(self.logs)
                self._far = open_writer(last, attempt, *self._open, commits=self._commits, alone=alone)
            near = [writer for store in others if (writer := self._near(store, attempt)) is not None]
            self.writers = [
                replace(writer, shard_timeout_s=self._timeout_s(writer), insists=self._insists)
                for writer in (*near, self._far)
            ]
            logs = {writer.log.where: writer.log for writer in self.writers}
            self.logs = [logs.get(log.where, log) for log in self.logs]
            self.loaded(self._found, self._verified)
        return self.writers[-1].attempt

    def _timeout_s(self, writer: Writer) -> float:
        limit_s = VOLATILE_SHARD_TIMEOUT_S if writer.log.store.is_volatile else self._shard_timeout_s
        return min(limit_s, self._shard_timeout_s)

    def _near(self, store: ObjectStore, attempt: int) -> Writer | None:
        """Claim a local root; if that fails, this process does not save there.

        In a gang that saves one checkpoint it is an error: the other ranks would wait there for this one at each save.
        """
        try:
            gang, retention, algorithm = self._open
            if store.is_volatile:
                retention = Retention(keep=1)
            return open_writer(store, attempt, gang, retention, algorithm, commits=self._commits)
        except CheckpointError:
            raise
        except Exception as error:
            if self.is_shared:
                raise
            message = f"{store.uri('').rstrip('/')}: checkpoints are not saved to this root: {error}"
            warnings.warn(message, CheckpointWarning, stacklevel=5)
            return None

    @property
    def reaches_root(self) -> bool:
        """Whether the save that has begun is written to the last root."""
        return self._reach >= len(self.logs)

    @property
    def has_tiers(self) -> bool:
        """Whether each root has an interval of its own."""
        return self._tiers is not None

    def due(self, background: bool, pressing: bool) -> int:
        """Return how many roots, from the fastest, are due for a save, maybe none; without `Tiers` all.

        All are due if it is `pressing`: within a notice, and before this process has claimed the roots.
        """
        if self._tiers is None or pressing or not self.writers:
            return len(self.logs)
        return self._tiers.reach(background)

    def only(self, reach: int) -> None:
        """Let the next save that begins write only this many roots, from the fastest; 0: none."""
        self._next_reach = reach

    def begin(self) -> None:
        """Count a save, before anything in it can fail.

        The ranks of a gang begin the same saves, so their counts are equal, and they find each other's shards.
        """
        self._begun += 1
        self._reach, self._next_reach = self._next_reach, len(self.logs)

    def claim_to_save(self) -> None:
        """Claim the roots for the save that has begun.

        In a gang that saves one checkpoint, repeat it after errors of a store, because the other ranks wait.

        Raises:
            StaleAttemptError: a newer attempt has claimed a root.
            Exception: the error of the last try.
        """
        limit_s = self._shard_timeout_s if self.is_shared else 0.0
        repeated(self.claim, limit_s, lambda error: self._insists and may_pass(error))

    def write(self, step: int, encoded: Encoded, own: Collection[str]) -> Manifest:
        """Write the checkpoint of the save that has begun to each root, local roots first.

        A failure at a local root is only a warning.

        Raises:
            StaleAttemptError: a newer attempt has claimed one of the roots.
            Exception: the write to the last root failed, see `Writer.write`.
        """
        save = max(writer.log.next_save for writer in self.writers)
        tier_of = {log.where: number for number, log in enumerate(self.logs)}
        *near, far = self.writers
        for writer in near:
            tier = tier_of[writer.log.where]
            if tier >= self._reach or (self._tiers is not None and not self._tiers.tries(tier)):
                continue
            try:
                self._timed(tier, writer, step, encoded, own, save)
            except StaleAttemptError:
                raise
            except Exception as error:
                if self._tiers is not None:
                    self._tiers.failed(tier)
                message = f"{writer.log.where}: step {step} was not saved to this root: {error}"
                warnings.warn(message, CheckpointWarning, stacklevel=3)
        if self._last is None or self.reaches_root:
            self._last = self._timed(len(self.logs) - 1, far, step, encoded, own, save)
        return self._last

    def _timed(
        self, tier: int, writer: Writer, step: int, encoded: Encoded, own: Collection[str], save: int
    ) -> Manifest:
        """Write to one root, and record how long it took and which failures its content survives."""
        began_s, store = time.monotonic(), writer.log.store
        if self._tiers is None:
            return writer.write(step, encoded, tuple(own), save, self._begun)
        if tier == 0:
            self._tiers.holds(0)
            store.has_peer = store.is_volatile
        manifest = writer.write(step, encoded, tuple(own), save, self._begun)
        self._tiers.written(tier, began_s)
        if tier == 0:
            self._tiers.holds(1 + store.has_peer)
        return manifest


def bring_up(writers: Sequence[Writer], newest: Manifest) -> None:
    """Copy the newest checkpoint to the last root if only a local root has it.

    Not from memory: there, it is usual that the last root has an older one, and its next save is soon.

    That is so if the previous process was killed between the two writes. A failed copy is only a warning, because the
    next save writes to both roots.

    Raises:
        StaleAttemptError: a newer attempt has claimed the last root.
        CheckpointError: the log of the last root cannot be read.
    """
    *near, far = writers
    far.log.refresh()
    if far.gang.rank or any(known.id >= newest.id for _, known in far.log.checkpoints):
        return
    for writer in near:
        if not writer.log.store.is_volatile and any(known == newest for _, known in writer.log.checkpoints):
            try:
                far.adopt(writer.log.store, newest)
            except StaleAttemptError:
                raise
            except Exception as error:
                message = f"{far.log.where}: {newest.name} was not copied from {writer.log.where}: {error}"
                warnings.warn(message, CheckpointWarning, stacklevel=5)
