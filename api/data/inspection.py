"""Uploads of archives: how many at a time, and their inspection in processes that are bounded in memory and time."""

import asyncio
import base64
import contextlib
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from api.auth import Caller
from api.problems import busy, invalid, over_limit
from infra.config import Settings

_RETRY_S = 5


class Uploads:
    """The uploads of one process. Used from one event loop."""

    def __init__(self, settings: Settings) -> None:
        self._limits = settings.limits
        self._api = settings.api
        self._open: Counter[str] = Counter()
        self._inspecting: asyncio.Semaphore | None = None

    @contextmanager
    def place(self, caller: Caller) -> Iterator[None]:
        """A place among the uploads, for the length of the block, taken before the body is read.

        Raises:
            Problem: 429 if the key has as many as it may, 503 if the process has.
        """
        limits = self._limits
        if self._open[caller.id] >= limits.uploads_per_key:
            raise over_limit(
                "uploads_per_key", limits.uploads_per_key,
                f"key {caller.id} is uploading {self._open[caller.id]} archives; send the next one when one is done",
                _RETRY_S,
            )  # fmt: skip
        if self._open.total() >= limits.uploads:
            raise busy(f"{limits.uploads} archives are being uploaded, the most that this process takes", _RETRY_S)
        self._open[caller.id] += 1
        try:
            yield
        finally:
            self._open[caller.id] -= 1
            if not self._open[caller.id]:
                del self._open[caller.id]

    async def inspect(self, body: bytes) -> bytes:
        """The archive's paths (`infra.archives.Tree.dump`). Refuses what agents would not unpack, while the one who
        uploads it can still be told.

        Raises:
            Problem: 422 with what is wrong, or that reading it takes too much; 503 if it was not read in time.
        """
        if self._inspecting is None:
            self._inspecting = asyncio.Semaphore(self._limits.inspections)
        async with self._inspecting:
            code, answer = await self._run(body)
        if code == 0:
            found = json.loads(answer)
            if "paths" in found:
                return base64.b64decode(found["paths"])
            raise invalid("", f"the archive cannot be unpacked: {found['message']}", found["member"])
        if code in (-signal.SIGXCPU, -signal.SIGKILL):
            raise invalid("", f"reading the archive takes more than {self._limits.inspect_cpu_s} s of CPU time")
        raise invalid("", "the archive cannot be read within the memory that is allowed")

    async def _run(self, body: bytes) -> tuple[int, bytes]:
        limits = {
            "cpu_s": self._limits.inspect_cpu_s,
            "memory_bytes": self._limits.inspect_memory_bytes,
            "max_bytes": self._api.max_unpacked_bytes,
            "max_members": self._api.max_archive_members,
        }
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "api.data.archive_check",
            json.dumps(limits),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        try:
            async with asyncio.timeout(self._limits.inspect_s):
                answer, _ = await process.communicate(body)
        except TimeoutError:
            raise busy(f"the archive was not inspected within {self._limits.inspect_s:g} s", _RETRY_S) from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        assert process.returncode is not None
        return process.returncode, answer
