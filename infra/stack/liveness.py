"""Detects parts of the stack that run but do not respond, because they are stuck or stopped by a signal.

(The supervisor detects ended processes itself.) Each part has probes. A part is restarted if one of its probes fails
continuously for `restart_after_s`. A failure does not count

- before the first success after the part's start, for at most the probe's `start_s`;
- while a probe of another part that the probe depends on fails: a dispatcher cannot deliver to a stuck Temporal;
- if this process was itself stopped or got no CPU (a suspended laptop, an overloaded machine); all times restart then.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from infra.config.services import LivenessSettings

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Probe:
    """A check of one function of a part."""

    what: str
    """Name of the probe in logs and events, such as "health check"."""
    ask: Callable[[], Awaitable[bool]]
    needs: frozenset[str] = frozenset()
    """Names of other parts that the probe depends on."""
    start_s: float = 120.0
    """Maximum time from the start of the part to the first success."""


class StackPart(Protocol):
    """A monitored part of the stack."""

    name: str
    restarts: int
    started_s: float
    """Start time of the part's current process (monotonic)."""

    @property
    def probes(self) -> Sequence[Probe]:
        """The liveness probes of this part; if one fails for too long, the part is restarted."""

    def is_running(self) -> bool:
        """Whether the part's process is running."""


Key = tuple[str, int, str]
"""Name of a part, its number of restarts, and the name of a probe."""


class Liveness:
    """Runs all probes periodically, and restarts parts whose probes fail."""

    def __init__(self, settings: LivenessSettings, restart: Callable[[StackPart, str], None]) -> None:
        """`restart` is called with a part and the reason of the restart."""
        self._settings = settings
        self._restart = restart
        self._alive: set[Key] = set()
        """Probes that have succeeded since their part's start."""
        self._failing: dict[Key, float] = {}
        """Time of the first failure of each failing probe (monotonic)."""

    async def run(self, parts: Callable[[], Sequence[StackPart]]) -> None:
        """Runs the probes until cancelled."""
        settings = self._settings
        while True:
            slept_s = time.monotonic()
            await asyncio.sleep(settings.interval_s)
            asked_s = time.monotonic()
            watched = [(part, probe) for part in parts() if part.is_running() for probe in part.probes]
            answers = await asyncio.gather(*(self._ask(probe) for _, probe in watched))
            now_s = time.monotonic()
            # The pause and the probes' timeouts bound the time of a round. If it took much longer, this process was
            # stopped or got no CPU, which says nothing about the parts.
            slack_s = settings.interval_s + 1.0
            if asked_s - slept_s > settings.interval_s + slack_s or now_s - asked_s > settings.timeout_s + slack_s:
                _log.warning("the supervisor was delayed for %.0f s; restarting all liveness timers", now_s - slept_s)
                self._failing.clear()
                continue
            self._judge([(part, probe, answer) for (part, probe), answer in zip(watched, answers, strict=True)], now_s)

    def has_answered(self, part: StackPart) -> bool:
        """Whether a probe of a part has succeeded since the start of the part's current process."""
        return any(key[:2] == (part.name, part.restarts) for key in self._alive)

    async def _ask(self, probe: Probe) -> bool:
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                return await probe.ask()
        except Exception:  # Every exception counts as a failure of the probe.
            return False

    def _judge(self, found: Sequence[tuple[StackPart, Probe, bool]], now_s: float) -> None:
        troubled = {part.name for part, _, answer in found if not answer}
        stuck: dict[str, tuple[StackPart, str]] = {}
        for part, probe, answer in found:
            key = (part.name, part.restarts, probe.what)
            if answer:
                self._alive.add(key)
                self._failing.pop(key, None)
                continue
            if probe.needs & troubled or (key not in self._alive and now_s - part.started_s < probe.start_s):
                self._failing.pop(key, None)
                continue
            since_s = self._failing.setdefault(key, now_s)
            if now_s - since_s >= self._settings.restart_after_s:
                stuck.setdefault(part.name, (part, f"{probe.what} has failed for {now_s - since_s:.0f} s"))
        for name, (part, why) in stuck.items():
            self._failing = {key: since for key, since in self._failing.items() if key[0] != name}
            self._alive = {key for key in self._alive if key[0] != name}
            self._restart(part, why)
