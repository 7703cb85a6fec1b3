"""Limits concurrent uploads of archives, and inspects archives in processes with limited memory and time."""

import asyncio
import base64
import contextlib
import json
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

from api.auth import Caller
from api.problems import busy, invalid, over_limit
from infra import children
from infra.config.settings import Settings

_RETRY_S = 5


class UploadLimits:
    """The uploads to one API process. Must be used from one event loop only."""

    def __init__(self, settings: Settings) -> None:
        self._limits = settings.limits
        self._api = settings.api
        self._open: Counter[str] = Counter()
        self._inspecting: asyncio.Semaphore | None = None

    @contextmanager
    def reserve_upload(self, caller: Caller) -> Iterator[None]:
        """Returns a context manager that counts one upload. It is entered before the body is read.

        Raises:
            Problem: 429 if the key has reached its limit of uploads, 503 if the process has.
        """
        limits = self._limits
        if self._open[caller.id] >= limits.uploads_per_key:
            raise over_limit(
                "uploads_per_key", limits.uploads_per_key,
                f"key {caller.id} is uploading {self._open[caller.id]} archives; start the next one when one is done",
                _RETRY_S,
            )  # fmt: skip
        if self._open.total() >= limits.uploads:
            raise busy(f"{limits.uploads} archives are being uploaded, the maximum of this process", _RETRY_S)
        self._open[caller.id] += 1
        try:
            yield
        finally:
            self._open[caller.id] -= 1
            if not self._open[caller.id]:
                del self._open[caller.id]

    async def inspect(self, pieces: AsyncIterator[bytes]) -> bytes:
        """Returns the paths (`infra.archives.ArchiveTree.dump`) of the archive that consists of `pieces`.

        Refuses archives that agents would refuse to unpack, so that the user gets the error at the upload.

        Raises:
            Problem: 422 if the archive is invalid or reading it exceeds a limit; 503 if it was not read in time.
        """
        if self._inspecting is None:
            self._inspecting = asyncio.Semaphore(self._limits.inspections)
        async with self._inspecting:
            code, answer = await self._run(pieces)
        if code == 0:
            found = json.loads(answer)
            if "paths" in found:
                return base64.b64decode(found["paths"])
            raise invalid("", f"the archive cannot be unpacked: {found['message']}", found["member"])
        if code in (-signal.SIGXCPU, -signal.SIGKILL):
            raise invalid("", f"reading the archive needs more than {self._limits.inspect_cpu_s} s of CPU time")
        raise invalid("", "reading the archive exceeds the memory limit")

    async def _run(self, pieces: AsyncIterator[bytes]) -> tuple[int, bytes]:
        limits = {
            "cpu_s": self._limits.inspect_cpu_s,
            "memory_bytes": self._limits.inspect_memory_bytes,
            "max_bytes": self._api.max_unpacked_bytes,
            "max_members": self._api.max_archive_members,
        }
        process = await asyncio.create_subprocess_exec(
            *children.python("-m", "api.data.archive_check", json.dumps(limits)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=children.environment({}),
        )
        try:
            async with asyncio.timeout(self._limits.inspect_s):
                assert process.stdin is not None
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # A limit has ended the process.
                    async for piece in pieces:
                        process.stdin.write(piece)
                        await process.stdin.drain()
                process.stdin.close()
                answer, _ = await process.communicate()
        except TimeoutError:
            raise busy(f"the archive was not inspected within {self._limits.inspect_s:g} s", _RETRY_S) from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        assert process.returncode is not None
        return process.returncode, answer
