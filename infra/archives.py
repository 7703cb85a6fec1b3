"""Reads archives of working directories (tar.gz). The API uses it to check uploads, and agents to unpack them.

An archive is untrusted input. Only regular files, folders and symbolic links that stay in the working directory are
accepted, only with paths below it, and no path may be both a folder and something else. A header's declared size is
compared with the limits before the content is read or skipped, and at most the allowed number of bytes is decompressed,
so memory and time are bounded for any input. Supports ustar, PAX and GNU long names, but not sparse files.
"""

import gzip
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import BinaryIO

MAX_PATH_BYTES = 1024
"""Maximum length of a member's path. Less than PATH_MAX, to leave room for the path of the target folder."""
MAX_NAME_BYTES = 255
"""Maximum length of one part of a path (NAME_MAX)."""
_BLOCK = 512
_CHUNK_BYTES = 1 << 20
_EXTENSION_BYTES = 64 << 10
"""Maximum size of a PAX or long-name header, which contains a few paths. A larger one is rejected before it is read."""
_OVERHEAD_BYTES = 4096
"""Maximum average size of the headers and padding of one member."""
_REGULAR = (b"0", b"\0", b"7")
_LINK = b"2"


class BadArchive(Exception):
    """An archive, or the files of the specification, cannot be unpacked. `member` is the invalid path, or None."""

    def __init__(self, message: str, member: str | None = None) -> None:
        super().__init__(message)
        self.member = member


@dataclass(frozen=True)
class Member:
    """A regular file, a folder or a symbolic link in an archive."""

    path: str
    """Normalised relative path; empty for the root folder."""
    is_folder: bool
    size_bytes: int
    executable: bool
    link: str | None = None
    """The target of a symbolic link, relative to its folder; None: the member is not a symbolic link."""


class ArchiveTree:
    """The paths of a working directory: folders, and files or links. At most `max_paths`, including implied folders."""

    def __init__(self, max_paths: int) -> None:
        self.files: set[str] = set()
        self.folders: set[str] = set()
        self._max_paths = max_paths

    def add(self, path: str, *, is_folder: bool) -> None:
        """Adds a path and its parent folders. A file may be added again: later content replaces earlier content.

        Raises:
            BadArchive: the path conflicts with an existing one, leaves the folder, or exceeds the number of paths.
        """
        check_path(path)
        above = [path[:end] for end, letter in enumerate(path) if letter == "/"]
        for folder in (*above, path) if is_folder else above:
            if folder in self.files:
                raise BadArchive("a file of this path is also the folder of another member", folder)
        if not is_folder and path in self.folders:
            raise BadArchive("a folder of this path exists, so it cannot be a file", path)
        self.folders.update(above)
        (self.folders if is_folder else self.files).add(path)
        if len(self.files) + len(self.folders) > self._max_paths:
            raise BadArchive(f"more than {self._max_paths} files and folders", path)

    def add_files(self, files: Iterable[str]) -> None:
        """Adds the paths of a specification's `files`, which overwrite files of the archive.

        Raises:
            BadArchive: a path conflicts with the archive.
        """
        for path in files:
            try:
                self.add(path, is_folder=False)
            except BadArchive as error:
                # Either side may be wrong, so the message names both.
                where = "" if error.member == path else f" (at {error.member!r})"
                raise BadArchive(f"files and archive collide: {error}{where}", path) from None

    def dump(self) -> bytes:
        """Returns the tree as compressed JSON, the form in which it is stored with an archive."""
        body = {"files": sorted(self.files), "folders": sorted(self.folders)}
        return zlib.compress(json.dumps(body).encode())

    @classmethod
    def load(cls, body: bytes, max_paths: int) -> "ArchiveTree":
        """Returns the tree that `dump` wrote. `max_paths` limits later additions."""
        tree, found = cls(max_paths), json.loads(zlib.decompress(body))
        tree.files, tree.folders = set(found["files"]), set(found["folders"])
        return tree


def check_path(path: str) -> str:
    """Returns `path` if it is a valid path below a working directory.

    Raises:
        BadArchive: the path is absolute or empty, has empty, `.` or `..` parts, or is too long for file systems.
    """
    parts = path.split("/")
    if "\0" in path or any(part in ("", ".", "..") for part in parts):
        raise BadArchive("leads out of the folder: must be a relative path that stays in the working directory", path)
    size_bytes = len(os.fsencode(path)) if _encodable(path) else -1
    if not 0 <= size_bytes <= MAX_PATH_BYTES or any(len(os.fsencode(part)) > MAX_NAME_BYTES for part in parts):
        raise BadArchive(
            f"must be UTF-8 of at most {MAX_PATH_BYTES} bytes, and at most {MAX_NAME_BYTES} between slashes", path[:200]
        )
    return path


def check_link(path: str, target: str) -> str:
    """Returns `target`, the target of the symbolic link `path`, if it leads to a path below the working directory.

    Only the first parts of `target` may be `..`. The folders above a member are never links, so the file system
    resolves such a target lexically.

    Raises:
        BadArchive: the target is absolute, leaves the working directory, or has `..` after a name.
    """
    parts = target.split("/")
    ups = next((number for number, part in enumerate(parts) if part != ".."), len(parts))
    if not target or "\0" in target or ups > path.count("/") or any(part in ("", ".", "..") for part in parts[ups:]):
        raise BadArchive(
            f"is a symbolic link to {target[:200]!r}: must lead to a path in the working directory, relative to the"
            " folder of the link, with `..` only at the beginning", path,
        )  # fmt: skip
    if len(target.encode(errors="surrogateescape")) > MAX_PATH_BYTES:
        raise BadArchive(f"is a symbolic link with more than {MAX_PATH_BYTES} bytes", path)
    return target


def inspect_archive(file: BinaryIO, *, max_bytes: int, max_members: int, files: Iterable[str] = ()) -> ArchiveTree:
    """Checks an archive, and `files`, which overwrite its content, and returns all paths. Writes nothing.

    `max_bytes` limits the unpacked size, `max_members` the number of files and folders.

    Raises:
        BadArchive: an agent with these limits could not unpack it.
    """
    tree = ArchiveTree(max_members)
    for _ in walk(file, tree, max_bytes=max_bytes, max_members=max_members):
        pass
    tree.add_files(files)
    return tree


def walk(
    file: BinaryIO, tree: ArchiveTree, *, max_bytes: int, max_members: int
) -> Iterator[tuple[Member, Iterator[bytes]]]:
    """Yields each member with an iterator over its content, in the archive's order, and adds its path to `tree`.

    Content that the caller does not consume is skipped. The whole stream is read, which verifies its checksum.

    Raises:
        BadArchive: the file is not a tar.gz archive, has invalid members or exceeds the limits.
    """
    tar = _Tar(file, max_bytes + (max_members + 2) * _OVERHEAD_BYTES)
    left_bytes, number = max_bytes, 0
    while (member := tar.next_member()) is not None:
        number += 1
        if number > max_members:
            raise BadArchive(f"more than {max_members} members", member.path)
        if member.path or not member.is_folder:
            tree.add(member.path, is_folder=member.is_folder)
        left_bytes -= member.size_bytes
        if left_bytes < 0:
            raise BadArchive(f"the content has more than {max_bytes} bytes", member.path)
        content = tar.content(member.size_bytes)
        yield member, content
        for _ in content:
            pass
    tar.drain()


class _Tar:
    """Reads headers and contents of a tar.gz stream sequentially, at most `limit_bytes` decompressed bytes."""

    def __init__(self, file: BinaryIO, limit_bytes: int) -> None:
        self._file = gzip.GzipFile(fileobj=file, mode="rb")
        self._limit_bytes = self._left_bytes = limit_bytes

    def next_member(self) -> Member | None:
        """Returns the next file or folder, or None at the end of the archive."""
        try:
            return self._next_member()
        except ValueError as error:
            raise BadArchive(f"not a tar.gz archive: {error}") from None

    def _next_member(self) -> Member | None:
        first, extended = self._left_bytes, dict[str, str]()
        while True:
            header = self._read(_BLOCK, may_end=0 < self._left_bytes == first < self._limit_bytes)
            if not header or header.count(0) == _BLOCK:
                return None
            _check_sum(header)
            kind, size_bytes = header[156:157], _number(header[124:136])
            if kind in (b"x", b"g", b"X", b"L", b"K"):
                if size_bytes > _EXTENSION_BYTES:
                    raise BadArchive(f"a header has {size_bytes} bytes; at most {_EXTENSION_BYTES} are allowed")
                body = b"".join(self.content(size_bytes))
                if kind in (b"L", b"K"):
                    extended["path" if kind == b"L" else "linkpath"] = _text(body)
                else:
                    _take_records(body, extended, everywhere=kind == b"g")
                continue
            return _member(header, kind, size_bytes, extended)

    def content(self, size_bytes: int) -> Iterator[bytes]:
        """Yields the next `size_bytes` in pieces, then skips their padding."""
        left = size_bytes
        while left:
            piece = self._read(min(left, _CHUNK_BYTES))
            left -= len(piece)
            yield piece
        if size_bytes % _BLOCK:
            self._read(_BLOCK - size_bytes % _BLOCK)

    def drain(self) -> None:
        """Reads the rest of the stream, within the limit."""
        while self._take(_CHUNK_BYTES):
            pass

    def _read(self, size_bytes: int, *, may_end: bool = False) -> bytes:
        """Returns exactly `size_bytes` bytes. With `may_end`, returns no bytes at the end of the stream."""
        found = self._take(size_bytes)
        while 0 < len(found) < size_bytes and (more := self._take(size_bytes - len(found))):
            found += more
        if len(found) < size_bytes and not (may_end and not found):
            raise BadArchive("not a tar.gz archive: it is truncated")
        return found

    def _take(self, size_bytes: int) -> bytes:
        try:
            found = self._file.read(size_bytes)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise BadArchive(f"not a tar.gz archive: {error}") from None
        self._left_bytes -= len(found)
        if self._left_bytes < 0:
            raise BadArchive(f"the content has more than {self._limit_bytes} bytes")
        return found


def _member(header: bytes, kind: bytes, size_bytes: int, extended: Mapping[str, str]) -> Member:
    path = _text(header[:100])
    if header[257:263] == b"ustar\0" and (prefix := _text(header[345:500])):
        path = f"{prefix}/{path}"
    path = extended.get("path", path)
    is_folder = kind == b"5" or (kind in _REGULAR and path.endswith("/"))  # A slash: pre-POSIX archives.
    path = path.removeprefix("./").rstrip("/") if is_folder else path.removeprefix("./")
    if kind == _LINK and not is_folder:
        return Member(path, False, 0, False, check_link(path, extended.get("linkpath", _text(header[157:257]))))
    if any(name.startswith("GNU.sparse") for name in extended) or (kind not in _REGULAR and not is_folder):
        raise BadArchive(
            "only files, folders and symbolic links are allowed, not hard links, devices or sparse files", path
        )
    if "size" in extended:
        size_bytes = _decimal(extended["size"])
    return Member(
        "" if is_folder and path == "." else path,
        is_folder,
        0 if is_folder else size_bytes,
        bool(_number(header[100:108]) & 0o100),
    )


def _take_records(body: bytes, into: dict[str, str], *, everywhere: bool) -> None:
    """Parses PAX records (`length key=value` each) into `into`. `everywhere` marks a global header."""
    while body and body.rstrip(b"\0"):
        length, space, _ = body[:20].partition(b" ")
        end = _decimal(length.decode("ascii"))
        record = body[len(length) + 1 : end]
        key, equals, value = record.rstrip(b"\n").partition(b"=")
        if not space or not equals or not len(length) + 1 < end <= len(body):
            raise ValueError("a PAX header is malformed")
        if everywhere and key in (b"path", b"size"):
            raise BadArchive(f"a global header sets {key.decode()} for all members")
        if not everywhere:
            into[_text(key)] = _text(value)
        body = body[end:]


def _check_sum(header: bytes) -> None:
    found = sum(header) - sum(header[148:156]) + 8 * ord(" ")
    if found != _number(header[148:156]):
        raise ValueError("a header's checksum is wrong")


def _number(field: bytes) -> int:
    """Parses a number in a header: octal, or base 256 for large numbers."""
    if field[0] & 0x80:
        if field[0] & 0x40:
            raise ValueError("a header contains a negative number")
        return int.from_bytes(bytes([field[0] & 0x7F]) + field[1:])
    digits = field.split(b"\0", 1)[0].strip(b" ")
    if digits.translate(None, b"01234567"):
        raise ValueError("a header contains an invalid number")
    return int(digits or b"0", 8)


def _decimal(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise ValueError(f"a PAX header contains the invalid number {text[:30]!r}")
    return int(text)


def _text(field: bytes) -> str:
    return field.split(b"\0", 1)[0].decode("utf-8", "surrogateescape")


def _encodable(path: str) -> bool:
    try:
        path.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
