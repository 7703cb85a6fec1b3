"""Copies committed checkpoints to another root, for example to the region where a training continues."""

import mmap
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from mizzen.checkpoint.errors import CorruptCheckpointError
from mizzen.checkpoint.log import Log, claim
from mizzen.checkpoint.lost_records import ensure_copy
from mizzen.checkpoint.manifest import Manifest, Part
from mizzen.checkpoint.part_reader import verify_part
from mizzen.checkpoint.part_stream import stream
from mizzen.objects.files import FileStore
from mizzen.objects.store import Body, ObjectStore


def fence(store: ObjectStore, attempt: int, by: str) -> None:
    """Claim the root for `attempt`, so that no older attempt can commit. Does nothing if this or a newer one has.

    Raises:
        CheckpointError: the root cannot be read.
    """
    log = Log(store)
    log.refresh()
    if log.attempt < attempt:
        claim(log, attempt, by)


def copy_checkpoint(source: ObjectStore, target: ObjectStore, manifest: Manifest) -> None:
    """Copy the parts of a committed checkpoint, and commit it to the target's log. See `copy_parts`."""
    copy_parts(source, target, manifest.parts)
    commit_copy(Log(target), manifest)


def copy_parts(source: ObjectStore, target: ObjectStore, parts: Sequence[Part]) -> None:
    """Copy parts, each under the same key. A part that the target already has is not copied again.

    Raises:
        CheckpointError: a part cannot be read, or the part or its copy is damaged.
    """
    for part in parts:
        with suppress(CorruptCheckpointError):
            verify_part(target, part)
            continue
        with _content(source, part) as body:
            target.put(part.key, body)
        verify_part(target, part)


def commit_copy(log: Log, manifest: Manifest) -> None:
    """Commit a checkpoint whose parts have been copied."""
    log.refresh()
    while all(known != manifest for _, known in log.checkpoints):
        if not log.append(manifest):
            log.advance()
    ensure_copy(log, manifest)


@contextmanager
def _content(source: ObjectStore, part: Part) -> Iterator[Body]:
    """Yield the verified content of a part: the mapped file, or a temporary file for what is in a bucket."""
    with ExitStack() as stack:
        if isinstance(source, FileStore) and part.size_bytes:
            verify_part(source, part)
            file = stack.enter_context(source.file(part.key))
            mapped = stack.enter_context(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
            yield [stack.enter_context(memoryview(mapped))]
            return
        with tempfile.NamedTemporaryFile(prefix="mizzen-") as copy:
            for piece in stream(source, part):
                copy.write(piece)
            copy.flush()
            yield Path(copy.name)
