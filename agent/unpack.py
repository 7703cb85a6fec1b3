"""Filling a task's working directory: the user's archive, then the files of the specification.

The archive is a stranger's: only regular files and folders come out of it, only below the target, only so much.
"""

import errno
import gzip
import os
import shutil
import tarfile
import uuid
import zlib
from collections.abc import Mapping
from pathlib import Path

from agent.launch import Owner
from mizzen.objects import check_key

MAX_UNPACKED_BYTES = 4 << 30
MAX_MEMBERS = 100_000
_MAX_READ_BYTES = 64 << 20
_BAD_NAMES = {errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ}


class BadArchive(Exception):
    """A working directory that cannot be unpacked; the message names the member and what is wrong with it."""


def fill_workdir(
    target: Path,
    archive: Path | None,
    files: Mapping[str, str],
    *,
    owner: Owner | None = None,
    max_bytes: int = MAX_UNPACKED_BYTES,
    max_members: int = MAX_MEMBERS,
) -> None:
    """Make `target` with the content of `archive` (tar.gz) and `files`, all of it or nothing; as it is if it is there.

    Raises:
        BadArchive: a member is a link or a device, leads out of the folder, or there are too many or too large ones.
    """
    if target.exists():
        return
    staging = target.with_name(f"{target.name}.{uuid.uuid4().hex}.tmp")
    staging.mkdir(mode=0o755)
    try:
        if archive is not None:
            _unpack(archive, staging, max_bytes, max_members)
        for name, text in files.items():
            path = _inside(staging, name)
            if path.is_dir():
                raise BadArchive(f"file {name!r}: there is a folder of this name in the archive")
            path.write_bytes(text.encode())
        if owner is not None:
            _give(staging, owner)
        staging.rename(target)
    except OSError:
        if not target.exists():  # Else another call was faster, with the same content.
            raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _inside(root: Path, name: str) -> Path:
    """The path of member `name` below `root`, its folders made. No member is a link, so none of them is."""
    try:
        path = root / check_key(name)
        path.parent.mkdir(parents=True, exist_ok=True)
    except ValueError:
        raise BadArchive(f"{name!r}: must be a relative path that stays in the working directory") from None
    except (FileExistsError, NotADirectoryError):
        raise BadArchive(f"{name!r}: a file of the archive is on its way") from None
    return path


class _Reader(gzip.GzipFile):
    """Refuses the reads by which a forged header would fill the memory."""

    def read(self, size: int | None = -1) -> bytes:
        if size is None or not 0 <= size <= _MAX_READ_BYTES:
            raise BadArchive(f"a header of {size} bytes")
        return super().read(size)


def _unpack(archive: Path, root: Path, max_bytes: int, max_members: int) -> None:
    left_bytes = max_bytes
    try:
        with _Reader(archive) as file, tarfile.open(fileobj=file, mode="r:") as tar:
            for number, member in enumerate(tar):
                name = member.name.removeprefix("./").rstrip("/")
                if number >= max_members:
                    raise BadArchive(f"more than {max_members} members")
                if member.isdir():
                    if name not in ("", "."):
                        _inside(root, f"{name}/_")
                    continue
                if not member.isreg():
                    raise BadArchive(f"{member.name!r}: is neither a file nor a folder; links and devices are refused")
                left_bytes -= member.size
                if left_bytes < 0:
                    raise BadArchive(f"{member.name!r}: unpacked it is more than {max_bytes} bytes")
                path = _inside(root, name)
                source = tar.extractfile(member)
                if source is None or path.is_dir():
                    raise BadArchive(f"{member.name!r}: a folder of the archive has this name")
                with path.open("wb") as out:
                    shutil.copyfileobj(source, out, 1 << 20)
                path.chmod(0o755 if member.mode & 0o100 else 0o644)
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise BadArchive(f"not a readable tar.gz archive: {error}") from None
    except OSError as error:
        if error.errno in _BAD_NAMES:
            raise BadArchive(f"{error.filename!r}: {error.strerror}") from None
        raise


def _give(root: Path, owner: Owner) -> None:
    os.chown(root, owner.uid, owner.gid)
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            os.chown(Path(folder, name), owner.uid, owner.gid, follow_symlinks=False)
