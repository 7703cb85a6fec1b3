"""Packs a working directory into a reproducible archive: the same files always give the same bytes.

`.git`, `__pycache__` and `.venv` are left out, and all paths that match a line of the folder's `.mizzenignore`
(`fnmatch`; `*` also matches `/`). A pattern without `/` matches a name in any folder (`*.pt`). A pattern with a `/` in
it matches a path relative to the packed folder (`data/*`). A pattern with a `/` at its end matches only folders
(`runs/`). Lines that start with `#` are comments.
"""

import gzip
import hashlib
import io
import os
import stat
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from mizzen.client.errors import ArchiveError

IGNORE_FILE = ".mizzenignore"
ALWAYS_IGNORED = (".git", "__pycache__", ".venv")
MAX_UNPACKED_BYTES = 512 << 20
"""The API's limit on the unpacked size. Its limit on the packed size is usually far lower."""


@dataclass(frozen=True)
class PackedFolder:
    """A packed working directory: `body` is a tar.gz; `sha256` is its hexadecimal checksum and its name at the API."""

    body: bytes
    sha256: str


def pack(folder: Path) -> PackedFolder:
    """Pack the files and folders in `folder`, sorted by path.

    The archive depends only on names, contents and the owner's execute bit, not on times, owners or other modes.

    Raises:
        ArchiveError: `folder` is not a folder or is too large, or a file in it cannot be packed.
    """
    if not folder.is_dir():
        raise ArchiveError(f"workdir: {folder} is not a folder")
    patterns = _read_patterns(folder / IGNORE_FILE)
    plain = io.BytesIO()
    left_bytes = MAX_UNPACKED_BYTES
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path, name in _walk(folder, "", patterns):
            entry, body = _entry(path, name)
            left_bytes -= len(body)
            if left_bytes < 0:
                raise ArchiveError(
                    f"workdir: {folder} holds more than {MAX_UNPACKED_BYTES >> 20} MiB: list the files that tasks do"
                    f" not need in {IGNORE_FILE}, and put large inputs into a table"
                )
            tar.addfile(entry, io.BytesIO(body))
    packed = io.BytesIO()
    with gzip.GzipFile(filename="", fileobj=packed, mode="wb", compresslevel=6, mtime=0) as file:
        file.write(plain.getbuffer())
    return PackedFolder(packed.getvalue(), hashlib.sha256(packed.getvalue()).hexdigest())


def _read_patterns(file: Path) -> list[str]:
    try:
        lines = [line.strip() for line in file.read_text().splitlines()]
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise ArchiveError(f"{file}: {error}") from None
    for number, line in enumerate(lines, 1):
        if line.startswith("!"):
            raise ArchiveError(f"{file}:{number}: {line!r}: negated patterns (!) are not supported")
    return [line for line in lines if line and not line.startswith("#")]


def _ignored(name: str, is_folder: bool, patterns: list[str]) -> bool:
    last = name.rsplit("/", 1)[-1]
    if last in ALWAYS_IGNORED:
        return True
    for pattern in patterns:
        if pattern.endswith("/") and not is_folder:
            continue
        bare = pattern.rstrip("/")
        if fnmatchcase(name, bare.lstrip("/")) if "/" in bare else fnmatchcase(last, bare):
            return True
    return False


def _walk(folder: Path, prefix: str, patterns: list[str]) -> Iterator[tuple[Path, str]]:
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise ArchiveError(f"workdir: {error}") from None
    for entry in entries:
        name = prefix + entry.name
        is_folder = entry.is_dir(follow_symlinks=False)
        if _ignored(name, is_folder, patterns):
            continue
        yield Path(entry.path), name
        if is_folder:
            yield from _walk(Path(entry.path), f"{name}/", patterns)


def _entry(path: Path, name: str) -> tuple[tarfile.TarInfo, bytes]:
    entry = tarfile.TarInfo(name)
    try:
        mode = path.lstat().st_mode
        if stat.S_ISDIR(mode):
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            return entry, b""
        if not stat.S_ISREG(mode):
            kind = "a symbolic link" if stat.S_ISLNK(mode) else "neither a file nor a folder"
            raise ArchiveError(
                f"workdir: {path} is {kind}, which cannot be packed: remove it or list it in {IGNORE_FILE}"
            )
        body = path.read_bytes()
    except OSError as error:
        raise ArchiveError(f"workdir: {error}") from None
    entry.size, entry.mode = len(body), 0o755 if mode & stat.S_IXUSR else 0o644
    return entry, body
