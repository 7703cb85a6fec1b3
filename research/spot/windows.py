"""Windows at random offsets of a trace, and the means of their measurements."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

from research.spot.policies import make_policy
from research.spot.replay import ReplaySettings, ReplicaSpan, WindowResult, replay_spans
from research.spot.traces import SpotTrace
from services.spot.policies import PolicySettings
from services.spot.spothedge_plus import OUTAGE_PRICE_S
from services.spot.values import Zone

MEASURED = ("availability", "cost", "launches", "preemptions", "refusals", "on_demand_share")
"""The fields of `WindowResult` for which means are computed."""


@dataclass(frozen=True)
class Windows:
    """Which windows of a trace to replay."""

    ticks: int
    """The length of each window; from 1 to the length of the trace."""
    count: int = 100
    seed: int = 0

    def offsets(self, trace: SpotTrace) -> list[int]:
        """Returns the first tick of each window, uniform over all windows that fit. Windows may overlap."""
        return [self.offset(trace, number) for number in range(self.count)]

    def offset(self, trace: SpotTrace, number: int) -> int:
        """Returns the first tick of window `number`."""
        return random.Random(f"{self.seed} window {number}").randint(0, trace.ticks - self.ticks)

    def zones(self, trace: SpotTrace, number: int) -> tuple[Zone, ...]:
        """Returns the zones of the trace in the random order of window `number`."""
        zones = list(trace.zones)
        random.Random(f"{self.seed} zones {number}").shuffle(zones)
        return tuple(zones)


@dataclass(frozen=True)
class Mean:
    """The mean over windows, and its standard error (0 for a single window)."""

    mean: float
    standard_error: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Mean":
        """Returns the mean of at least one value. The standard error treats windows as independent."""
        return cls(fmean(values), stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0)


def replay_windows(
    trace: SpotTrace, name: str, extra: int, settings: ReplaySettings, windows: Windows
) -> Iterator[WindowResult]:
    """Replays each window with the policy `name`, and yields its measurements; see `replay_one`."""
    for number in range(windows.count):
        yield replay_one(trace, name, extra, settings, windows, number)[0]


def replay_one(
    trace: SpotTrace,
    name: str,
    extra: int,
    settings: ReplaySettings,
    windows: Windows,
    number: int,
    outage_price_s: float = OUTAGE_PRICE_S,
) -> tuple[WindowResult, tuple[ReplicaSpan, ...]]:
    """Replays window `number` with the policy `name`; returns its measurements and its replicas.

    The zones of a window are in a random order, which depends on the seed and the number of the window but not on the
    policy. The traces have no prices, so the order decides which zones a policy prefers; the order of their names would
    make Even Spread depend on the alphabet. A refused launch is tried again from the next tick.

    Raises:
        KeyError: no policy has this name.
        ValueError: a window is longer than the trace.
    """
    price = settings.od_price_ratio
    made = PolicySettings(
        windows.zones(trace, number),
        extra,
        retry_s=trace.gap_s,
        on_demand_usd_per_h=price,
        outage_price_s=outage_price_s,
    )
    drawn = replace(settings, answers=replace(settings.answers, seed=f"{windows.seed} answers {number}"))
    return replay_spans(trace, make_policy(name, made), drawn, windows.offset(trace, number), windows.ticks)


def means(results: Sequence[WindowResult]) -> dict[str, Mean]:
    """Returns the mean and the standard error of each field in `MEASURED`, over at least one window."""
    return {name: Mean.of([float(getattr(one, name)) for one in results]) for name in MEASURED}
