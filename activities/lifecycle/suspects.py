"""What disagrees, and since when: a disagreement that lasts is true, one that passes was a listing that lagged."""

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass


@dataclass
class _Suspicion:
    """Something that disagrees, since when, and whether its mail was delivered again."""

    what: Hashable
    since_s: float
    """On the monotonic clock."""
    told_again: bool = False


class Suspects:
    """What disagrees at present. One that changes, or is not named in a round, is not suspected any more."""

    def __init__(self, patience_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience_s = patience_s
        self._clock = clock
        self._found: dict[str, _Suspicion] = {}

    def due(self, disagree: dict[str, Hashable]) -> list[str]:
        """Records the present disagreements by name; returns those that have been unchanged for `patience_s`."""
        now_s = self._clock()
        kept = {}
        for name, what in disagree.items():
            before = self._found.get(name)
            kept[name] = before if before is not None and before.what == what else _Suspicion(what, now_s)
        self._found = kept
        return sorted(name for name, s in kept.items() if now_s - s.since_s >= self._patience_s)

    def told_again(self, name: str) -> bool:
        """Whether this was called for it before; gives it the same time again if not."""
        suspicion = self._found[name]
        before, suspicion.told_again = suspicion.told_again, True
        if not before:
            suspicion.since_s = self._clock()
        return before

    def clear(self, name: str) -> None:
        """It was dealt with."""
        self._found.pop(name, None)
