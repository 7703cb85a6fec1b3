"""Copies committed checkpoints to another root, for example to the region where a training continues."""

from collections.abc import Sequence

from mizzen.checkpoint.log import Log, claim
from mizzen.checkpoint.lost_records import ensure_copy
from mizzen.checkpoint.manifest import Manifest, Part
from mizzen.objects.bandwidth import BandwidthShare
from mizzen.objects.copy import Progress, Wanted, copy_objects
from mizzen.objects.store import ObjectStore


def fence(store: ObjectStore, attempt: int, by: str) -> None:
    """Claim the root for `attempt`, so that no older attempt can commit. Does nothing if this or a newer one has.

    Raises:
        CheckpointError: the root cannot be read.
    """
    log = Log(store)
    log.refresh()
    if log.attempt < attempt:
        claim(log, attempt, by)


def copy_committed(
    source: ObjectStore, target: ObjectStore, *, share: BandwidthShare | None = None, progress: Progress | None = None
) -> int:
    """Copy all complete committed checkpoints, oldest first, and return their total size in bytes.

    Parts that the target already has with the same content are not copied again, so an interrupted copy resumes. A
    checkpoint is committed to the target's log when all its parts are copied. `progress` is called with (bytes done,
    bytes in total) after each part.

    Raises:
        CheckpointError: a log cannot be read.
        CopyFailed: the copy of a part differs from the original.
    """
    there, here = Log(source), Log(target)
    there.refresh()
    sizes = there.part_sizes()
    whole = [m for _, m in reversed(there.checkpoints) if all(sizes.get(p.key) == p.size_bytes for p in m.parts)]
    wanted = {part.key: part for manifest in whole for part in manifest.parts}
    total_bytes = sum(part.size_bytes for part in wanted.values())
    done_bytes = 0
    copied: set[str] = set()
    for manifest in whole:
        parts = [part for part in manifest.parts if part.key not in copied]
        done = done_bytes

        def show(part_bytes: int, _: int, done: int = done) -> None:
            if progress is not None:
                progress(done + part_bytes, total_bytes)

        done_bytes += copy_parts(source, target, parts, share, show)
        copied |= {part.key for part in parts}
        _commit(here, manifest)
    return done_bytes


def copy_checkpoint(
    source: ObjectStore,
    target: ObjectStore,
    manifest: Manifest,
    *,
    share: BandwidthShare | None = None,
    progress: Progress | None = None,
) -> None:
    """Copy one committed checkpoint, and commit it to the target's log. See `copy_committed`."""
    copy_parts(source, target, manifest.parts, share, progress)
    _commit(Log(target), manifest)


def copy_parts(
    source: ObjectStore,
    target: ObjectStore,
    parts: Sequence[Part],
    share: BandwidthShare | None = None,
    progress: Progress | None = None,
) -> int:
    """Copy parts, each under the same key. See `copy_objects`."""
    wanted = [Wanted(part.key, part.size_bytes, part.checksum) for part in parts]
    return copy_objects(source, target, wanted, name="checkpoint", share=share, progress=progress)


def _commit(log: Log, manifest: Manifest) -> None:
    log.refresh()
    while all(known != manifest for _, known in log.checkpoints):
        if not log.append(manifest):
            log.advance()
    ensure_copy(log, manifest)
