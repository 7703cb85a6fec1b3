"""`spothedge+` on random fleets with the live controller on a simulated clock, compared with the replay of each fleet.

`python -m rigs.spot_clock [FLEETS [FIRST_SEED]]` runs a day of each fleet, and compares it with the replay that has the
same answers: the k-th launch in a zone and a tick is answered after the same time, and refused or not, in both. No
process is started: the controller decides as in `activities.services.step`, some time after each change and at
intervals, and its state passes through JSON. Each fleet has its own mean times until a grant, until a refusal and until
a replica is ready. On two of three fleets, zones also refuse launches although they have capacity. A ready replica that
is ended drains first, and is billed and holds its machine meanwhile, in the replays too.

The bars are those of `rigs.spot_fleets`, for each fleet, against the replay that decides at the times at which the
controller decided; a miss ends the run with exit code 1. Two seconds of delay can change one decision, and thereby all
later ones. So the replay that decides at each change without delay is a second comparison, of which the means must
stay within the bars.
"""

import random
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Self

from domain.capacity import CapacityKind
from research.spot.answers import AnswerSettings
from research.spot.replay import ReplaySettings, replay_spans
from research.spot.traces import SpotTrace
from rigs.spot_fleets import PRICE_RATIO, TARGET, FleetResult, LiveDay, SpotReplicaCourse, random_fleet
from services.spot.autoscaler import LoadAutoscaler
from services.spot.policies import PolicySettings, make_policy
from services.values import (
    DrainReplica,
    EndReplica,
    LaunchReplica,
    LossKind,
    ReplicaFacts,
    ServicePlan,
    ServiceState,
    Stage,
)
from tests.services.market import Market

_INTERVAL_S, _DELAY_S = 120.0, 2.0
"""The longest time between two decisions, which saves time if it is more than the default of `services.interval_s`, and
the mean time from a change until the controller has decided."""
_USUAL = ServicePlan(make_policy("on-demand", PolicySettings(())), LoadAutoscaler(1.0, TARGET, TARGET), version=1)


def answers_of(seed: int) -> tuple[AnswerSettings, float]:
    """Returns the answers to a fleet's launches, and the cold start in seconds."""
    rng = random.Random(f"{seed} answers")
    means_s = rng.choice((2.0, 10.0, 60.0, 180.0)), rng.choice((5.0, 20.0, 60.0))
    return AnswerSettings(*means_s, rng.choice((0.0, 0.1, 0.3)), str(seed)), rng.choice((60.0, 120.0, 240.0))


@dataclass
class LiveClock(Market):
    """A day of a service. Other than in a replay, decisions follow changes late."""

    courses: dict[int, SpotReplicaCourse] = field(default_factory=dict)
    ready_s: float = 0.0
    """For how long at least the target was ready."""
    spent: float = 0.0
    decided_s: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, trace: SpotTrace, answers: AnswerSettings, cold_s: float) -> Self:
        """Returns the day before its first decision."""
        plan = replace(_USUAL, policy=make_policy("spothedge+", PolicySettings(trace.zones)))
        return cls(trace, plan, cold_s, answers)

    def day(self) -> LiveDay:
        """Runs all ticks of the trace."""
        rng = random.Random(f"{self.answers.seed} delays")
        self.state = ServiceState(self.plan.policy.start(), self.plan.autoscaler.start())
        due_s, whole_s, seen = 0.0, self.trace.ticks * self.trace.gap_s, 0
        for tick in range(self.trace.ticks):
            self._change_capacity(tick)
            end_s = (tick + 1) * self.trace.gap_s
            while self.now_s < end_s:
                self._happen()
                if self._changes() != seen:
                    seen, due_s = self._changes(), min(due_s, self.now_s + rng.expovariate(1 / _DELAY_S))
                if self.now_s >= due_s:
                    self.decided_s.append(self.now_s)
                    wake_s = self._step().wake_at_s
                    due_s = self.now_s + _INTERVAL_S
                    due_s = due_s if wake_s is None else max(self.now_s + 0.05, min(due_s, wake_s))
                    continue
                answers_s = [at_s for at_s, _ in self.answer_at_s.values()]
                self._pass(min([end_s, due_s, *self.ready_at_s.values(), *answers_s]))
        courses = tuple(self.courses[number] for number in sorted(self.courses))
        return LiveDay(self.ready_s / whole_s, self.spent / (PRICE_RATIO * TARGET * whole_s), 0.0, courses)

    def _changes(self) -> int:
        """Returns the number of launches, answers, ends of cold starts and losses so far."""
        times = [time for one in self.courses.values() for time in (one.asked_s, one.granted_s, one.ready_s, one.cause)]
        return sum(time is not None for time in times)

    def _pass(self, until_s: float) -> None:
        span_s, self.now_s = until_s - self.now_s, until_s
        there = self.replicas.values()
        self.ready_s += span_s if sum(one.stage is Stage.READY for one in there) >= TARGET else 0.0
        prices = (1.0 if one.kind is CapacityKind.SPOT else PRICE_RATIO for one in there if one.is_granted)
        self.spent += span_s * sum(prices)

    def _happen(self) -> None:
        super()._happen()
        for number, one in self.replicas.items():
            if one.stage is Stage.READY and self.courses[number].ready_s is None:
                self._note(number, ready_s=self.now_s)

    def _launch(self, action: LaunchReplica) -> None:
        is_spot, end_s = action.kind is CapacityKind.SPOT, self.trace.ticks * self.trace.gap_s
        self.courses[self.number] = SpotReplicaCourse(is_spot, action.zone, self.now_s, None, None, end_s, None)
        super()._launch(action)

    def _grant(self, one: ReplicaFacts) -> None:
        super()._grant(one)
        self._note(one.number, granted_s=self.now_s)

    def _lose(self, one: ReplicaFacts, kind: LossKind) -> None:
        super()._lose(one, kind)
        if self.courses[one.number].cause is None:
            self._note(one.number, ended_s=self.now_s, cause=kind.value)

    def _stop(self, action: DrainReplica | EndReplica) -> None:
        if self.courses[action.number].cause is None:
            self._note(action.number, ended_s=self.now_s, cause=action.cause.value)
        if isinstance(action, EndReplica):
            super()._stop(action)
            return
        one = self.replicas[action.number]
        self.replicas[action.number] = replace(one, stage=Stage.DRAINING, since_s=self.now_s)

    def _note(self, number: int, **changes: float | str) -> None:
        self.courses[number] = replace(self.courses[number], **changes)  # type: ignore[arg-type]


@dataclass(frozen=True)
class ClockResult:
    """A live day against two replays with the same answers."""

    same: FleetResult
    """The replay decides when the controller decided."""
    free: FleetResult
    """The replay decides at each change, without delay."""

    def __str__(self) -> str:
        free = f"{self.free.points:+.2f} points, cost {100 * self.free.cost:+.1f} %"
        return f"{self.same}; from the replay without delays: {free}"


def run_fleet(seed: int) -> ClockResult:
    """Runs a fleet live, and in the replays with the same answers."""
    trace, (answers, cold_s) = random_fleet(seed), answers_of(seed)
    rules = ReplaySettings(TARGET, cold_s, PRICE_RATIO, answers, _USUAL.drain_s)
    live = LiveClock.of(trace, answers, cold_s)
    free = FleetResult.of(seed, live.day(), trace, rules)
    policy = make_policy("spothedge+", PolicySettings(trace.zones))
    own = replay_spans(trace, policy, rules, 0, trace.ticks, live.decided_s)[0]
    return ClockResult(replace(free, own=own), free)


def summary(results: Iterable[ClockResult]) -> str:
    """Returns the means over fleets, the fleets that miss each bar, and the differences without delays."""
    found = list(results)
    missed: dict[str, list[str]] = {}
    for one in found:
        for name in one.same.missed():
            missed.setdefault(name, []).append(str(one.same.seed))

    def differences(of: list[FleetResult]) -> str:
        return (
            f"availability {fmean(one.points for one in of):+.3f} points (largest"
            f" {max(abs(one.points) for one in of):.2f}), cost {100 * fmean(one.cost for one in of):+.2f} % (largest"
            f" {100 * max(abs(one.cost) for one in of):.1f} %)"
        )

    same, free = [one.same for one in found], [one.free for one in found]
    far = [str(one.seed) for one in free if {"availability", "cost"} & {*one.missed()}]
    lines = [
        f"{len(found)} fleets: {differences(same)}",
        f"launches {fmean(one.launches for one in same):.2f} of SpotHedge's, thrown away {sum(o.away for o in same)}",
        f"replay without delays: {differences(free)}; beyond a bar: {len(far)} ({', '.join(far)})",
    ]
    lines += [f"bar missed: {name}: {len(fleets)} fleets ({', '.join(fleets)})" for name, fleets in missed.items()]
    return "\n".join(lines)


def main() -> None:
    """Runs the fleets, and prints the figures of each."""
    fleets, first = [*map(int, sys.argv[1:3]), *(200, 1)[len(sys.argv[1:3]) :]]
    results = []
    for seed in range(first, first + fleets):
        results.append(run_fleet(seed))
        print(f"{results[-1]}{''.join(f'; MISSED: {name}' for name in results[-1].same.missed())}", flush=True)
    print(summary(results))
    if any(one.same.missed() for one in results):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
