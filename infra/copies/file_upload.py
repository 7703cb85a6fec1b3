"""Resumable uploads to a folder, in one staged file: the object's bytes, followed by one checksum line for each part.

The line of a part is written after the part is synced, so an interrupted copy resumes after the existing lines. At the
end the file is read back and compared with the lines, the lines are truncated, and the file is renamed.
"""

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from infra.copies.errors import CopyFailed, CopyInUse
from infra.copies.uploads import CopyPlan, Read, Upload
from mizzen.objects import checksums
from mizzen.objects.buffers import aligned
from mizzen.objects.disk import advise, lock, read

_MARK = "user.mizzen.copy"
_LINE_BYTES = 80
"""Length of a checksum line: enough for `sha256:` and 64 digits."""
_PIECE_BYTES = 4 << 20
_NO_KERNEL_COPY = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF}


def open_staged(path: Path, plan: CopyPlan) -> int:
    """Open or create the staged file of a plan, and lock it, so that no other process writes or removes it.

    Raises:
        CopyInUse: another process has locked it.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        if lock(descriptor) is False:
            os.close(descriptor)
            raise CopyInUse(f"{plan.key}: another process is copying it to {path.parent.resolve().parent}")
        # The previous holder may have renamed the file to its object, or removed it: then open it again.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.stat(follow_symlinks=False)):
                return descriptor
        os.close(descriptor)


def mark_of(descriptor: int) -> str:
    """Return the mark of a file that a copy created and that is unchanged since; else an empty string."""
    try:
        mark, _, written_ns = os.getxattr(descriptor, _MARK).decode().partition(" ")
    except (OSError, AttributeError, UnicodeDecodeError):
        return ""
    return mark if written_ns == str(os.fstat(descriptor).st_mtime_ns) else ""


class _StagedFile(Upload):
    """Base class of uploads to a folder."""

    def __init__(self, plan: CopyPlan, staged: Path, descriptor: int, publish: Callable[[], None]) -> None:
        """Create the upload.

        Args:
            plan: the copy.
            staged: path of the staged file.
            descriptor: file descriptor of the staged file.
            publish: renames the staged file to its object.
        """
        self.plan = plan
        self._staged = staged
        self._descriptor = descriptor
        self._publish = publish

    def drop(self) -> None:
        """Remove all uploaded parts; see `Upload.drop`."""
        self._staged.unlink(missing_ok=True)


class FileUpload(_StagedFile):
    """An `Upload` of an object of several parts to a folder."""

    def __init__(
        self, plan: CopyPlan, staged: Path, descriptor: int, source: int | None, publish: Callable[[], None]
    ) -> None:
        """Create the upload. `source` is the file descriptor of the source if it is a file, else None."""
        super().__init__(plan, staged, descriptor, publish)
        self.copies_itself = source is not None
        self._source = source

    def missing(self) -> list[int]:
        """Return the parts that are not uploaded yet; see `Upload.missing`."""
        return [number for number, line in enumerate(self._lines()) if line is None]

    def take(self, number: int, read: Read) -> None:
        """Upload a part; see `Upload.take`.

        From another folder the kernel copies, and may share blocks. Holes are preserved.
        """
        start, end = self.plan.span(number)
        if (checksum := self._copied(start, end)) is None:
            body = read()
            # A part of zeros is not written, so that it stays a hole.
            if body.count(0) != len(body):
                _write(self._descriptor, body, start)
            checksum = checksums.checksum(checksums.fastest(), [body])
        os.fdatasync(self._descriptor)
        line = checksum.encode().ljust(_LINE_BYTES - 1) + b"\n"
        _write(self._descriptor, line, self.plan.size_bytes + number * _LINE_BYTES)

    def stored(self, number: int) -> bytearray | None:
        """Return the content of an uploaded part; see `Upload.stored`."""
        start, end = self.plan.span(number)
        body = bytearray(end - start)
        return body if read(self._descriptor, body, start) == len(body) else None

    def finish(self) -> bool:
        """Assemble the object; see `Upload.finish`.

        The page cache is dropped first, so that the file is read back from the disk.
        """
        os.ftruncate(self._descriptor, max(os.fstat(self._descriptor).st_size, self.plan.size_bytes))
        advise(self._descriptor, "POSIX_FADV_DONTNEED")
        for number, expected in enumerate(self._lines()):
            if expected is None:
                raise CopyFailed(f"{self.plan.describe_part(number)} is missing")
            found = _checksum(self._descriptor, *self.plan.span(number), expected.partition(":")[0])
            if found != expected:
                self.drop()
                raise self.plan.damaged(number, found, expected)
        os.ftruncate(self._descriptor, self.plan.size_bytes)
        _set_mark(self._descriptor, self.plan.mark)
        os.fsync(self._descriptor)
        self._publish()
        return True

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
        """Copy a range in the kernel and return the checksum of the source's bytes; None if the kernel cannot copy."""
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


class WholeFile(_StagedFile):
    """An `Upload` of an object of one part to a folder. `finish` writes it; an interrupted upload starts again."""

    def __init__(self, plan: CopyPlan, staged: Path, descriptor: int, publish: Callable[[], None]) -> None:
        super().__init__(plan, staged, descriptor, publish)
        self._body = bytearray()

    def missing(self) -> list[int]:
        """Return the parts that are not uploaded yet; see `Upload.missing`."""
        return list(range(self.plan.parts))

    def take(self, number: int, read: Read) -> None:
        """Upload a part; see `Upload.take`. `finish` writes the part."""
        self._body = read()

    def finish(self) -> bool:
        """Assemble the object; see `Upload.finish`.

        The page cache is dropped first, so that the file is read back from the disk.
        """
        body = self._body
        if os.fstat(self._descriptor).st_size:
            os.ftruncate(self._descriptor, 0)  # Remove the content of an interrupted upload.
        if body.count(0) == len(body):
            os.ftruncate(self._descriptor, len(body))
        else:
            _write(self._descriptor, body, 0)
        _set_mark(self._descriptor, self.plan.mark)
        os.fsync(self._descriptor)
        advise(self._descriptor, "POSIX_FADV_DONTNEED")
        found = bytearray(len(body) + 1)
        if read(self._descriptor, found, 0) != len(body) or found[:-1] != body:
            self.drop()
            sums = (checksums.checksum(checksums.fastest(), [content]) for content in (found[:-1], body))
            raise self.plan.damaged(0, *sums)
        self._publish()
        return True


def _set_mark(descriptor: int, mark: str) -> None:
    with suppress(OSError, AttributeError):
        os.setxattr(descriptor, _MARK, f"{mark} {os.fstat(descriptor).st_mtime_ns}".encode())


def _write(descriptor: int, body: bytes | bytearray, at: int) -> None:
    view = memoryview(body)
    while view:
        count = os.pwrite(descriptor, view, at)
        at, view = at + count, view[count:]


def _data(descriptor: int, start: int, end: int) -> tuple[int, int]:
    """Return start and end of the first data range at or after `start`; (end, end) if there is only a hole."""
    try:
        begins = os.lseek(descriptor, start, os.SEEK_DATA)
        return (begins, min(end, os.lseek(descriptor, begins, os.SEEK_HOLE))) if begins < end else (end, end)
    except OSError as error:
        # ENXIO: only a hole up to the end of the file. Other errors: the file system does not support SEEK_DATA.
        return (end, end) if error.errno == errno.ENXIO else (start, end)


def _checksum(descriptor: int, start: int, end: int, algorithm: str) -> str:
    """Return the checksum of a range of a file; of a shorter range if the file ends before."""
    digest = checksums.digest(algorithm)
    buffer = aligned(min(_PIECE_BYTES, end - start))
    while start < end and (count := os.preadv(descriptor, [buffer[: end - start]], start)):
        digest.update(buffer[:count])
        start += count
    return f"{algorithm}:{digest.hexdigest()}"
