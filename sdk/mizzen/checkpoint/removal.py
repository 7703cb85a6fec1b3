"""Removes old checkpoints, and parts that were never committed, from a root."""

import contextlib
import warnings
from collections.abc import Iterable, Iterator

from mizzen.checkpoint.errors import CheckpointError, CheckpointWarning
from mizzen.checkpoint.log import Log
from mizzen.checkpoint.manifest import Claim, Manifest
from mizzen.checkpoint.part_reader import verify_part
from mizzen.checkpoint.place import Retention
from mizzen.objects.store import ObjectStore


def make_room(log: Log, retention: Retention) -> None:
    """Drop from the page cache the checkpoints that the next save will remove.

    The new parts then reuse free pages. If the cache had to grow instead, a save of 1 GiB took twice as long.
    """
    going: list[Manifest] = []
    staying: list[Manifest] = []
    best = retention.best_of(manifest for _, manifest in log.checkpoints)
    for place, (_, manifest) in enumerate(log.checkpoints, start=1):
        stays = place < retention.keep or retention.for_good(manifest.step) or manifest.id in best
        (staying if stays else going).append(manifest)
    for key in _only_of(going, staying) - {manifest.copy_key for manifest in going}:
        log.store.forget(key)


def outdated(log: Log, retention: Retention) -> list[tuple[int, Manifest]]:
    """Return the checkpoints that retention does not keep, newest first. Damaged ones do not count towards `keep`."""
    sizes = log.part_sizes()
    judged = [
        (number, manifest, all(sizes.get(part.key) == part.size_bytes for part in manifest.parts))
        for number, manifest in log.checkpoints
    ]
    best = retention.best_of(manifest for _, manifest, whole in judged if whole)
    kept: list[Manifest] = []
    old: list[tuple[int, Manifest]] = []
    for number, manifest, whole in judged:
        if len(kept) < retention.keep:
            # Damaged checkpoints do not count. They are kept until as many newer, undamaged ones exist, so that users
            # can examine them.
            kept += [manifest] if whole else []
        elif not (whole and (retention.for_good(manifest.step) or manifest.id in best)):
            old.append((number, manifest))
    return old


def prune(log: Log, retention: Retention) -> None:
    """Remove checkpoints that retention does not keep, and records that are not needed any more."""
    checkpoints, old = log.checkpoints, outdated(log, retention)
    gone = {number for number, _ in old}
    unneeded = _only_of([m for _, m in old], [m for number, m in checkpoints if number not in gone])
    newest, said = checkpoints[0][0], checkpoints[0][1].attempt
    # Remove all records before any part: several records may name the same part.
    for number, _ in reversed(old):
        log.remove(number)
    remove(log.store, unneeded)
    for entry in log.entries[::-1]:
        # A commit fences like the earlier claims of its attempt, so these are not needed. A claim of a newer
        # attempt stays: the newest commit may be a copy of an older attempt's checkpoint.
        older = not isinstance(entry.record, Claim) or entry.record.attempt <= said
        if entry.number < newest and not isinstance(entry.record, Manifest) and older:
            log.remove(entry.number)


def make_space(log: Log, retention: Retention) -> Manifest | None:
    """Remove the oldest checkpoint of a full disk, although `keep` would keep it; return it, or None.

    The newest valid checkpoint, whose parts are read to verify it, and those that are kept for good stay.

    Raises:
        CheckpointError: the root cannot be read.
    """
    log.refresh()
    checkpoints = log.checkpoints
    best = retention.best_of(manifest for _, manifest in checkpoints)
    going = [
        (number, one)
        for number, one in checkpoints
        if number < log.last and not retention.for_good(one.step) and one.id not in best
    ]
    valid = next((one for _, one in checkpoints if _is_intact(log.store, one)), None) if len(checkpoints) > 1 else None
    for number, manifest in reversed(going):
        if valid is not None and manifest != valid:
            unneeded = _only_of([manifest], [one for _, one in checkpoints if one != manifest])
            log.remove(number)
            remove(log.store, unneeded)
            return manifest
    return None


def _is_intact(store: ObjectStore, manifest: Manifest) -> bool:
    """Return whether all parts of a checkpoint equal their checksums."""
    try:
        for part in manifest.parts:
            verify_part(store, part)
    except CheckpointError:
        return False
    return True


def sweep(log: Log, attempt: int, *, parts: bool) -> None:
    """Remove the uncommitted parts and shard records of older attempts: those are fenced and cannot commit them.

    `parts`: whether a checkpoint was loaded. Otherwise, and if the log names no checkpoint, the parts may be all that
    is left; only temporary files are removed then.
    """
    with tolerated(f"{log.where}: uncommitted parts of older attempts could not be removed"):
        log.store.tidy()
        if not parts or not log.checkpoints:
            return
        needed = {key for _, manifest in log.checkpoints for key in manifest.keys}
        for folder in ("parts", "shards"):
            keys = [info.key for info in log.store.list(f"{folder}/")]
            remove(log.store, [key for key in keys if key not in needed and _attempt_of(key) < attempt])


def remove(store: ObjectStore, keys: Iterable[str]) -> None:
    """Remove objects."""
    for key in sorted(keys):
        store.delete(key)


@contextlib.contextmanager
def tolerated(what: str) -> Iterator[None]:
    """Turn a failed cleanup into a warning; the next save or claim tries it again."""
    try:
        yield
    except Exception as error:
        warnings.warn(f"{what}: {error}", CheckpointWarning, stacklevel=5)


def _only_of(going: Iterable[Manifest], staying: Iterable[Manifest]) -> set[str]:
    """Return the keys of parts, and of copies of records, that belong to `going` but not to `staying`."""
    return {key for manifest in going for key in manifest.keys} - {key for one in staying for key in one.keys}


def _attempt_of(key: str) -> int:
    """Return the attempt in a key like `parts/a0002/...`; a number above all attempts if the key has another form."""
    folder = key.split("/")[1]
    digits = folder.removeprefix("a")
    return int(digits) if folder.startswith("a") and digits.isdigit() else 1 << 62
