"""The state of a policy between two decisions: an immutable value, which can be stored as JSON."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class PolicyState:
    """What a policy remembers. A policy leaves the fields that it does not use at their defaults."""

    available: tuple[str, ...] = ()
    """Z_A of Algorithm 1: the active zones, in the order of the enabled zones."""
    preempting: tuple[str, ...] = ()
    """Z_P of Algorithm 1: the zones that recently preempted a replica or refused a launch, in the same order."""
    retry_at_s: tuple[tuple[str, float], ...] = ()
    """Zones that refused a launch, sorted by name, with the time from which a launch is tried there again."""

    def waiting(self, now_s: float) -> frozenset[str]:
        """Returns the zones in which no launch is tried now, because they recently refused one."""
        return frozenset(zone for zone, at_s in self.retry_at_s if at_s > now_s)

    def refused(self, zones: Collection[str], now_s: float, retry_s: float) -> "PolicyState":
        """Returns the state in which these zones wait for `retry_s` seconds. Waits that have ended are dropped."""
        until = {zone: at_s for zone, at_s in self.retry_at_s if at_s > now_s}
        until.update(dict.fromkeys(zones, now_s + retry_s))
        return replace(self, retry_at_s=tuple(sorted(until.items())))

    def moved(self, by_s: float) -> "PolicyState":
        """Returns the state with all times moved by `by_s` seconds, after the clock was set."""
        waits = tuple((zone, at_s + by_s) for zone, at_s in self.retry_at_s)
        return replace(self, retry_at_s=waits)

    def to_json(self) -> dict[str, Any]:
        """Returns the state as values of JSON."""
        return {
            "available": list(self.available),
            "preempting": list(self.preempting),
            "retry_at_s": dict(self.retry_at_s),
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> "PolicyState":
        """Returns the state from the result of `to_json`."""
        waits = sorted((zone, float(at_s)) for zone, at_s in body["retry_at_s"].items())
        return cls(tuple(body["available"]), tuple(body["preempting"]), tuple(waits))
