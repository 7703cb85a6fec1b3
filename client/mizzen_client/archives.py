"""Packs a working directory into a reproducible archive: the same files always give the same bytes.

`.git`, `__pycache__` and `.venv` are left out, and what `.gitignore` and `.mizzenignore` files list
(`mizzen_client.ignored`). Symbolic links to paths in the folder are kept.

The archive is a sequence of parts, each a gzip member of its own with whole files, or with a piece of a large file.
Where a part ends depends only on the files near it, so a change of a file changes few parts, and only these are
uploaded again.
"""

import gzip
import hashlib
import io
import os
import stat
import tarfile
import tempfile
import weakref
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, cast

from mizzen_client.errors import ArchiveError
from mizzen_client.ignored import OWN_FILE, Ignored

MAX_UNPACKED_BYTES = 2 << 30
"""The API's limit on the unpacked size."""
MAX_PACKED_BYTES = 1 << 30
"""The API's limit on the packed size."""
_PART_BYTES = 8 << 20
"""The largest part, before it is compressed."""
_LEAST_BYTES = 1 << 20
"""Minimum size of parts with several files, before they are compressed. A larger file begins a new part."""
_ENDS = 4
"""On average, one of this many files ends a part, once the part has the minimum size."""
_IN_MEMORY_BYTES = 32 << 20
_MOST_TOLD = 5
"""Number of problems, and of large entries, that a message lists."""


@dataclass(frozen=True)
class PackedPart:
    """One part of an archive."""

    sha256: str
    start: int
    """Its first byte in the archive."""
    size_bytes: int


@dataclass(frozen=True)
class PackedFolder:
    """A packed working directory: a tar.gz; `sha256` is its hexadecimal checksum and its name at the API."""

    sha256: str
    size_bytes: int
    parts: tuple[PackedPart, ...] = field(repr=False)
    packer: "_Packer" = field(repr=False, compare=False)
    """What holds the archive."""

    @property
    def body(self) -> bytes:
        """The archive."""
        return self.read(0, self.size_bytes)

    def read(self, start: int, size_bytes: int) -> bytes:
        """Return bytes of the archive."""
        return self.packer.read(start, size_bytes)


class _Packer:
    """A file to which the tar archive is written. It compresses what it gets, in parts."""

    def __init__(self) -> None:
        self._file = tempfile.SpooledTemporaryFile(_IN_MEMORY_BYTES)  # noqa: SIM115 - the packed folder uses it
        weakref.finalize(self, self._file.close)
        self._digest = hashlib.sha256()
        self._parts: list[PackedPart] = []
        self._pending = bytearray()
        self._at = 0
        self.packed_bytes = 0

    def tell(self) -> int:
        """Return the number of bytes that were written."""
        return self._at

    def write(self, piece: bytes) -> int:
        """Take a piece of the archive."""
        self._pending += piece
        self._at += len(piece)
        while len(self._pending) >= _PART_BYTES:
            self._end(_PART_BYTES)
        return len(piece)

    def before(self, name: str, size_bytes: int) -> None:
        """End a part before the entry `name`, if one ends there."""
        is_end = zlib.crc32(name.encode(errors="surrogateescape")) % _ENDS == 0
        if self._pending and (size_bytes >= _LEAST_BYTES or (is_end and len(self._pending) >= _LEAST_BYTES)):
            self._end(len(self._pending))

    def after(self, size_bytes: int) -> None:
        """End the part after a large file."""
        if size_bytes >= _LEAST_BYTES and self._pending:
            self._end(len(self._pending))

    def finish(self) -> PackedFolder:
        """Return the archive."""
        if self._pending:
            self._end(len(self._pending))
        return PackedFolder(self._digest.hexdigest(), self.packed_bytes, tuple(self._parts), self)

    def read(self, start: int, size_bytes: int) -> bytes:
        """Return bytes of the archive."""
        self._file.seek(start)
        return self._file.read(size_bytes)

    def _end(self, size_bytes: int) -> None:
        packed = io.BytesIO()
        with gzip.GzipFile(filename="", fileobj=packed, mode="wb", compresslevel=6, mtime=0) as file:
            file.write(memoryview(self._pending)[:size_bytes])
        del self._pending[:size_bytes]
        body = packed.getvalue()
        self._parts.append(PackedPart(hashlib.sha256(body).hexdigest(), self.packed_bytes, len(body)))
        self._digest.update(body)
        self._file.write(body)
        self.packed_bytes += len(body)


def pack(
    folder: Path | None, files: Mapping[str, bytes] | None = None, mounts: Mapping[str, Path] | None = None
) -> PackedFolder:
    """Pack the files and folders in `folder`, sorted by path, and then `files`, by name, which replace those there.

    `mounts` are further files and folders, by their path in the archive. They replace those in `folder`, too.

    The archive depends only on names, contents and the owner's execute bit, not on times, owners or other modes.

    Raises:
        ArchiveError: `folder` is not a folder or is too large, or a file in it cannot be packed.
    """
    if folder is not None and not folder.is_dir():
        raise ArchiveError(f"workdir: {folder} is not a folder")
    sizes: dict[str, int] = {}
    problems: list[str] = []
    total_bytes = 0
    packer = _Packer()
    with tarfile.open(fileobj=cast(IO[bytes], packer), mode="w", format=tarfile.PAX_FORMAT) as tar:
        for root, path, name in _found(folder, mounts or {}):
            if files is not None and name in files:
                continue
            try:
                entry = _entry(root, path, name)
                sizes[name] = entry.size
                total_bytes += entry.size
                if not problems and not _excess(total_bytes, packer):
                    _add(tar, packer, entry, path)
            except ArchiveError as error:
                problems.append(str(error))
        for name, body in (files or {}).items():
            entry = tarfile.TarInfo(name)
            entry.size = sizes[name] = len(body)
            total_bytes += entry.size
            tar.addfile(entry, io.BytesIO(body))
    if problems:
        more = f"; and {len(problems) - _MOST_TOLD} more" if len(problems) > _MOST_TOLD else ""
        hint = f"remove what tasks do not need, or list it in {OWN_FILE}"
        raise ArchiveError(f"workdir: {'; '.join(problems[:_MOST_TOLD])}{more}: {hint}")
    packed = packer.finish()
    if excess := _excess(total_bytes, packer):
        raise ArchiveError(
            f"workdir: {folder} holds {excess}; the largest are {_largest(sizes)}:"
            f" list what tasks do not need in {OWN_FILE}, and put large inputs into a table"
        )
    return packed


def _excess(size_bytes: int, packer: _Packer) -> str:
    """Return a text about the limit that the folder exceeds; empty: it exceeds none."""
    if size_bytes > MAX_UNPACKED_BYTES:
        return f"{_mib(size_bytes)}, more than {_mib(MAX_UNPACKED_BYTES)}"
    if packer.packed_bytes > MAX_PACKED_BYTES:
        return f"more than {_mib(MAX_PACKED_BYTES)} when compressed"
    return ""


def _found(folder: Path | None, mounts: Mapping[str, Path]) -> Iterator[tuple[Path, Path, str]]:
    """Yield each path to pack: the folder that its links must not leave, the path, and the name in the archive."""
    mounted: dict[str, tuple[Path, Path]] = {}
    for prefix, source in mounts.items():
        path = source.resolve()
        if not path.exists():
            raise ArchiveError(f"file_mounts: {source} does not exist")
        mounted |= {prefix: (path if path.is_dir() else path.parent, path)}
        if path.is_dir():
            walked = _walk(path, f"{prefix}/", Ignored.of(path), len(prefix) + 1)
            mounted |= {name: (path, one) for one, name in walked}
    for path, name in () if folder is None else _walk(folder, "", Ignored.of(folder.absolute())):
        if name not in mounted:
            yield folder or Path(), path, name
    for name, (root, path) in mounted.items():
        yield root, path, name


def _largest(sizes: dict[str, int]) -> str:
    """Return the largest entries of the packed folder, with their sizes."""
    tops: dict[str, int] = {}
    for name, size_bytes in sizes.items():
        top, slash, _ = name.partition("/")
        tops[top + slash] = tops.get(top + slash, 0) + size_bytes
    largest = sorted(tops.items(), key=lambda pair: -pair[1])[:_MOST_TOLD]
    return ", ".join(f"{name} ({_mib(size_bytes)})" for name, size_bytes in largest if size_bytes)


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):,.0f} MiB"


def _walk(folder: Path, prefix: str, ignored: Ignored, skip: int = 0) -> Iterator[tuple[Path, str]]:
    """Yield the files and folders below a folder with their names, which begin with `prefix`.

    `ignored` applies to names without their first `skip` characters.
    """
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise ArchiveError(f"workdir: {error}") from None
    for entry in entries:
        name = prefix + entry.name
        is_folder = entry.is_dir(follow_symlinks=False)
        if ignored.has(name[skip:], is_folder):
            continue
        yield Path(entry.path), name
        if is_folder:
            below = ignored.below(Path(entry.path), f"{name[skip:]}/")
            yield from _walk(Path(entry.path), f"{name}/", below, skip)


def _entry(folder: Path, path: Path, name: str) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    try:
        status = path.lstat()
        if stat.S_ISDIR(status.st_mode):
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
        elif stat.S_ISLNK(status.st_mode):
            entry.type, entry.mode, entry.linkname = tarfile.SYMTYPE, 0o777, _target(folder, path)
        elif stat.S_ISREG(status.st_mode):
            entry.size, entry.mode = status.st_size, 0o755 if status.st_mode & stat.S_IXUSR else 0o644
        else:
            raise ArchiveError(f"{path} is neither a file nor a folder nor a symbolic link")
    except OSError as error:
        raise ArchiveError(f"{path}: {error.strerror}") from None
    return entry


def _add(tar: tarfile.TarFile, packer: _Packer, entry: tarfile.TarInfo, path: Path) -> None:
    packer.before(entry.name, entry.size)
    if not entry.isreg():
        tar.addfile(entry)
        return
    try:
        with path.open("rb") as file:
            tar.addfile(entry, file)
    except OSError as error:
        raise ArchiveError(f"{path}: {error.strerror or 'changed while it was packed'}") from None
    packer.after(entry.size)


def _target(folder: Path, path: Path) -> str:
    """Return the target of a link, as the API accepts it: relative to the link's folder, and in the packed folder."""
    given = str(path.readlink())
    # Both with the links in their own paths resolved, but not the last part of the target, which may be a link, too.
    above, root = Path(os.path.realpath(path.parent)), Path(os.path.realpath(folder))
    ahead = above / given
    target = Path(os.path.realpath(ahead.parent)) / ahead.name if ahead.name not in ("", "..") else ahead.resolve()
    if not target.is_relative_to(root) or target == root:
        raise ArchiveError(f"{path} is a symbolic link to {given}, which is not in the folder")
    return os.path.relpath(target, above)
