"""Finds parts that run and do nothing: stopped by a signal, or stuck. A death is seen without it.

A part has probes. One that fails for `restart_after_s` without a break has its part restarted. Time does not count

- before the first success after the part's start, within the probe's `start_s`;
- while a part that the probe needs fails itself: a dispatcher cannot deliver to a Temporal that is stuck;
- while this process was itself stopped or starved (a suspended laptop, an overloaded machine): then all start anew.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from infra.config import LivenessSettings

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Probe:
    """Something that a part must be able to do."""

    what: str
    """As the log and the event name it: "answers a query"."""
    ask: Callable[[], Awaitable[bool]]
    needs: frozenset[str] = frozenset()
    """Names of other parts without which it cannot."""
    start_s: float = 120.0
    """How long after the start of its part the first success may take."""


class Part(Protocol):
    """What is watched."""

    name: str
    restarts: int
    started_s: float
    """When its present process was started (monotonic)."""

    @property
    def probes(self) -> Sequence[Probe]:
        """What it must be able to do."""

    def is_running(self) -> bool:
        """Whether its process is there."""


Key = tuple[str, int, str]
"""A part, its start, a probe."""


class Liveness:
    """Asks all probes at intervals, and has parts restarted."""

    def __init__(self, settings: LivenessSettings, restart: Callable[[Part, str], None]) -> None:
        """`restart` is told the part and what it does not do any more."""
        self._settings = settings
        self._restart = restart
        self._alive: set[Key] = set()
        """Probes that have succeeded since their part's start."""
        self._failing: dict[Key, float] = {}
        """Since when (monotonic)."""

    async def run(self, parts: Callable[[], Sequence[Part]]) -> None:
        """Goes on until cancelled."""
        settings = self._settings
        while True:
            slept_s = time.monotonic()
            await asyncio.sleep(settings.interval_s)
            asked_s = time.monotonic()
            watched = [(part, probe) for part in parts() if part.is_running() for probe in part.probes]
            answers = await asyncio.gather(*(self._ask(probe) for _, probe in watched))
            now_s = time.monotonic()
            # Pauses and time-outs are ours: whatever took much longer was not for the parts to decide.
            slack_s = settings.interval_s + 1.0
            if asked_s - slept_s > settings.interval_s + slack_s or now_s - asked_s > settings.timeout_s + slack_s:
                _log.warning("the supervisor was held up for %.0f s; it watches anew", now_s - slept_s)
                self._failing.clear()
                continue
            self._judge([(part, probe, answer) for (part, probe), answer in zip(watched, answers, strict=True)], now_s)

    async def _ask(self, probe: Probe) -> bool:
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                return await probe.ask()
        except Exception:  # a probe that fails, however it does, says one thing
            return False

    def _judge(self, found: Sequence[tuple[Part, Probe, bool]], now_s: float) -> None:
        troubled = {part.name for part, _, answer in found if not answer}
        stuck: dict[str, tuple[Part, str]] = {}
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
                stuck.setdefault(part.name, (part, f"{probe.what}: not for {now_s - since_s:.0f} s"))
        for name, (part, why) in stuck.items():
            self._failing = {key: since for key, since in self._failing.items() if key[0] != name}
            self._alive = {key for key in self._alive if key[0] != name}
            self._restart(part, why)
