"""Faults of a cluster manager, its nodes and machines, and of mizzen's processes, in a random order."""

import contextlib
import heapq
import random
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path

import httpx

from tests.chaos.faults import BLACKOUT_S, Faults, now_s
from tests.chaos.observed import Observed
from tests.chaos.schedule import Fault
from tests.stack.harness import Up

_PARTS = ("worker", "api", "gateway", "temporal", "postgres", "backend")
_PATIENCE_S = 240.0
AWAY = (AssertionError, ProcessLookupError, httpx.HTTPError, subprocess.TimeoutExpired)
"""Errors of a cluster manager that is away, or of a process that has ended meanwhile."""


class ClusterFaults(ABC):
    """Injects the faults, and ends each after some seconds. Faults overlap.

    A subclass has a method `_KIND` for each kind. It begins a fault and returns whether there was something to hit.
    """

    kinds: tuple[str, ...]
    """The kinds of faults; one is `mizzen`."""
    harmless: tuple[str, ...]
    """The faults that end no machine."""

    def __init__(self, up: Up, scratch: Path, seen: Observed, seed: int) -> None:
        self._seen = seen
        self._chance = random.Random(seed)
        self._own = Faults(up, scratch, seen, lambda: None)
        self._ends: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._stop = threading.Event()
        self._tidier = threading.Thread(target=self._tidy_often, daemon=True)
        self.done: Counter[str] = Counter()

    def run(self, each: int, every_s: float) -> None:
        """Injects `each` faults of each kind, with a mean of `every_s` between two, and waits for the end of all.

        If there is nothing to hit for a fault, one of the next ones comes first.
        """
        self._tidier.start()
        left = [kind for kind in self.kinds for _ in range(each)]
        self._chance.shuffle(left)
        while left:
            self._pause(self._chance.expovariate(1 / every_s))
            give_up_s = time.monotonic() + _PATIENCE_S
            ahead = len(self.kinds)
            while (kind := next(filter(self._begin, dict.fromkeys(left[:ahead])), None)) is None:
                assert time.monotonic() < give_up_s, f"{left[:ahead]}: for {_PATIENCE_S:.0f} s there was nothing to hit"
                self._pause(0.5)
            left.remove(kind)
            self.done[kind] += 1
        while self._ends:
            self._pause(0.5)

    def close(self) -> None:
        """Ends the thread that tidies."""
        self._stop.set()
        if self._tidier.is_alive():
            self._tidier.join()

    def _pause(self, for_s: float) -> None:
        """Waits, and ends the faults that are due."""
        until_s = time.monotonic() + for_s
        while True:
            while self._ends and self._ends[0][0] <= time.monotonic():
                end = heapq.heappop(self._ends)[2]
                try:
                    end()
                except AWAY:
                    self._later(1.0, end)
            if time.monotonic() >= until_s:
                return
            time.sleep(0.1)

    def _later(self, for_s: float, end: Callable[[], None]) -> None:
        heapq.heappush(self._ends, (time.monotonic() + for_s, next(self._numbers), end))

    def _begin(self, kind: str) -> bool:
        """Begins a fault; False: there is nothing to hit now, or the cluster manager is away."""
        with contextlib.suppress(*AWAY):
            at_s = now_s()
            hit = getattr(self, f"_{kind}")()
            if hit and kind not in self.harmless:  # Machines may count as lost before an end is recorded.
                self._seen.blackouts.append((at_s, now_s() + BLACKOUT_S))
            return bool(hit)
        return False

    def _mizzen(self) -> bool:
        """One of mizzen's own processes dies."""
        part, before = self._chance.choice(_PARTS), len(self._own.done)
        self._own.begin(Fault(0.0, f"kill-{part}", self._chance.random()))
        return len(self._own.done) > before

    @abstractmethod
    def _tidy(self) -> None:
        """Does what the cluster, or its administrator, does after faults. It is called each second."""

    def _tidy_often(self) -> None:
        while not self._stop.wait(1.0):
            with contextlib.suppress(*AWAY):
                self._tidy()
