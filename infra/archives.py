"""Archives of working directories (tar.gz): one walk, by which the API judges an upload and an agent unpacks it.

An archive is untrusted input. Only regular files and folders are accepted, only with paths that stay below the working
directory, and no path may be both a file and a folder. A header's declared size is compared with the limits before
anything that it describes is read or skipped, and the walk never decompresses more than its limits allow, so memory
and time are bounded whatever the headers say. ustar, PAX and GNU's long names are understood; sparse files are not.
"""

import gzip
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import BinaryIO

MAX_PATH_BYTES = 1024
"""Of a member's whole path: below PATH_MAX with room for the folder it is unpacked into."""
MAX_NAME_BYTES = 255
"""Of one part of a path (NAME_MAX)."""
_BLOCK = 512
_CHUNK_BYTES = 1 << 20
_EXTENSION_BYTES = 64 << 10
"""A PAX or long-name header holds a few paths; a larger one is refused before it is read."""
_OVERHEAD_BYTES = 4096
"""Headers and padding of one member, at most on average."""
_REGULAR = (b"0", b"\0", b"7")


class BadArchive(Exception):
    """An archive, or files beside it, that cannot be unpacked; `member` is the path at fault, if it is one's."""

    def __init__(self, message: str, member: str | None = None) -> None:
        super().__init__(message)
        self.member = member


@dataclass(frozen=True)
class Member:
    """A regular file or a folder of an archive."""

    path: str
    """Relative, in its shortest form; empty: the root folder."""
    is_folder: bool
    size_bytes: int
    executable: bool


class Tree:
    """The paths of a working directory: each is a file or a folder, and at most `max_paths` exist, implied ones too."""

    def __init__(self, max_paths: int) -> None:
        self.files: set[str] = set()
        self.folders: set[str] = set()
        self._max_paths = max_paths

    def add(self, path: str, *, is_folder: bool) -> None:
        """Add a path and the folders above it. The same file may come again: the later content counts.

        Raises:
            BadArchive: it collides with what is there, leads out of the folder, or is one too many.
        """
        check_path(path)
        above = [path[:end] for end, letter in enumerate(path) if letter == "/"]
        for folder in (*above, path) if is_folder else above:
            if folder in self.files:
                raise BadArchive("a file of this path is also the folder of another member", folder)
        if not is_folder and path in self.folders:
            raise BadArchive("a folder of this path exists, so no file can have it", path)
        self.folders.update(above)
        (self.folders if is_folder else self.files).add(path)
        if len(self.files) + len(self.folders) > self._max_paths:
            raise BadArchive(f"more than {self._max_paths} files and folders", path)

    def add_files(self, files: Iterable[str]) -> None:
        """Add the paths of a document's `files`, which are written over the archive's content.

        Raises:
            BadArchive: one of them collides with the archive.
        """
        for path in files:
            try:
                self.add(path, is_folder=False)
            except BadArchive as error:
                # Which side is at fault depends on the user: both are named.
                where = "" if error.member == path else f" (at {error.member!r})"
                raise BadArchive(f"files and archive collide: {error}{where}", path) from None

    def dump(self) -> bytes:
        """The tree as it is stored beside an archive: compressed JSON."""
        body = {"files": sorted(self.files), "folders": sorted(self.folders)}
        return zlib.compress(json.dumps(body).encode())

    @classmethod
    def load(cls, body: bytes, max_paths: int) -> "Tree":
        """What `dump` wrote. `max_paths` is the limit for what is added afterwards."""
        tree, found = cls(max_paths), json.loads(zlib.decompress(body))
        tree.files, tree.folders = set(found["files"]), set(found["folders"])
        return tree


def check_path(path: str) -> str:
    """`path`, if it can be one below a working directory.

    Raises:
        BadArchive: it is absolute, empty, has empty, `.` or `..` parts, or is longer than file systems take.
    """
    parts = path.split("/")
    if "\0" in path or any(part in ("", ".", "..") for part in parts):
        raise BadArchive("leads out of the folder: must be a relative path that stays in the working directory", path)
    size_bytes = len(os.fsencode(path)) if _encodable(path) else -1
    if not 0 <= size_bytes <= MAX_PATH_BYTES or any(len(os.fsencode(part)) > MAX_NAME_BYTES for part in parts):
        raise BadArchive(
            f"must be UTF-8 of at most {MAX_PATH_BYTES} bytes, and {MAX_NAME_BYTES} between slashes", path[:200]
        )
    return path


def inspect_archive(file: BinaryIO, *, max_bytes: int, max_members: int, files: Iterable[str] = ()) -> Tree:
    """The paths in an archive and in `files`, which go over it, or what is wrong with them. Writes nothing.

    Raises:
        BadArchive: an agent with these limits (bytes unpacked, files and folders) could not unpack it.
    """
    tree = Tree(max_members)
    for _ in walk(file, tree, max_bytes=max_bytes, max_members=max_members):
        pass
    tree.add_files(files)
    return tree


def walk(file: BinaryIO, tree: Tree, *, max_bytes: int, max_members: int) -> Iterator[tuple[Member, Iterator[bytes]]]:
    """Each member with the pieces of its content, in the archive's order, once it was found to fit `tree`.

    Content that the caller does not take is skipped. The whole stream is read, so its checksums are verified.

    Raises:
        BadArchive: it is no tar.gz archive, or it is not acceptable within the limits.
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
            raise BadArchive(f"it unpacks to more than {max_bytes} bytes", member.path)
        content = tar.content(member.size_bytes)
        yield member, content
        for _ in content:
            pass
    tar.drain()


class _Tar:
    """Reads headers and contents one after the other; never goes back, and never past `limit_bytes`."""

    def __init__(self, file: BinaryIO, limit_bytes: int) -> None:
        self._file = gzip.GzipFile(fileobj=file, mode="rb")
        self._limit_bytes = self._left_bytes = limit_bytes

    def next_member(self) -> Member | None:
        """The next file or folder; None at the end of the archive."""
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
                    raise BadArchive(f"a header of {size_bytes} bytes; at most {_EXTENSION_BYTES} are read")
                body = b"".join(self.content(size_bytes))
                if kind == b"L":
                    extended["path"] = _text(body)
                elif kind != b"K":
                    _take_records(body, extended, everywhere=kind == b"g")
                continue
            return _member(header, kind, size_bytes, extended)

    def content(self, size_bytes: int) -> Iterator[bytes]:
        """The next `size_bytes` in pieces, and then their padding."""
        left = size_bytes
        while left:
            piece = self._read(min(left, _CHUNK_BYTES))
            left -= len(piece)
            yield piece
        if size_bytes % _BLOCK:
            self._read(_BLOCK - size_bytes % _BLOCK)

    def drain(self) -> None:
        """Reads what is left, within the limit."""
        while self._take(_CHUNK_BYTES):
            pass

    def _read(self, size_bytes: int, *, may_end: bool = False) -> bytes:
        """Exactly so many bytes; none where the stream ends and `may_end`."""
        found = self._take(size_bytes)
        while 0 < len(found) < size_bytes and (more := self._take(size_bytes - len(found))):
            found += more
        if len(found) < size_bytes and not (may_end and not found):
            raise BadArchive("not a tar.gz archive: it ends in the middle")
        return found

    def _take(self, size_bytes: int) -> bytes:
        try:
            found = self._file.read(size_bytes)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise BadArchive(f"not a tar.gz archive: {error}") from None
        self._left_bytes -= len(found)
        if self._left_bytes < 0:
            raise BadArchive("it unpacks to more bytes than are allowed")
        return found


def _member(header: bytes, kind: bytes, size_bytes: int, extended: Mapping[str, str]) -> Member:
    path = _text(header[:100])
    if header[257:263] == b"ustar\0" and (prefix := _text(header[345:500])):
        path = f"{prefix}/{path}"
    path = extended.get("path", path)
    is_folder = kind == b"5" or (kind in _REGULAR and path.endswith("/"))  # as before POSIX
    path = path.removeprefix("./").rstrip("/") if is_folder else path.removeprefix("./")
    if any(name.startswith("GNU.sparse") for name in extended) or (kind not in _REGULAR and not is_folder):
        raise BadArchive("is neither a file nor a folder; links are refused, as are devices and sparse files", path)
    if "size" in extended:
        size_bytes = _decimal(extended["size"])
    return Member(
        "" if is_folder and path == "." else path,
        is_folder,
        0 if is_folder else size_bytes,
        bool(_number(header[100:108]) & 0o100),
    )


def _take_records(body: bytes, into: dict[str, str], *, everywhere: bool) -> None:
    """PAX records, `length key=value` each."""
    while body and body.rstrip(b"\0"):
        length, space, _ = body[:20].partition(b" ")
        end = _decimal(length.decode("ascii"))
        record = body[len(length) + 1 : end]
        key, equals, value = record.rstrip(b"\n").partition(b"=")
        if not space or not equals or not len(length) + 1 < end <= len(body):
            raise ValueError("a PAX header that is not well formed")
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
    """A header's number: octal, or in base 256 where it is large."""
    if field[0] & 0x80:
        if field[0] & 0x40:
            raise ValueError("a negative number in a header")
        return int.from_bytes(bytes([field[0] & 0x7F]) + field[1:])
    digits = field.split(b"\0", 1)[0].strip(b" ")
    if digits.translate(None, b"01234567"):
        raise ValueError("a header with a number that is none")
    return int(digits or b"0", 8)


def _decimal(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise ValueError(f"a PAX header with the number {text[:30]!r}")
    return int(text)


def _text(field: bytes) -> str:
    return field.split(b"\0", 1)[0].decode("utf-8", "surrogateescape")


def _encodable(path: str) -> bool:
    try:
        path.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
