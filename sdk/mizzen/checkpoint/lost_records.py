"""Detects that a log has lost its records, and rebuilds them.

After each commit a copy of the record is stored beside the parts of the checkpoint. It is removed before them, and only
after the record. So if a copy exists and the log names no checkpoint, records were lost: by a partial copy of the root,
or a wrong `rm`. Parts in a root without any record say the same, because a claim comes before the first part. A
training must not start from nothing then, and must not remove the parts.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from mizzen.checkpoint.errors import CheckpointError, CorruptCheckpointError
from mizzen.checkpoint.log import Log, claim, readable
from mizzen.checkpoint.manifest import COPY_NAME, Manifest, parse
from mizzen.checkpoint.part_reader import verify_part
from mizzen.checkpoint.removal import tolerated
from mizzen.objects.store import MissingObject, ObjectStore


def copy_record(log: Log, manifest: Manifest) -> None:
    """Store the copy of a committed record beside its parts. A failure is only a warning."""
    with tolerated(f"{log.where}: the copy of the record of {manifest.name} could not be written"):
        log.store.put(manifest.copy_key, manifest.to_bytes())


def ensure_copy(log: Log, manifest: Manifest) -> None:
    """Store the copy of a record that the log has, if the process that committed it was killed before it did."""
    with tolerated(f"{log.where}: the copy of the record of {manifest.name} could not be written"):
        if any(known == manifest for _, known in log.checkpoints) and log.store.size(manifest.copy_key) is None:
            copy_record(log, manifest)


def is_lost(log: Log) -> bool:
    """Return whether the root has parts of checkpoints although the log, as it was last read, names no checkpoint.

    Raises:
        CheckpointError: the root cannot be read.
    """
    if log.checkpoints:
        return False
    keys = log.part_sizes()
    if not any(key.endswith(f"/{COPY_NAME}") for key in keys) and (not keys or log.entries):
        return False
    log.refresh()  # Another process may have begun to save meanwhile.
    return not log.checkpoints and (not log.entries or any(key.endswith(f"/{COPY_NAME}") for key in keys))


def lost_message(root: str) -> str:
    """Return the error for a root that has lost its records."""
    return (
        f"{root}: there are parts of checkpoints, but log/ has no usable record of them. To rebuild the records, run "
        f"`mizzen checkpoint repair {root}`"
    )


def check_not_lost(logs: Sequence[Log]) -> None:
    """Check that the roots of a training have not lost their records. Rereads the logs.

    Raises:
        CheckpointError: no log names a checkpoint, and one has lost its records. Or a root cannot be read.
    """
    for log in logs:
        log.refresh()
    durable = [log for log in logs if not log.store.is_volatile]
    if any(log.checkpoints for log in durable):
        return
    for log in durable:
        if is_lost(log):
            raise CheckpointError(
                f"{lost_message(log.where)}. To start without a checkpoint, pass "
                "settings=CheckpointSettings(start_over=True)"
            )


def last_attempt(log: Log) -> int:
    """Return the newest attempt in the log of the checkpoint root; if the log is empty, the newest with parts there.

    Raises:
        CheckpointError: the parts cannot be listed.
    """
    if log.entries:
        return log.attempt
    folders = {key.split("/")[1].removeprefix("a") for key in log.part_sizes()}
    return max((int(folder) for folder in folders if folder.isdigit()), default=0)


class Repair(NamedTuple):
    """The result of a repair."""

    rebuilt: tuple[Manifest, ...]
    """Checkpoints whose records were written again, oldest first."""
    damaged: tuple[tuple[str, str], ...]
    """Checkpoints whose records cannot be rebuilt, each with the reason."""


def repair(store: ObjectStore, *, dry_run: bool = False) -> Repair:
    """Write the lost records of a root again, from the copies beside the parts. No process may save there meanwhile.

    Only checkpoints whose parts are all intact are rebuilt; the parts are read. Nothing is removed.

    Args:
        store: the root.
        dry_run: change nothing; only find out what would be rebuilt.

    Raises:
        StaleAttemptError: a training has claimed the root during the repair.
        CheckpointError: the root cannot be read.
    """
    log = Log(store)
    log.refresh()
    known = {manifest.id for _, manifest in log.checkpoints}
    rebuilt: list[Manifest] = []
    damaged: list[tuple[str, str]] = []
    intact: set[tuple[str, str]] = set()
    for key in sorted(log.part_sizes()):
        if not key.endswith(f"/{COPY_NAME}"):
            continue
        try:
            with readable(key), suppress(MissingObject):
                manifest = parse(store.get(key))
                if isinstance(manifest, Manifest) and manifest.id not in known:
                    for part in manifest.parts:
                        if (part.key, part.checksum) not in intact:
                            verify_part(store, part)
                            intact.add((part.key, part.checksum))
                    rebuilt.append(manifest)
        except CorruptCheckpointError as error:
            damaged.append((key.removesuffix(f"/{COPY_NAME}"), str(error)))
    rebuilt.sort(key=lambda manifest: manifest.id)
    if rebuilt and not dry_run:
        _write(log, rebuilt)
    return Repair(tuple(rebuilt), tuple(damaged))


def _write(log: Log, manifests: list[Manifest]) -> None:
    attempt = max(last_attempt(log), *(manifest.attempt for manifest in manifests), 1)
    claim(log, attempt, "repair", writer=os.urandom(4).hex())
    for manifest in manifests:
        while not log.append(manifest):
            log.advance()
            log.check(attempt)
