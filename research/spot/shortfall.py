"""Measures how much of a shortfall follows the loss of all spot replicas at the same time."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from domain.capacity import CapacityKind
from research.spot.replay import ReplaySettings, ReplicaSpan
from research.spot.traces import SpotTrace


@dataclass(frozen=True)
class Shortfall:
    """The seconds of a window in which fewer than N_tar replicas were ready."""

    total_s: float = 0.0
    """All of them: the length of the window times 1 - availability."""
    first_s: float = 0.0
    """Those within the first cold start of the window."""
    used_fell_s: float = 0.0
    """Those after the first cold start, and within a cold start after all used zones fell together."""
    all_fell_s: float = 0.0
    """The part of `used_fell_s` within a cold start after all zones fell together."""

    def to_json(self) -> dict[str, float]:
        """Returns the fields as values of JSON."""
        return asdict(self)

    @classmethod
    def sum_of(cls, parts: Iterable["Shortfall"]) -> "Shortfall":
        """Returns the sum over windows."""
        columns = zip(*(asdict(one).values() for one in parts), strict=True)
        return cls(*map(sum, columns))


def measure_shortfall(
    trace: SpotTrace, spans: Sequence[ReplicaSpan], settings: ReplaySettings, first_tick: int, ticks: int
) -> Shortfall:
    """Returns the shortfall of the window [first_tick, first_tick + ticks) with these replicas.

    All used zones fell together at time t if there was at least one spot replica directly before t, ready or not, and
    all of them were preempted at t. The used zones then have no capacity in the tick that starts at t. If all replicas
    are in one zone, each loss of that zone counts, so the value depends on the placement of the policy.

    All zones fell together at time t if all used zones did, and no zone of the trace has capacity in the tick that
    starts at t. No placement of spot replicas could then have kept one.

    "Within a cold start after t" is the time from t until t + d, without t + d. The times after several such t are
    counted once. A replacement that is launched at t is ready at t + d, so a policy without a ready spare has a
    shortfall during all of this time.
    """
    cold_s, length_s = settings.cold_start_s, ticks * trace.gap_s
    falls_s = _falls(spans)
    # Preemptions happen at the start of a tick only. Rounding finds the tick if the length of ticks is not exact.
    ticks_at = {at_s: first_tick + round(at_s / trace.gap_s) for at_s in falls_s}
    all_falls_s = [at_s for at_s in falls_s if not any(counts[ticks_at[at_s]] for counts in trace.capacity)]
    short = _short(spans, settings.target, length_s)
    return Shortfall(
        sum((end_s - start_s for start_s, end_s in short), 0.0),
        _overlap_s(short, [(0.0, cold_s)]),
        _overlap_s(short, _after(falls_s, cold_s)),
        _overlap_s(short, _after(all_falls_s, cold_s)),
    )


def _falls(spans: Sequence[ReplicaSpan]) -> list[float]:
    """Returns the times at which all spot replicas were preempted, sorted."""
    spot = [one for one in spans if one.kind is CapacityKind.SPOT]
    found: list[float] = []
    for at_s in sorted({one.ended_s for one in spot if one.preempted}):
        before = [one for one in spot if one.launched_s < at_s <= one.ended_s]
        if all(one.preempted and one.ended_s == at_s for one in before):
            found.append(at_s)
    return found


def _short(spans: Sequence[ReplicaSpan], target: int, length_s: float) -> list[tuple[float, float]]:
    """Returns the intervals with fewer than `target` ready replicas, sorted."""
    changes: dict[float, int] = defaultdict(int)
    for one in spans:
        if one.ready_s is not None:
            changes[one.ready_s] += 1
            changes[one.ended_s] -= 1
    found: list[tuple[float, float]] = []
    ready, since_s = 0, 0.0
    for at_s in [*sorted(changes), length_s]:
        if ready < target and at_s > since_s:
            found.append((since_s, at_s))
        ready += changes.get(at_s, 0)
        since_s = at_s
    return found


def _after(times_s: Iterable[float], cold_s: float) -> list[tuple[float, float]]:
    """Returns the union of [t, t + d) over sorted times, without the first cold start, as sorted intervals."""
    found: list[tuple[float, float]] = []
    end_s = cold_s
    for at_s in times_s:
        if at_s + cold_s > end_s:
            found.append((max(at_s, end_s), at_s + cold_s))
            end_s = at_s + cold_s
    return found


def _overlap_s(these: Iterable[tuple[float, float]], others: Sequence[tuple[float, float]]) -> float:
    """Returns the time in both lists. The intervals of a list do not overlap each other."""
    return sum((max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in these for b in others), 0.0)
