"""The replays of `mizzen spot replay`: one case is a policy with its settings, on all windows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from infra.errors import ConfigurationError, MizzenError
from research.spot.latency import WindowLatency, measure_latency
from research.spot.optimum import Optimum, OptimumError, solve_optimum
from research.spot.replay import ReplaySettings, ReplicaSpan, WindowResult
from research.spot.request_source import RequestLoad
from research.spot.requests import Requests
from research.spot.shortfall import Shortfall, measure_shortfall
from research.spot.traces import SpotTrace
from research.spot.windows import Mean, Windows, means, replay_one
from server.progress import Shown
from services.spot.spothedge_plus import OUTAGE_PRICE_S

LATENCY_FIELDS = ("requests", "p50_s", "p90_s", "p99_s", "failed_share", "interrupted")
"""The measurements of `WindowLatency` for which means are computed."""
READINGS = {"by zone": True, "aggregate": False}
"""The two readings of equation 4: whether readiness is counted for each zone."""


@dataclass(frozen=True)
class PolicyCase:
    """A policy and its settings."""

    policy: str
    settings: ReplaySettings
    extra: int
    """`--overprovision`"""
    outage_price_s: float = OUTAGE_PRICE_S
    """`--outage-price-s`"""


@dataclass(frozen=True)
class CaseResult:
    """The measurements of a case in each window."""

    windows: tuple[WindowResult, ...]
    shortfalls: tuple[Shortfall, ...]
    latency: tuple[WindowLatency, ...] = ()
    """Empty without requests."""

    def means(self) -> dict[str, Mean]:
        """Returns the means of `research.spot.windows.MEASURED`."""
        return means(self.windows)

    def shortfall(self) -> Shortfall:
        """Returns the sum of the shortfalls of all windows."""
        return Shortfall.sum_of(self.shortfalls)

    def latency_means(self) -> dict[str, Mean]:
        """Returns the means of `LATENCY_FIELDS` over the windows that have requests; empty if none has."""
        found: dict[str, Mean] = {}
        for name in LATENCY_FIELDS:
            values = [getattr(one, name) for one in self.latency if one.requests]
            if values:
                found[name] = Mean.of([float(one) for one in values])
        return found


@dataclass(frozen=True)
class ReplayBench:
    """The inputs of all cases. Results are cached, because sweeps contain the settings of the main table."""

    trace: SpotTrace
    windows: Windows
    workload: RequestLoad | None
    interrupted: Callable[[], bool]
    cache: dict[PolicyCase, CaseResult]

    def run(self, case: PolicyCase, progress: Callable[[int], None]) -> CaseResult | None:
        """Replays a case in all windows; returns None if the user interrupts it.

        `progress` receives the number of windows that are complete.
        """
        if case in self.cache:
            return self.cache[case]
        results: list[WindowResult] = []
        shortfalls: list[Shortfall] = []
        latency: list[WindowLatency] = []
        for number in range(self.windows.count):
            result, spans = self.replayed(case, number)
            results.append(result)
            first_tick, ticks = result.first_tick, self.windows.ticks
            shortfalls.append(measure_shortfall(self.trace, spans, case.settings, first_tick, ticks))
            if self.workload is not None:
                latency.append(self.served(number, spans)[0])
            progress(number + 1)
            if self.interrupted() and number + 1 < self.windows.count:
                return None
        self.cache[case] = CaseResult(tuple(results), tuple(shortfalls), tuple(latency))
        return self.cache[case]

    def replayed(self, case: PolicyCase, number: int) -> tuple[WindowResult, tuple[ReplicaSpan, ...]]:
        """Replays a window by its number; returns its measurements and its replicas."""
        return replay_one(self.trace, case.policy, case.extra, case.settings, self.windows, number, case.outage_price_s)

    def served(self, number: int, spans: Sequence[ReplicaSpan]) -> tuple[WindowLatency, tuple[float, ...]]:
        """Returns the latency of the requests of a window, and the times at which failed requests had arrived."""
        if self.workload is None:
            raise ValueError("workload: None: must be given, because latency is that of its requests")
        return measure_latency(self.requests(number), spans, self.length_s, self.workload.serving)

    def requests(self, number: int) -> Requests:
        """Returns the requests of a window. They are the same for all cases."""
        if self.workload is None:
            raise ValueError("workload: None: must be given, because it has the requests")
        start_s = self.windows.offset(self.trace, number) * self.trace.gap_s
        return self.workload.source.draw(start_s, self.length_s, f"{self.windows.seed} requests {number}")

    @property
    def length_s(self) -> float:
        """The length of a window in seconds."""
        return self.windows.ticks * self.trace.gap_s


@dataclass(frozen=True)
class OptimumResult:
    """The optimum of each window, by the reading of equation 4 (`READINGS`)."""

    availability: float
    """Avail_Tar, the availability that the optimum has to reach."""
    by_reading: dict[str, tuple[Optimum, ...]]

    def mean(self, reading: str, field: str) -> Mean:
        """Returns the mean of `cost`, `bound` or `availability` over the windows."""
        return Mean.of([float(getattr(one, field)) for one in self.by_reading[reading]])

    def ratio(self, reading: str, result: CaseResult) -> float | None:
        """Returns the mean cost of a policy over that of the optimum; None if the optimum costs nothing."""
        cost = self.mean(reading, "cost").mean
        return result.means()["cost"].mean / cost if cost else None

    def to_json(self) -> dict[str, Any]:
        """Returns the optimum of each window as values of JSON."""
        fields = ("cost", "bound", "availability", "gap")
        return {
            "availability": self.availability,
            "readings": [
                {
                    "reading": reading,
                    "means": {name: vars(self.mean(reading, name)) for name in fields},
                    "windows": [{name: getattr(one, name) for name in fields} for one in found],
                }
                for reading, found in self.by_reading.items()
            ],
        }


def check_reachable(availability: float, bench: ReplayBench, settings: ReplaySettings) -> None:
    """Checks that a plan can have the availability, from 0 to 1.

    Raises:
        ConfigurationError: it cannot, because nothing is ready during the first cold start.
    """
    most = max(0.0, 1 - settings.cold_start_s / bench.length_s)
    if availability > most:
        raise ConfigurationError(
            f"--optimum-availability: {100 * availability:g}: nothing is ready during a window's first cold start: "
            f"give at most {int(1e4 * most) / 100:g}"
        )


def solve(bench: ReplayBench, settings: ReplaySettings, availability: float, show: Shown) -> OptimumResult | None:
    """Solves the optimum of all windows in both readings; returns None if the user interrupts it.

    Raises:
        MizzenError: the solver found no plan of a window within its time limit.
    """
    found: dict[str, tuple[Optimum, ...]] = {}
    offsets = bench.windows.offsets(bench.trace)
    count = len(offsets) * len(READINGS)
    for reading, by_zone in READINGS.items():
        plans: list[Optimum] = []
        for offset in offsets:
            try:
                plans.append(
                    solve_optimum(bench.trace, settings, offset, bench.windows.ticks, availability, by_zone=by_zone)
                )
            except OptimumError as error:
                raise MizzenError(f"--optimum: the window that starts at tick {offset}: {error}") from None
            done = len(found) * len(offsets) + len(plans)
            show(done / count, f"{done:,} of {count:,} plans solved")
            if bench.interrupted():
                return None
        found[reading] = tuple(plans)
    return OptimumResult(availability, found)


@dataclass(frozen=True)
class Sweep:
    """A setting and the values that it takes in turn."""

    field: str
    values: tuple[float, ...]

    def cases(self, base: PolicyCase) -> list[tuple[float | None, PolicyCase]]:
        """Returns each value, and the case of `base` with that value.

        If the policy of `base` does not use the setting, the only case is `base`, without a value.
        """
        if base.policy not in USED_BY.get(self.field, (base.policy,)):
            return [(None, base)]
        return [(value, SWEPT[self.field](base, value)) for value in self.values]


SWEPT: dict[str, Callable[[PolicyCase, float], PolicyCase]] = {
    "overprovision": lambda base, value: replace(base, extra=int(value)),
    "outage-price-s": lambda base, value: replace(base, outage_price_s=value),
    "cold-start-s": lambda base, value: replace(base, settings=replace(base.settings, cold_start_s=value)),
    "refused-after-s": lambda base, value: replace(
        base, settings=replace(base.settings, answers=replace(base.settings.answers, refused_s=value))
    ),
    "od-price-ratio": lambda base, value: replace(base, settings=replace(base.settings, od_price_ratio=value)),
}
"""The fields of `--sweep`, and how a case takes a value."""
USED_BY: Mapping[str, tuple[str, ...]] = {
    "overprovision": ("spothedge", "spothedge-alg1"),
    "outage-price-s": ("spothedge+",),
}
"""The settings of policies, and the policies that use them. The optimum does not depend on these settings."""
