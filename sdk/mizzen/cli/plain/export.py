"""Writes the parts of a checkpoint as files into a new folder."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from mizzen.checkpoint.errors import CorruptCheckpointError, StateError
from mizzen.checkpoint.manifest import Manifest, Part, check_part_name
from mizzen.checkpoint.part_stream import stream
from mizzen.checkpoint.parts import file_name
from mizzen.checkpoint.root_view import check_rank
from mizzen.objects.store import ObjectStore

_UNFINISHED = ".unfinished"


def export(
    store: ObjectStore,
    manifest: Manifest,
    folder: Path,
    rank: int | None = None,
    *,
    progress: Callable[[int], object] = lambda _: None,
) -> list[tuple[Part, Path]]:
    """Write all parts of a checkpoint into `folder`, or none if one fails. Return the parts with their files.

    A file gets its final name after its content is verified. The parts of single ranks are in folders `rank-0000`, ...,
    unless the gang had only one rank or `rank` is given.

    Args:
        store: the object store of the checkpoint root.
        manifest: the checkpoint.
        folder: the target folder; created if it does not exist.
        rank: write only the parts that this rank loads; None: all parts.
        progress: called with the number of bytes of each piece.

    Raises:
        ValueError: `folder` is a file or not empty, or the gang had no such rank.
        CorruptCheckpointError: a part is damaged, or its name is not valid as a file name.
        CheckpointError: a part cannot be read for another reason.
        OSError: a file cannot be written.
    """
    if rank is not None:
        check_rank(manifest, rank)
    files = _files(manifest, rank)
    made = _prepared(folder)
    written: list[Path] = []
    try:
        for name, part in files.items():
            path = folder / name
            if path.parent != folder and not path.parent.exists():
                path.parent.mkdir()
                made.append(path.parent)
            temporary = path.with_name(f".{path.name}{_UNFINISHED}")
            written.append(temporary)
            with open(temporary, "xb") as file:
                for piece in stream(store, part):
                    file.write(piece)
                    progress(len(piece))
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(path)
            written[-1] = path
    except BaseException:
        for path in written:
            path.unlink(missing_ok=True)
        for path in reversed(made):
            with suppress(OSError):
                path.rmdir()
        raise
    return [(part, folder / name) for name, part in files.items()]


def _files(manifest: Manifest, rank: int | None) -> dict[str, Part]:
    """Return the parts by file name, relative to the folder."""
    parts = manifest.parts if rank is None else manifest.parts_of(rank)
    found: dict[str, Part] = {}
    for part in parts:
        # The record is untrusted input: a part name must not lead out of the folder.
        try:
            check_part_name(part.name)
            name = file_name(part.name, part.kind)
        except (StateError, KeyError) as error:
            raise CorruptCheckpointError(
                f"{manifest.name}: part name {part.name!r} cannot be a file name: {error}"
            ) from error
        if part.rank is not None and not (isinstance(part.rank, int) and part.rank >= 0):
            raise CorruptCheckpointError(f"{manifest.name}: rank {part.rank!r} is not a non-negative integer")
        if part.rank is not None and rank is None and manifest.world_size > 1:
            name = f"rank-{part.rank:04d}/{name}"
        if name in found:
            raise CorruptCheckpointError(f"{manifest.name}: two parts have the same file name {name}")
        found[name] = part
    return found


def _prepared(folder: Path) -> list[Path]:
    """Create the folder and its missing parents. Return the folders that were created.

    Raises:
        ValueError: the path is not a folder, or the folder is not empty.
        OSError: a folder cannot be created.
    """
    if folder.is_dir():
        if any(folder.iterdir()):
            raise ValueError(f"{str(folder)!r} is not empty: give a folder that does not exist yet, or an empty one")
    elif os.path.lexists(folder):
        raise ValueError(f"{str(folder)!r} is not a folder: give a folder that does not exist yet, or an empty one")
    made = []
    for path in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
        path.mkdir()
        made.append(path)
    return made
