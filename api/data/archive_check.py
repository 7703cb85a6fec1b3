"""Checking an uploaded archive, in a process of its own: `python -m api.data.archive_check LIMITS < archive`.

Nobody knows what an untrusted archive costs before reading it. So it is read where the kernel bounds memory and CPU
time, and where it can be killed. The answer is JSON on stdout: null, or what is wrong.
"""

import gzip
import json
import os
import resource
import sys
import tarfile
import zlib
from typing import BinaryIO

_MAX_READ_BYTES = 16 << 20


class BadArchive(Exception):
    """What is wrong with an archive, and the member's name where it is one's."""

    def __init__(self, message: str, member: str | None = None) -> None:
        super().__init__(message)
        self.member = member


class _Reader(gzip.GzipFile):
    """Refuses the reads by which a forged header would fill the memory, and stops after `left` bytes."""

    left = 0

    def read(self, size: int | None = -1) -> bytes:
        if size is None or not 0 <= size <= _MAX_READ_BYTES:
            raise BadArchive(f"a header in the archive asks for {size} bytes")
        text = super().read(size)
        self.left -= len(text)
        if self.left < 0:
            raise BadArchive("the archive unpacks to more bytes than are allowed")
        return text


def check_archive(file: BinaryIO, *, max_bytes: int, max_members: int) -> None:
    """Refuses what agents would not unpack: at most `max_bytes` in at most `max_members` regular files and folders.

    A member's declared size is judged before anything of the member is read or skipped.

    Raises:
        BadArchive: it is no tar.gz, or a member is not a regular file or folder, or leads out of the folder.
    """
    names = 0
    left_bytes = max_bytes
    try:
        reader = _Reader(fileobj=file)
        reader.left = max_bytes + (max_members + 2) * 4096  # Headers and padding come on top.
        with reader, tarfile.open(fileobj=reader, mode="r|") as tar:
            for member in tar:
                names += 1
                parts = member.name.removeprefix("./").rstrip("/").split("/")
                if names > max_members:
                    raise BadArchive(f"the archive has more than {max_members} members")
                if not (member.isreg() or member.isdir()):
                    raise BadArchive("a member is neither a file nor a folder; links are refused", member.name)
                is_root = member.isdir() and parts in ([""], ["."])
                if not is_root and any(part in ("", ".", "..") or "\0" in part for part in parts):
                    raise BadArchive("a member leads out of the archive's folder", member.name)
                if not 0 <= member.size <= left_bytes:
                    raise BadArchive(f"the archive unpacks to more than {max_bytes} bytes", member.name)
                left_bytes -= member.size
    except (tarfile.TarError, OSError, EOFError, zlib.error, ValueError) as error:
        raise BadArchive(f"the body is not a tar.gz archive: {error}") from None


def main() -> None:
    """Checks what stdin holds."""
    limits = json.loads(sys.argv[1])
    os.nice(10)  # Requests come first.
    cpu_s = limits["cpu_s"]
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    resource.setrlimit(resource.RLIMIT_AS, (limits["memory_bytes"], limits["memory_bytes"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    problem = None
    try:
        check_archive(sys.stdin.buffer, max_bytes=limits["max_bytes"], max_members=limits["max_members"])
    except BadArchive as error:
        problem = {"message": str(error), "member": error.member}
    except (MemoryError, RecursionError):
        problem = {"message": "the archive's headers need more memory than is allowed", "member": None}
    while sys.stdin.buffer.read(1 << 20):
        pass  # The sender must not find a closed pipe.
    sys.stdout.write(json.dumps(problem))


if __name__ == "__main__":
    main()
