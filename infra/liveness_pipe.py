"""Signs of life from a process to its supervisor: bytes in a pipe, which need no disk, no port and no clock.

Each sign comes from the thing that must go on (the event loop, the dispatcher), so a process that is stopped or stuck
gives none.
"""

import asyncio
import contextlib
import os

VARIABLE = "MIZZEN_BEAT_FD"
REPORT_INTERVAL_S = 1.0
LOOP = b"l"
"""The event loop, or a main loop, turns."""
DISPATCHER = b"d"
"""The outbox was looked at, or mail was delivered."""


class LivenessReporter:
    """A process's end."""

    def __init__(self, descriptor: int | None) -> None:
        """`descriptor`: the pipe's end for writing; None: nobody listens."""
        self._descriptor = descriptor

    @classmethod
    def inherited(cls) -> "LivenessReporter":
        """The pipe that the supervisor gave to this process. Processes that this one starts do not get it."""
        found = os.environ.pop(VARIABLE, "")
        if not found.isdigit():
            return cls(None)
        descriptor = int(found)
        try:
            os.set_inheritable(descriptor, False)
            os.set_blocking(descriptor, False)
        except OSError:
            return cls(None)
        return cls(descriptor)

    def report(self, source: bytes = LOOP) -> None:
        """One sign of life. Never waits: with a supervisor that does not read, signs are dropped."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.write(self._descriptor, source)

    async def go_on(self) -> None:
        """Signs of the event loop, until cancelled."""
        while True:
            self.report()
            await asyncio.sleep(REPORT_INTERVAL_S)


class LivenessListener:
    """The supervisor's end; one for each process that it starts."""

    def __init__(self) -> None:
        self._reading, self.writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._heard: set[bytes] = set()

    def take(self, source: bytes) -> bool:
        """Whether `source` gave a sign since the last call about it."""
        self._read()
        found = source in self._heard
        self._heard.discard(source)
        return found

    def clear(self) -> None:
        """Forgets what was heard, and what a process that is gone left in the pipe."""
        self._read()
        self._heard.clear()

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self._reading, 4096):
                self._heard.update(chunk[i : i + 1] for i in range(len(chunk)))

    def close(self) -> None:
        """Frees the pipe."""
        os.close(self._reading)
        os.close(self.writing)
