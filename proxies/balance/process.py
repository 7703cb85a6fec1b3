"""One HAProxy process: start, end with its supervisor, stop."""

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
from collections.abc import Iterable
from pathlib import Path

CONFIGURATION = "haproxy.cfg"
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)
_log = logging.getLogger(__name__)


class HaproxyProcess:
    """A running HAProxy. The kernel kills it when the supervisor dies, so it never keeps a port after a crash."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self._name = name
        self._process = process
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, name: str, program: Path, folder: Path, descriptors: Iterable[int]) -> "HaproxyProcess":
        """Starts HAProxy with the configuration in its working folder. It inherits `descriptors`.

        Raises:
            OSError: the program cannot be executed.
        """
        supervisor = os.getpid()

        def before_exec() -> None:
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != supervisor:  # The supervisor died before the call.
                os._exit(1)
            os.setsid()  # Ctrl-C in a terminal must reach only the supervisor, which drains.

        process = await asyncio.create_subprocess_exec(
            program, "-db", "-f", CONFIGURATION, cwd=folder,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
            pass_fds=tuple(descriptors), preexec_fn=before_exec,
        )  # fmt: skip
        return cls(name, process)

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    async def wait(self) -> int:
        """Waits for the end and returns the exit code, or the negative number of the signal."""
        code = await self._process.wait()
        await self._reader
        return code

    def stop(self) -> None:
        """Stops accepting connections. The process ends after its last request, or after its own time limit."""
        self._signal(signal.SIGUSR1)

    def kill(self) -> None:
        """Kills the process."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def _read(self) -> None:
        """Logs HAProxy's alerts. Its other messages repeat what its supervisor did."""
        assert self._process.stderr is not None
        while line := await self._process.stderr.readline():
            if line.startswith(b"[ALERT]"):
                _log.warning("%s: HAProxy: %s", self._name, line.decode("utf-8", "replace").strip())
