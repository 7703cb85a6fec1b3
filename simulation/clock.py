"""The virtual clock: what happens next, and a pass over the queue when something has changed."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from heapq import heappop, heappush
from math import inf

from simulation.engine import Engine
from simulation.lives import Life
from simulation.meter import Meter
from simulation.passes import Passes
from simulation.stage import Happened, Stage
from simulation.supply.keeper import Keeper
from simulation.world import World


class Kind(IntEnum):
    """Events of one moment happen in this order; a pass over the queue comes before the last."""

    FINISH = 0
    LEAVE = 1
    START = 2
    OBJECTIVE = 3


@dataclass(frozen=True)
class Progress:
    """How far a run is."""

    now_s: float
    workloads: int
    arrived: int
    finished: int
    queued: int
    events: int
    done: float
    """From 0 to 1: workloads finished, or time passed where the run ends at a given time."""


class Clock:
    """One run of a policy over a world."""

    def __init__(
        self, world: World, engine: Engine, meter: Meter, follow: Callable[[Happened], None] | None = None
    ) -> None:
        self.world = world
        self._heap: list[tuple[float, int, int, int]] = []
        self.stage = Stage(world, engine, meter, self._later, follow)
        self._passes = Passes(self.stage)
        self.keeper = Keeper(world.sources, self.stage, meter, self._passes.shortages, world.seed)
        lives = self.stage.lives
        self._arrivals = sorted(
            (life for life in lives if life.workload.id not in world.holding),
            key=lambda life: (life.workload.arrives_s, life.number),
        )
        self._arrived = 0
        self.now_s = 0.0
        self.events = 0
        for life in lives:
            held = world.holding.get(life.workload.id)
            if held is not None:
                self.stage.begin_holding(life, held)

    def _later(self, at_s: float, kind: str, life: Life) -> None:
        # The attempt (or wait) that an event is about: it is nothing any more if another has begun.
        heappush(self._heap, (at_s, Kind[kind], life.number, life.turn))

    @property
    def progress(self) -> Progress:
        """How far the run is."""
        stage = self.stage
        arrived = self._arrived + len(self.world.holding)
        done = max(stage.finished / max(1, len(stage.lives)), self.now_s / self.world.until_s)
        return Progress(self.now_s, len(stage.lives), arrived, stage.finished, len(stage.queue), self.events, done)

    def run(self, stop: Callable[[Progress], bool] | None = None, every: int = 256) -> bool:
        """Runs until nothing can happen any more, or `until_s`. `stop` is asked every so many events.

        Whether it came to its end. What was queued past its objective then has been judged; what is queued within it
        has not.
        """
        next_stop = 0
        while True:
            if stop is not None and self.events >= next_stop:
                if stop(self.progress):
                    self.stage.meter.advance(self.now_s)
                    return False
                next_stop = self.events + every
            at_s = self._next_s()
            if at_s > self.world.until_s or at_s == inf:
                if self.world.until_s != inf:
                    self.now_s = self.world.until_s
                self.stage.meter.advance(self.now_s)
                return True
            self.now_s = at_s
            self.stage.meter.advance(at_s)
            self._happen(at_s, before=Kind.OBJECTIVE)
            self._arrive(at_s)
            if self.keeper.due_s <= at_s:
                self._passes.news |= self.keeper.happen(at_s)
                self.events += 1
            if self._passes.due_s() <= at_s:
                if self._passes.news:
                    self.keeper.look(at_s)
                self._passes.go(at_s)
                self.events += 1
            self._happen(at_s, before=None)

    def _next_s(self) -> float:
        while self._heap and self.stage.lives[self._heap[0][2]].turn != self._heap[0][3]:
            heappop(self._heap)
        at_s = self._heap[0][0] if self._heap else inf
        if self._arrived < len(self._arrivals):
            at_s = min(at_s, self._arrivals[self._arrived].workload.arrives_s)
        at_s = min(at_s, self.keeper.due_s)
        # With nothing to come, a pass finds what the one before it did.
        if at_s == inf and not self._passes.news:
            return inf
        return min(at_s, max(self._passes.due_s(), self.now_s))

    def _happen(self, at_s: float, before: Kind | None) -> None:
        while self._heap and self._heap[0][0] <= at_s and (before is None or self._heap[0][1] < before):
            _, kind, number, turn = heappop(self._heap)
            life = self.stage.lives[number]
            if life.turn != turn:
                continue
            self.events += 1
            if kind == Kind.FINISH:
                self.stage.finish(at_s, life)
            elif kind == Kind.LEAVE:
                self.stage.leave(at_s, life)
            elif kind == Kind.START:
                self.stage.start(at_s, life)
            else:
                self.stage.run_out(at_s, life)
            if kind in (Kind.FINISH, Kind.LEAVE):
                self._passes.news = True
                self.keeper.hope(at_s)

    def _arrive(self, at_s: float) -> None:
        while self._arrived < len(self._arrivals):
            life = self._arrivals[self._arrived]
            if life.workload.arrives_s > at_s:
                return
            self._arrived += 1
            self.events += 1
            self.stage.arrive(at_s, life)
            self.keeper.hope(at_s)
            self._passes.news = True
