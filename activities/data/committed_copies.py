"""Copies the committed checkpoints of a workload to another region."""

from infra.copies.bandwidth import BandwidthShare
from infra.copies.copy import Progress, Wanted, copy_objects
from infra.copies.uploads import CopyStore
from mizzen.checkpoint.log import Log
from mizzen.checkpoint.root_copy import commit_copy


def copy_committed(
    source: CopyStore, target: CopyStore, *, share: BandwidthShare | None = None, progress: Progress | None = None
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
        parts = [Wanted(part.key, part.size_bytes, part.checksum) for part in manifest.parts if part.key not in copied]
        done = done_bytes

        def show(part_bytes: int, _: int, done: int = done) -> None:
            if progress is not None:
                progress(done + part_bytes, total_bytes)

        done_bytes += copy_objects(source, target, parts, name="checkpoint", share=share, progress=show)
        copied |= {part.key for part in parts}
        commit_copy(here, manifest)
    return done_bytes
