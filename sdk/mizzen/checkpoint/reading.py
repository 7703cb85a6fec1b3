"""Reading a folder of checkpoints. Nothing here changes it, and nothing that is not committed is looked at."""

import errno
import hashlib
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mizzen.checkpoint import parts
from mizzen.checkpoint.errors import CheckpointError, CheckpointWarning, CorruptCheckpointError
from mizzen.checkpoint.manifest import MANIFEST_FILE, CheckpointId, Manifest, Part
from mizzen.environment import local_path

_RELISTS = 5


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint."""

    manifest: Manifest
    state: dict[str, Any]
    """Part name to value, in the order in which they were saved."""

    @property
    def step(self) -> int:
        """The step whose state it is."""
        return self.manifest.step

    @property
    def attempt(self) -> int:
        """The attempt that wrote it."""
        return self.manifest.attempt


@dataclass(frozen=True)
class Skipped:
    """A checkpoint that was passed over, and why."""

    name: str
    reason: str


def checkpoint_ids(root: Path) -> list[CheckpointId]:
    """Everything in `root` that has a checkpoint's name, newest first, whether it is valid or not."""
    try:
        names = [path.name for path in root.iterdir()]
    except FileNotFoundError:
        return []
    return sorted((found for name in names if (found := CheckpointId.parse(name))), reverse=True)


def read_manifest(root: Path, identity: CheckpointId) -> Manifest:
    """The manifest of one checkpoint, after a look at the size of each part.

    Raises:
        CorruptCheckpointError: it has none, or a damaged or foreign one, or a part is missing or has another size.
    """
    folder = root / identity.name
    try:
        raw = (folder / MANIFEST_FILE).read_bytes()
    except OSError as error:
        raise _unreadable(MANIFEST_FILE, error, "is missing: it was never committed, or not copied whole") from error
    manifest = Manifest.from_bytes(raw)
    if manifest.id != identity:
        raise CorruptCheckpointError(f"{MANIFEST_FILE} is that of {manifest.name}")
    for part in manifest.parts:
        try:
            size_bytes = (folder / part.file).stat().st_size
        except OSError as error:
            raise _unreadable(part.file, error, "is missing") from error
        if size_bytes != part.size_bytes:
            raise CorruptCheckpointError(f"{part.file} has {size_bytes} bytes of {part.size_bytes}")
    return manifest


def read_part(folder: Path, part: Part) -> bytearray:
    """The content of one part's file.

    Raises:
        CorruptCheckpointError: it is missing or does not match its size and checksum.
    """
    data = bytearray(part.size_bytes)
    try:
        with open(folder / part.file, "rb", buffering=0) as file:
            view, filled = memoryview(data), 0
            while got := file.readinto(view[filled:]):
                filled += got
            longer = filled == part.size_bytes and bool(file.read(1))
    except OSError as error:
        raise _unreadable(part.file, error, "is missing") from error
    if filled != part.size_bytes or longer:
        raise CorruptCheckpointError(f"{part.file} does not have {part.size_bytes} bytes")
    if hashlib.sha256(data).hexdigest() != part.sha256:
        raise CorruptCheckpointError(f"{part.file} does not match its checksum")
    return data


def _unreadable(file: str, error: OSError, missing: str) -> Exception:
    """What an error of the file system means: a bad file, or (anything else) a folder that cannot be judged now."""
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return CorruptCheckpointError(f"{file} {missing}")
    if error.errno in (errno.EIO, errno.EISDIR):
        return CorruptCheckpointError(f"{file} cannot be read: {error.strerror}")
    # To go on without the newest checkpoint because of, say, a missing permission would throw good work away.
    return CheckpointError(f"{error.filename}: {error.strerror}")


def list_committed(root: str | os.PathLike[str], *, verify: bool = False) -> list[Manifest]:
    """The valid checkpoints in `root` (a path or `file://` URI), newest first; none if there is no such folder.

    Valid: its manifest is there and matches its checksum, and each part is there in its size; with `verify`, each
    part's checksum is computed too. Changes nothing and needs no claim: it is how an observer, such as the scheduler,
    looks at a folder.

    Raises:
        ValueError: `root` is not a local folder.
        CheckpointError: something cannot be read for another reason than being damaged.
    """
    folder = local_path(root)
    for _ in range(_RELISTS):
        found = []
        for identity in checkpoint_ids(folder):
            try:
                manifest = read_manifest(folder, identity)
                for part in manifest.parts if verify else ():
                    read_part(folder / manifest.name, part)
            except CorruptCheckpointError:
                if not (folder / identity.name).exists():
                    break  # A writer committed a newer one and removed this one meanwhile: look again.
                continue
            found.append(manifest)
        else:
            return found
    raise _outrun(folder)


def _outrun(root: Path) -> CheckpointError:
    return CheckpointError(f"{root}: checkpoints were removed faster than they could be read; keep more of them")


def _read(root: Path, identity: CheckpointId) -> Checkpoint:
    manifest = read_manifest(root, identity)
    state = {}
    for part in manifest.parts:
        data = read_part(root / identity.name, part)
        try:
            state[part.name] = parts.decode(part.kind, data)
        except CorruptCheckpointError as error:
            raise CorruptCheckpointError(f"{part.file}: {error}") from error
    return Checkpoint(manifest, state)


def read_latest(root: Path) -> tuple[Checkpoint | None, tuple[Skipped, ...]]:
    """The newest valid checkpoint in `root`, if any, and what was passed over to find it, each with a warning.

    Raises:
        CheckpointError: something cannot be read for another reason than being damaged.
    """
    for _ in range(_RELISTS):
        skipped: list[Skipped] = []
        for identity in checkpoint_ids(root):
            try:
                found = _read(root, identity)
            except CorruptCheckpointError as error:
                if not (root / identity.name).exists():
                    break  # As above.
                skipped.append(Skipped(identity.name, str(error)))
            else:
                return found, _warned(root, skipped)
        else:
            return None, _warned(root, skipped)
    raise _outrun(root)


def _warned(root: Path, skipped: list[Skipped]) -> tuple[Skipped, ...]:
    for entry in skipped:
        message = f"{root}: checkpoint {entry.name} is passed over: {entry.reason}"
        warnings.warn(message, CheckpointWarning, stacklevel=4)
    return tuple(skipped)
