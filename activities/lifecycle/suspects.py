"""Debounces disagreements: one that lasts is real, and one that passes was caused by a lagging listing."""

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass


@dataclass
class _Suspicion:
    """A disagreement, the time since when it is unchanged, and whether mail was redelivered because of it."""

    what: Hashable
    since_s: float
    """On the monotonic clock."""
    told_again: bool = False


class Suspects:
    """The current disagreements. A changed disagreement starts its time again; one that a round misses is removed."""

    def __init__(self, patience_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience_s = patience_s
        self._clock = clock
        self._found: dict[str, _Suspicion] = {}

    def due(self, disagree: dict[str, Hashable]) -> list[str]:
        """Replaces the disagreements by the current ones, by name; returns those unchanged for `patience_s` seconds."""
        now_s = self._clock()
        kept = {}
        for name, what in disagree.items():
            before = self._found.get(name)
            kept[name] = before if before is not None and before.what == what else _Suspicion(what, now_s)
        self._found = kept
        return sorted(name for name, s in kept.items() if now_s - s.since_s >= self._patience_s)

    def was_told_again(self, name: str) -> bool:
        """Returns whether mail was redelivered because of a disagreement."""
        return self._found[name].told_again

    def told_again(self, name: str) -> None:
        """Records that mail was redelivered because of a disagreement, and restarts its time."""
        self._found[name].told_again, self._found[name].since_s = True, self._clock()

    def clear(self, name: str) -> None:
        """Removes a disagreement that was handled."""
        self._found.pop(name, None)
