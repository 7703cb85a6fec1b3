"""Writes the parts of a checkpoint as files into a new folder."""

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal, TypeAlias

from mizzen.checkpoint.errors import CorruptCheckpointError, StateError
from mizzen.checkpoint.manifest import Manifest, Part, check_part_name
from mizzen.checkpoint.part_stream import stream
from mizzen.checkpoint.parts import file_name
from mizzen.checkpoint.root_view import check_rank
from mizzen.objects.store import ObjectStore

Form: TypeAlias = Literal["parts", "safetensors", "hf"]
"""The forms of a part as a file; the form `dcp` is written by torch (`mizzen.integrations.dcp_export`)."""

_UNFINISHED = ".unfinished"


def export(
    store: ObjectStore,
    manifest: Manifest,
    folder: Path,
    rank: int | None = None,
    form: Form = "parts",
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
        form: `parts`: every part. `safetensors`: only parts with tensors, as `NAME.safetensors`. `hf`: what
            `from_pretrained` reads: the files that a Trainer saved, or the part `model` as `model.safetensors`.
        progress: called with the number of bytes of each piece.

    Raises:
        ValueError: `folder` is a file or not empty, the gang had no such rank, or there is nothing in this form.
        CorruptCheckpointError: a part is damaged, or its name is not valid as a file name.
        CheckpointError: a part cannot be read for another reason.
        OSError: a file cannot be written.
    """
    if rank is not None:
        check_rank(manifest, rank)
    files = _chosen(store, manifest, _files(manifest, rank), form)
    made = prepared(folder)
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


def _chosen(store: ObjectStore, manifest: Manifest, files: dict[str, Part], form: Form) -> dict[str, Part]:
    """Return the parts to write, by file name."""
    if form == "safetensors":
        files = {name.replace("part-", "", 1): part for name, part in files.items() if part.kind == "tensors"}
    elif form == "hf":
        named = {part.name: part for part in manifest.parts if part.rank is None}
        if index := named.get("files"):
            names = json.loads(b"".join(stream(store, index)))
            plain = {str(name): named[part] for part, name in names.items() if part in named}
            # The index is untrusted input: only plain names, which do not lead out of the folder.
            files = {name: part for name, part in plain.items() if name == Path(name).name and not name.startswith(".")}
        else:
            model = named.get("model")
            files = {"model.safetensors": model} if model is not None and model.kind == "tensors" else {}
    if not files:
        raise ValueError(f"{manifest.name}: no part can be written with --{form}; without it, all parts are")
    return files


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


def prepared(folder: Path) -> list[Path]:
    """Create the target folder and its missing parents. Return the folders that were created.

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
