"""Reads one output of a task, and writes it to stdout as a tar archive. Run as a process that becomes the task's user.

It imports only the standard library, and before it changes its user, who may not be able to read the files of Python.
It never follows a symbolic link, and opens each folder relative to its parent (`openat`). So it reads nothing outside
the working directory, even if processes of the task rename files meanwhile. It has no credentials. The last line on
stderr is a JSON object with what was read, or an error.

Arguments: the working directory, the path of the output, the limits and the user (`uid`, `gid` and `groups`; null: the
user stays) as JSON.
"""

import errno
import json
import os
import stat
import sys
import tarfile
from collections.abc import Iterator

_MOST_NAMED = 5
_MOST_CHARACTERS = 300
_MOST_DEPTH = 100
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
MISSING, REFUSED, CHANGED = "missing", "refused", "changed"
"""Kinds of errors: the path does not exist, the output is not allowed, or it changed while it was read."""


class _Failure(Exception):
    """`args` are the kind and a sentence."""


class _Reader:
    """Counts what is read of one output."""

    def __init__(self, limits: dict[str, int]) -> None:
        self.limits = limits
        self.files = 0
        self.size_bytes = 0
        self.left_out: list[str] = []
        self.left_out_count = 0

    def leave_out(self, name: str, why: str) -> None:
        """Records an entry that is not stored."""
        self.left_out_count += 1
        if len(self.left_out) < _MOST_NAMED:
            self.left_out.append(f"{name}: {why}"[:_MOST_CHARACTERS])

    def count(self, size_bytes: int) -> None:
        """Counts an entry.

        Raises:
            _Failure: there are more than the limit allows.
        """
        self.files += 1
        self.size_bytes += size_bytes
        if self.files > self.limits["files"]:
            raise _Failure(REFUSED, f"has more than {self.limits['files']:,} files and folders, the limit")

    def entries(self, folder: int, prefix: str, depth: int = 0) -> Iterator[tuple[int, str, str, os.stat_result]]:
        """Yields the entries below an open folder: the folder, the name in it, the path in the output, the status."""
        if depth > _MOST_DEPTH:
            raise _Failure(REFUSED, f"has folders in each other more than {_MOST_DEPTH} deep, at {prefix[:200]}")
        for name in sorted(os.listdir(folder)):
            try:
                status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                below = os.open(name, _FOLDER, dir_fd=folder) if stat.S_ISDIR(status.st_mode) else None
            except OSError as error:
                self.leave_out(prefix + name, os.strerror(error.errno or 0))
                continue
            try:
                yield folder, name, prefix + name, status
                if below is not None:
                    yield from self.entries(below, f"{prefix}{name}/", depth + 1)
            finally:
                if below is not None:
                    os.close(below)


def _open(root: str, path: str) -> tuple[int, str]:
    """Returns the open folder above the last part of `path`, and that part. No part may be a link."""
    folder = os.open(root, _FOLDER)
    *above, name = path.split("/")
    for part in above:
        try:
            below = os.open(part, _FOLDER, dir_fd=folder)
        except OSError as error:
            raise _failure(error) from None
        os.close(folder)
        folder = below
    return folder, name


def _failure(error: OSError) -> _Failure:
    if error.errno == errno.ENOENT:
        return _Failure(MISSING, "does not exist")
    if error.errno in (errno.ELOOP, errno.ENOTDIR):
        return _Failure(REFUSED, "is a link, or below a link or a file; an output must be a file or a folder")
    return _Failure(REFUSED, f"cannot be read: {os.strerror(error.errno or 0)}")


def _target(path: str, link: str, base: str) -> str | None:
    """Returns the target of the link at `path` in the output, relative to its folder; None: it leaves the output.

    `base` is the path of the output for the task: a link may have an absolute target.
    """
    folder = path.rpartition("/")[0]
    ahead = os.path.relpath(link, base) if link.startswith("/") else os.path.normpath(f"{folder}/{link}".lstrip("/"))
    if ahead.split("/")[0] in ("..", ".", ""):
        return None
    return os.path.relpath(ahead, folder or ".")


def _check_size(reader: _Reader, folder: int, name: str) -> None:
    """Counts what would be stored, and raises if that is more than the limits; the message names the largest."""
    limit_bytes = reader.limits["bytes"]
    tops: dict[str, int] = {}
    for _, _, path, status in _walk(reader, folder, name):
        size = status.st_size if stat.S_ISREG(status.st_mode) else 0
        reader.count(size)
        top = path.partition("/")[0]
        tops[top] = tops.get(top, 0) + size
    if reader.size_bytes > limit_bytes:
        largest = sorted(tops.items(), key=lambda pair: -pair[1])[:_MOST_NAMED]
        shown = ", ".join(f"{top} ({_mib(size)})" for top, size in largest)
        message = f"has {_mib(reader.size_bytes)}, more than the limit of {_mib(limit_bytes)}; the largest: {shown}"
        raise _Failure(REFUSED, message)


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):,.1f} MiB"


def _walk(reader: _Reader, folder: int, name: str) -> Iterator[tuple[int, str, str, os.stat_result]]:
    """Yields the file of an output, with its own name, or what is in its folder."""
    try:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if not stat.S_ISDIR(status.st_mode):
            if not stat.S_ISREG(status.st_mode):
                raise _Failure(REFUSED, "is a link or a special file; an output must be a file or a folder")
            yield folder, name, name, status
            return
        below = os.open(name, _FOLDER, dir_fd=folder)
    except OSError as error:
        raise _failure(error) from None
    yield from reader.entries(below, "")
    os.close(below)


def _add(tar: tarfile.TarFile, reader: _Reader, base: str, entry: tuple[int, str, str, os.stat_result]) -> None:
    folder, name, path, status = entry
    info = tarfile.TarInfo(path)
    info.mtime, info.mode = status.st_mtime, stat.S_IMODE(status.st_mode) & 0o777
    if stat.S_ISDIR(status.st_mode):
        info.type = tarfile.DIRTYPE
        reader.count(0)
        tar.addfile(info)
        return
    if stat.S_ISLNK(status.st_mode):
        link = os.readlink(name, dir_fd=folder)
        target = _target(path, link, base)
        if target is None:
            reader.leave_out(path, f"is a link to {link}, which is not in the output")
            return
        info.type, info.linkname = tarfile.SYMTYPE, target
        reader.count(0)
        tar.addfile(info)
        return
    if not stat.S_ISREG(status.st_mode):
        reader.leave_out(path, "is not a file, a folder or a link")
        return
    try:
        descriptor = os.open(name, _FILE, dir_fd=folder)
    except OSError as error:
        reader.leave_out(path, os.strerror(error.errno or 0))
        return
    with os.fdopen(descriptor, "rb") as file:
        now = os.fstat(descriptor)
        if not stat.S_ISREG(now.st_mode):
            raise _Failure(CHANGED, f"changed while it was stored, at {path}")
        info.size = now.st_size
        reader.count(info.size)
        if reader.size_bytes > reader.limits["bytes"]:
            raise _Failure(CHANGED, f"grew while it was stored, at {path}")
        try:
            tar.addfile(info, file)
        except OSError as error:
            raise _Failure(CHANGED, f"cannot be read, or changed while it was stored, at {path}: {error}") from None


def main(root: str, path: str, limits: dict[str, int]) -> dict[str, object]:
    """Writes the archive to stdout and returns what was read."""
    reader = _Reader(limits)
    try:
        folder, name = _open(root, path)
        _check_size(_Reader(limits), folder, name)
        with tarfile.open(fileobj=sys.stdout.buffer, mode="w|", format=tarfile.PAX_FORMAT) as tar:
            for entry in _walk(reader, folder, name):
                _add(tar, reader, f"{root}/{path}", entry)
        sys.stdout.buffer.flush()
    except _Failure as failure:
        return {"kind": failure.args[0], "error": failure.args[1]}
    return {
        "files": reader.files,
        "size_bytes": reader.size_bytes,
        "left_out": reader.left_out,
        "left_out_count": reader.left_out_count,
    }


if __name__ == "__main__":
    os.nice(10)
    if user := json.loads(sys.argv[4]):
        os.setgroups(user["groups"])
        os.setgid(user["gid"])
        os.setuid(user["uid"])
    said = main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
    print(json.dumps(said), file=sys.stderr)
