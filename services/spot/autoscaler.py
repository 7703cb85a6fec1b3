"""The autoscaler: N_tar from the rate of requests (SkyServe, section 4)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

_NO_RATE = 1e-9
"""Requests for each second that only a rounding error leaves."""


@dataclass(frozen=True)
class ScalingState:
    """The state of an autoscaler between two decisions."""

    target: int
    """N_tar, the number of replicas that should be ready."""
    requests: tuple[tuple[float, int], ...] = ()
    """The numbers of requests in the window, with the time at which each was counted, oldest first."""
    above_since_s: float | None = None
    """The time since which N_can has been above the target; None: N_can is not above the target."""
    below_since_s: float | None = None
    """The time since which N_can has been below the target; None: N_can is not below the target."""
    ongoing: tuple[tuple[float, int], ...] = ()
    """The numbers of requests in progress, or waiting, at the decisions in the window, with their times."""

    loads: tuple[tuple[float, float], ...] = ()
    """The sums of the loads that replicas reported, at the decisions in the window, with their times."""

    def moved(self, by_s: float) -> "ScalingState":
        """Returns the state with all times moved by `by_s` seconds, after the clock was set."""
        return replace(
            self,
            requests=tuple((at_s + by_s, count) for at_s, count in self.requests),
            ongoing=tuple((at_s + by_s, count) for at_s, count in self.ongoing),
            loads=tuple((at_s + by_s, load) for at_s, load in self.loads),
            above_since_s=None if self.above_since_s is None else self.above_since_s + by_s,
            below_since_s=None if self.below_since_s is None else self.below_since_s + by_s,
        )


@dataclass(frozen=True)
class LoadAutoscaler:
    """The load-based autoscaler of section 4.

    R_t is the number of requests of the last `window_s` seconds, for each second; requests before the start count as
    none. N_can = ceil(R_t / Q_tar), or what the requests in progress or the reported load need if that is more, between
    the limits. It is at least one while a request is in progress. The target becomes N_can once N_can has been above
    the target in every decision of the last `upscale_delay_s` seconds, or below it for `downscale_delay_s` seconds.
    If both limits are equal, the target is fixed. All methods are pure.
    """

    requests_per_s: float
    """Q_tar, the load of one replica in requests for each second; above 0. If it depends on the replica's machines:
    that of the fastest."""
    least: int = 1
    most: int = 100
    window_s: float = 60.0
    upscale_delay_s: float = 600.0
    downscale_delay_s: float = 600.0
    ongoing: float | None = None
    """The requests in progress that one replica should have, as a mean over the window; None: they only keep the target
    above zero."""
    load: float | None = None
    """The load, as replicas report it, that one of them should have, as a mean over the window; None: it is ignored."""

    def __post_init__(self) -> None:
        if not self.requests_per_s > 0:
            raise ValueError(f"requests_per_s: {self.requests_per_s}: must be above 0")
        if not 0 <= self.least <= self.most:
            raise ValueError(f"least: {self.least}: must be from 0 to most ({self.most})")
        if not self.window_s > 0:
            raise ValueError(f"window_s: {self.window_s}: must be above 0")

    def start(self) -> ScalingState:
        """Returns the state before the first decision. The first target is the least one."""
        return ScalingState(self.least)

    def decide(
        self,
        state: ScalingState,
        now_s: float,
        requests: int,
        waiting: int = 0,
        ongoing: int = 0,
        rates: Sequence[float] = (),
        *,
        load: float = 0.0,
    ) -> ScalingState:
        """Returns the next state, which contains the target.

        From zero the target rises at once, because a request waits or is refused until the first replica is ready.

        Args:
            state: the state before.
            now_s: the time.
            requests: the number that arrived since the decision before.
            waiting: the number that wait now because no replica is ready.
            ongoing: the number that are in progress now.
            rates: Q_tar of the replicas that exist, as far as it depends on their machines; first those that are kept
                longest.
            load: the sum of the loads that replicas report now.
        """
        state = self.limited(state)
        from_s = now_s - self.window_s
        kept = [one for one in state.requests if one[0] > from_s]
        counted = (*kept, (now_s, requests)) if requests else tuple(kept)
        busy = *(one for one in state.ongoing if one[0] > from_s), (now_s, waiting + ongoing)
        loads = *(one for one in state.loads if one[0] > from_s), (now_s, load)
        candidate = max(self.candidate(sum(count for _, count in counted), rates), self._needed(busy, loads))
        above_s = _since(candidate > state.target, state.above_since_s, now_s)
        below_s = _since(candidate < state.target, state.below_since_s, now_s)
        kept_busy = busy if self.ongoing is not None else ()
        kept_loads = loads if self.load is not None else ()
        state = replace(
            state, requests=counted, ongoing=kept_busy, loads=kept_loads, above_since_s=above_s, below_since_s=below_s
        )
        up = above_s is not None and (state.target == 0 or now_s - above_s >= self.upscale_delay_s)
        down = below_s is not None and now_s - below_s >= self.downscale_delay_s
        if up or down:
            return replace(state, target=candidate, above_since_s=None, below_since_s=None)
        return state

    def _needed(self, busy: Sequence[tuple[float, int]], loads: Sequence[tuple[float, float]]) -> int:
        """Returns how many replicas the requests in progress and the loads need; the last values are those of now."""
        wanted = 1 if busy[-1][1] else 0
        if self.ongoing is not None:
            wanted = max(wanted, ceil(sum(count for _, count in busy) / len(busy) / self.ongoing))
        if self.load is not None:
            wanted = max(wanted, ceil(sum(load for _, load in loads) / len(loads) / self.load))
        return min(self.most, wanted)

    def limited(self, state: ScalingState) -> ScalingState:
        """Returns the state with its target within the limits, which may have changed since the decision before."""
        return replace(state, target=min(self.most, max(self.least, state.target)))

    def candidate(self, requests: int, rates: Sequence[float] = ()) -> int:
        """Returns N_can, the number of replicas that suffices for `requests` within the window.

        `rates` are the requests a second of the present replicas, which are used in this order before further ones.
        """
        rest, enough = requests / self.window_s, 0
        for rate in rates:
            if rest <= _NO_RATE:
                break
            rest, enough = rest - rate, enough + 1
        further = ceil(rest / self.requests_per_s) if rest > _NO_RATE else 0
        return min(self.most, max(self.least, enough + further))


def _since(holds: bool, before_s: float | None, now_s: float) -> float | None:
    if not holds:
        return None
    return now_s if before_s is None else before_s
