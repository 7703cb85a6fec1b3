"""Liveness signs of a process, sent to its supervisor as bytes through a pipe, without a disk, a port or a clock.

The monitored loop itself (the event loop or the dispatcher) sends the signs, so a stopped or stuck process sends none.
"""

import asyncio
import contextlib
import os

VARIABLE = "MIZZEN_BEAT_FD"
REPORT_INTERVAL_S = 1.0
LOOP = b"l"
"""Sign that the event loop, or another main loop, is running."""
DISPATCHER = b"d"
"""Sign that the dispatcher has checked the outbox or delivered messages."""


class LivenessReporter:
    """The end of the pipe in the monitored process, which sends liveness signs."""

    def __init__(self, descriptor: int | None) -> None:
        """`descriptor` is the pipe's write end, or None if there is no supervisor."""
        self._descriptor = descriptor

    @classmethod
    def inherited(cls) -> "LivenessReporter":
        """Returns a reporter for the pipe inherited from the supervisor. Child processes do not inherit the pipe."""
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
        """Sends one liveness sign. Never blocks: if the supervisor does not read, signs are dropped."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.write(self._descriptor, source)

    async def go_on(self) -> None:
        """Periodically sends liveness signs of the event loop until cancelled."""
        while True:
            self.report()
            await asyncio.sleep(REPORT_INTERVAL_S)


class LivenessListener:
    """The end of the pipe in the supervisor, which has one listener for each monitored process."""

    def __init__(self) -> None:
        self._reading, self.writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._heard: set[bytes] = set()

    def take(self, source: bytes) -> bool:
        """Whether `source` has sent a sign since the last call for this source."""
        self._read()
        found = source in self._heard
        self._heard.discard(source)
        return found

    def clear(self) -> None:
        """Discards all received signs, including unread bytes of an earlier process in the pipe."""
        self._read()
        self._heard.clear()

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self._reading, 4096):
                self._heard.update(chunk[i : i + 1] for i in range(len(chunk)))

    def close(self) -> None:
        """Closes both ends of the pipe."""
        os.close(self._reading)
        os.close(self.writing)
