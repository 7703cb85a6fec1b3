"""Packs a working directory into a reproducible archive: the same files always give the same bytes.

`.git`, `__pycache__` and `.venv` are left out, and what `.gitignore` and `.mizzenignore` files list
(`mizzen.client.ignored`). Symbolic links to paths in the folder are kept.
"""

import gzip
import hashlib
import io
import os
import stat
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mizzen.client.errors import ArchiveError
from mizzen.client.ignored import OWN_FILE, Ignored

MAX_UNPACKED_BYTES = 512 << 20
"""The API's limit on the unpacked size. Its limit on the packed size is usually far lower."""
_MOST_TOLD = 5
"""Number of problems, and of large entries, that a message lists."""


@dataclass(frozen=True)
class PackedFolder:
    """A packed working directory: `body` is a tar.gz; `sha256` is its hexadecimal checksum and its name at the API."""

    body: bytes
    sha256: str


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
    plain = io.BytesIO()
    sizes: dict[str, int] = {}
    problems: list[str] = []
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for root, path, name in _found(folder, mounts or {}):
            if files is not None and name in files:
                continue
            try:
                entry, body = _entry(root, path, name)
            except ArchiveError as error:
                problems.append(str(error))
                continue
            sizes[name] = len(body)
            if not problems and sum(sizes.values()) <= MAX_UNPACKED_BYTES:
                tar.addfile(entry, io.BytesIO(body))
        for name, body in (files or {}).items():
            entry = tarfile.TarInfo(name)
            entry.size = sizes[name] = len(body)
            tar.addfile(entry, io.BytesIO(body))
    if problems:
        more = f"; and {len(problems) - _MOST_TOLD} more" if len(problems) > _MOST_TOLD else ""
        hint = f"remove what tasks do not need, or list it in {OWN_FILE}"
        raise ArchiveError(f"workdir: {'; '.join(problems[:_MOST_TOLD])}{more}: {hint}")
    if (size_bytes := sum(sizes.values())) > MAX_UNPACKED_BYTES:
        raise ArchiveError(
            f"workdir: {folder} holds {_mib(size_bytes)}, more than {_mib(MAX_UNPACKED_BYTES)}; the largest are"
            f" {_largest(sizes)}: list what tasks do not need in {OWN_FILE}, and put large inputs into a table"
        )
    packed = io.BytesIO()
    with gzip.GzipFile(filename="", fileobj=packed, mode="wb", compresslevel=6, mtime=0) as file:
        file.write(plain.getbuffer())
    return PackedFolder(packed.getvalue(), hashlib.sha256(packed.getvalue()).hexdigest())


def _found(folder: Path | None, mounts: Mapping[str, Path]) -> Iterator[tuple[Path, Path, str]]:
    """Yield what is packed: the folder that links may not leave, the path, and the name in the archive."""
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


def _entry(folder: Path, path: Path, name: str) -> tuple[tarfile.TarInfo, bytes]:
    entry = tarfile.TarInfo(name)
    try:
        mode = path.lstat().st_mode
        if stat.S_ISDIR(mode):
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            return entry, b""
        if stat.S_ISLNK(mode):
            entry.type, entry.mode, entry.linkname = tarfile.SYMTYPE, 0o777, _target(folder, path)
            return entry, b""
        if not stat.S_ISREG(mode):
            raise ArchiveError(f"{path} is neither a file nor a folder nor a symbolic link")
        body = path.read_bytes()
    except OSError as error:
        raise ArchiveError(f"{path}: {error.strerror}") from None
    entry.size, entry.mode = len(body), 0o755 if mode & stat.S_IXUSR else 0o644
    return entry, body


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
