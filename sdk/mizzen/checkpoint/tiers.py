"""A local root and the far one: a checkpoint is written to both, and the far one decides."""

import warnings
from collections.abc import Collection, Sequence

from mizzen.checkpoint.errors import CheckpointWarning, StaleAttemptError
from mizzen.checkpoint.manifest import Manifest
from mizzen.checkpoint.writing import Encoded, Gang, Retention, Writer, open_writer
from mizzen.objects.store import ObjectStore


def open_writers(
    stores: Sequence[ObjectStore],
    attempt: int,
    gang: Gang,
    retention: Retention,
    algorithm: str,
    *,
    commits: bool,
    alone: bool,
) -> list[Writer]:
    """A writer for each root, all of one attempt. The last root's claim comes first: it decides between several.

    See `open_writer`.

    Raises:
        StaleAttemptError: a newer attempt has claimed one of them; or (`alone`) somebody the last one for this attempt.
        CheckpointError: a log cannot be read.
    """
    *others, last = stores
    decided = open_writer(last, attempt, gang, retention, algorithm, commits=commits, alone=alone)
    return [
        *(open_writer(store, attempt, gang, retention, algorithm, commits=commits) for store in others),
        decided,
    ]


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
