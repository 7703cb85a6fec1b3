"""A copy that comes to a folder: one staged file, the object's bytes first and after them a line for each part.

A line is written when its part is on the disk, so a killed copy goes on behind the lines that are there. In the end all
is read back and compared with the lines, they are cut off, and the file gets its name.
"""

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from mizzen.objects import checksums
from mizzen.objects.disk import advise, lock
from mizzen.objects.uploads import CopyFailed, CopyInUse, Plan, Read

SUFFIX = ".upload"
_MARK = "user.mizzen.copy"
_LINE_BYTES = 80
"""Holds `sha256:` and its 64 digits."""
_PIECE_BYTES = 4 << 20
_NO_KERNEL_COPY = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF}


def open_staged(path: Path, plan: Plan) -> int:
    """The staged file, new or one that was begun, held: nobody else writes or tidies it.

    Raises:
        CopyInUse: another one holds it.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        if lock(descriptor) is False:
            os.close(descriptor)
            raise CopyInUse(f"{plan.key}: another process is copying it to {path.parent.parent}")
        # Whoever held it before may have finished or removed it: then it is an object now, or no file any more.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.stat(follow_symlinks=False)):
                return descriptor
        os.close(descriptor)


def mark_of(descriptor: int) -> str:
    """The mark of an unchanged copy; empty: it is none."""
    try:
        mark, _, written_ns = os.getxattr(descriptor, _MARK).decode().partition(" ")
    except (OSError, AttributeError, UnicodeDecodeError):
        return ""
    return mark if written_ns == str(os.fstat(descriptor).st_mtime_ns) else ""


class FileUpload:
    """See `Upload`."""

    def __init__(
        self, plan: Plan, staged: Path, descriptor: int, source: int | None, publish: Callable[[], None]
    ) -> None:
        """`descriptor`: of the staged file; `source`: of the source, if it is a file; `publish` gives the name."""
        self.plan = plan
        self.copies_itself = source is not None
        self.proof = ""
        self._staged = staged
        self._descriptor = descriptor
        self._source = source
        self._publish = publish

    def missing(self) -> list[int]:
        """See `Upload.missing`."""
        return [number for number, line in enumerate(self._lines()) if line is None]

    def take(self, number: int, read: Read) -> None:
        """See `Upload.take`. From another folder the kernel copies, and may share blocks; holes stay holes."""
        start, end = self.plan.span(number)
        if (checksum := self._copied(start, end)) is None:
            body = read()
            # What is all zeros stays a hole.
            if body.count(0) != len(body):
                _write(self._descriptor, body, start)
            checksum = checksums.checksum(checksums.fastest(), [body])
        os.fdatasync(self._descriptor)
        line = checksum.encode().ljust(_LINE_BYTES - 1) + b"\n"
        _write(self._descriptor, line, self.plan.size_bytes + number * _LINE_BYTES)

    def stored(self, number: int) -> bytearray | None:
        """See `Upload.stored`."""
        start, end = self.plan.span(number)
        body = bytearray(end - start)
        return body if _read(self._descriptor, body, start) == len(body) else None

    def finish(self) -> bool:
        """See `Upload.finish`. What is read back comes from the disk, where the kernel can be told so."""
        os.ftruncate(self._descriptor, max(os.fstat(self._descriptor).st_size, self.plan.size_bytes))
        advise(self._descriptor, "POSIX_FADV_DONTNEED")
        for number, expected in enumerate(self._lines()):
            if expected is None:
                raise CopyFailed(f"{self.plan.target_words(number)} is missing")
            found = _checksum(self._descriptor, *self.plan.span(number), expected.partition(":")[0])
            if found != expected:
                self.drop()
                raise self.plan.damaged(number, found, expected)
        os.ftruncate(self._descriptor, self.plan.size_bytes)
        _set_mark(self._descriptor, self.plan.mark)
        os.fsync(self._descriptor)
        self._publish()
        return True

    def drop(self) -> None:
        """See `Upload.drop`."""
        self._staged.unlink(missing_ok=True)

    def _lines(self) -> list[str | None]:
        raw = b""
        at, wanted = self.plan.size_bytes, self.plan.parts * _LINE_BYTES
        while len(raw) < wanted and (got := os.pread(self._descriptor, wanted - len(raw), at + len(raw))):
            raw += got
        raw = raw.ljust(wanted, b"\0")
        lines = (raw[start : start + _LINE_BYTES] for start in range(0, wanted, _LINE_BYTES))
        known = f"{checksums.fastest()}:".encode()
        return [line.decode().strip() if line.startswith(known) and line.endswith(b"\n") else None for line in lines]

    def _copied(self, start: int, end: int) -> str | None:
        """Have the kernel copy these bytes; the checksum of the source's, or None where it cannot."""
        source = self._source
        if source is None or not hasattr(os, "copy_file_range"):
            return None
        at = start
        try:
            while at < end:
                at, until = _data(source, at, end)
                while at < until:
                    copied = os.copy_file_range(source, self._descriptor, until - at, at, at)
                    if not copied:
                        return None
                    at += copied
        except OSError as error:
            if error.errno not in _NO_KERNEL_COPY:
                raise
            self._source = None
            return None
        return _checksum(source, start, end, checksums.fastest())


class WholeFile:
    """See `Upload`. An object of one part: nothing of it is kept before it is whole."""

    def __init__(self, plan: Plan, staged: Path, descriptor: int, publish: Callable[[], None]) -> None:
        """See `FileUpload`."""
        self.plan = plan
        self.copies_itself = False
        self.proof = ""
        self._staged = staged
        self._descriptor = descriptor
        self._publish = publish
        self._body = bytearray()

    def missing(self) -> list[int]:
        """See `Upload.missing`."""
        return list(range(self.plan.parts))

    def take(self, number: int, read: Read) -> None:
        """See `Upload.take`. It is written by `finish`."""
        self._body = read()

    def stored(self, number: int) -> bytearray | None:
        """See `Upload.stored`."""
        return None

    def finish(self) -> bool:
        """See `Upload.finish`. What is read back comes from the disk, where the kernel can be told so."""
        body = self._body
        if os.fstat(self._descriptor).st_size:
            os.ftruncate(self._descriptor, 0)  # What a try left that was killed.
        if body.count(0) == len(body):
            os.ftruncate(self._descriptor, len(body))
        else:
            _write(self._descriptor, body, 0)
        _set_mark(self._descriptor, self.plan.mark)
        os.fsync(self._descriptor)
        advise(self._descriptor, "POSIX_FADV_DONTNEED")
        found = bytearray(len(body) + 1)
        if _read(self._descriptor, found, 0) != len(body) or found[:-1] != body:
            self.drop()
            sums = (checksums.checksum(checksums.fastest(), [content]) for content in (found[:-1], body))
            raise self.plan.damaged(0, *sums)
        self._publish()
        return True

    def drop(self) -> None:
        """See `Upload.drop`."""
        self._staged.unlink(missing_ok=True)


def _set_mark(descriptor: int, mark: str) -> None:
    with suppress(OSError, AttributeError):
        os.setxattr(descriptor, _MARK, f"{mark} {os.fstat(descriptor).st_mtime_ns}".encode())


def _read(descriptor: int, into: bytearray, at: int) -> int:
    """Fill a buffer from a byte of a file on; how much there was."""
    filled = 0
    while filled < len(into) and (count := os.preadv(descriptor, [memoryview(into)[filled:]], at + filled)):
        filled += count
    return filled


def _write(descriptor: int, body: bytes | bytearray, at: int) -> None:
    view = memoryview(body)
    while view:
        count = os.pwrite(descriptor, view, at)
        at, view = at + count, view[count:]


def _data(descriptor: int, start: int, end: int) -> tuple[int, int]:
    """The first bytes from `start` on that are no hole: from, and up to but without; twice `end` if there are none."""
    try:
        begins = os.lseek(descriptor, start, os.SEEK_DATA)
        return (begins, min(end, os.lseek(descriptor, begins, os.SEEK_HOLE))) if begins < end else (end, end)
    except OSError as error:
        # Nothing but a hole up to the file's end; whoever does not know holes says something else.
        return (end, end) if error.errno == errno.ENXIO else (start, end)


def _checksum(descriptor: int, start: int, end: int, algorithm: str) -> str:
    """The checksum of these bytes of a file; of fewer, if it ends before."""
    digest = checksums.digest(algorithm)
    buffer = memoryview(bytearray(min(_PIECE_BYTES, end - start)))
    while start < end and (count := os.preadv(descriptor, [buffer[: end - start]], start)):
        digest.update(buffer[:count])
        start += count
    return f"{algorithm}:{digest.hexdigest()}"
