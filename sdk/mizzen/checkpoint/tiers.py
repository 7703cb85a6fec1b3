"""A local root and the far one: a checkpoint is written to both, and the far one decides."""

import warnings
from collections.abc import Collection, Sequence
from dataclasses import replace

from mizzen.checkpoint.errors import CheckpointWarning, StaleAttemptError
from mizzen.checkpoint.log import Log
from mizzen.checkpoint.manifest import Manifest
from mizzen.checkpoint.writing import Encoded, Gang, Retention, Writer, open_writer
from mizzen.objects.store import ObjectStore


class Roots:
    """The roots of one process, the far one last: what it has seen of them, and what it holds of them.

    With a given attempt they are claimed at once, else when the first save needs them: who only looks takes nothing
    from who trains.
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
    ) -> None:
        """`attempt`: fencing number, or None for the next; the others as in `open_writer`.

        Raises:
            StaleAttemptError: a newer attempt than the given one has claimed a root.
            CheckpointError: a log cannot be read.
        """
        self.logs = [Log(store) for store in stores]
        self.writers: list[Writer] = []
        """One for each root, when they are claimed."""
        self._given, self._next = attempt, 1
        self._open = (gang, retention, algorithm)
        self._shard_timeout_s = shard_timeout_s
        self._commits = commits
        self._found: Manifest | None = None
        if attempt is not None:
            self.claim()
        elif commits:
            for log in self.logs:
                log.refresh()
            self.seen(self.logs)

    @property
    def attempt(self) -> int | None:
        """The attempt that they are claimed for; None: for none yet."""
        return self.writers[-1].attempt if self.writers else None

    def unread(self) -> list[Log]:
        """Their logs, to be read from the beginning, as every other rank and every other start would."""
        return [Log(log.store) for log in self.logs]

    def seen(self, logs: Sequence[Log]) -> None:
        """Take the attempt after all that are known: who claims one between now and the first save has the roots."""
        self._next = 1 + max(log.attempt for log in logs)

    def loaded(self, newest: Manifest | None) -> None:
        """Give the far root what only a near one has, now or with the claim."""
        self._found = newest
        if newest is not None and self.writers:
            bring_up(self.writers, newest)

    def claim(self) -> int:
        """See `Checkpointer.claim`. The far root's claim comes first: it decides between several."""
        if not self.writers:
            *others, last = [log.store for log in self.logs]
            attempt, alone = self._given or self._next, self._given is None
            decided = open_writer(last, attempt, *self._open, commits=self._commits, alone=alone)
            near = [open_writer(store, attempt, *self._open, commits=self._commits) for store in others]
            self.writers = [replace(writer, shard_timeout_s=self._shard_timeout_s) for writer in (*near, decided)]
            self.logs = [writer.log for writer in self.writers]
            self.loaded(self._found)
        return self.writers[-1].attempt


def write(writers: Sequence[Writer], step: int, encoded: Encoded, own: Collection[str]) -> Manifest:
    """Write to each root in turn: the local ones first, whose failure is a warning and does not stop the last.

    Raises:
        StaleAttemptError: a newer attempt has claimed one of them.
        Exception: the last root's own, see `Writer.write`.
    """
    save = max(writer.log.next_save for writer in writers)
    *near, far = writers
    for writer in near:
        try:
            writer.write(step, encoded, tuple(own), save)
        except StaleAttemptError:
            raise
        except Exception as error:
            warnings.warn(
                f"{writer.log.where}: step {step} was not saved here: {error}", CheckpointWarning, stacklevel=3
            )
    return far.write(step, encoded, tuple(own), save)


def bring_up(writers: Sequence[Writer], newest: Manifest) -> None:
    """Give the last root what only a local one has: the process before was killed between the two.

    That it cannot be copied is a warning: the next save is a checkpoint of both.

    Raises:
        StaleAttemptError: a newer attempt has claimed the last root.
        CheckpointError: its log cannot be read.
    """
    *near, far = writers
    far.log.refresh()
    if far.gang.rank or any(known.id >= newest.id for _, known in far.log.checkpoints):
        return
    for writer in near:
        if any(known == newest for _, known in writer.log.checkpoints):
            try:
                far.adopt(writer.log.store, newest)
            except StaleAttemptError:
                raise
            except Exception as error:
                message = f"{far.log.where}: {newest.name} of {writer.log.where} was not copied here: {error}"
                warnings.warn(message, CheckpointWarning, stacklevel=5)
