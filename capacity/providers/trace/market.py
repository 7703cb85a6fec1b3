"""The rules of a cloud that follows traces: free capacity, start delays, and which machines are reclaimed. No I/O."""

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace

from capacity.offers import Offer, Shape
from capacity.providers.trace.settings import TraceProviderSettings


def offers_of(name: str, settings: TraceProviderSettings) -> list[Offer]:
    """Returns the offers of a cloud: each machine type in each zone."""
    return [
        Offer(
            name,
            zone.region,
            zone_name,
            zone.kind,
            Shape(machine_type, of.gpus, of.gpu_type, round(of.cpus * 1000), of.memory),
            of.usd_per_h * zone.price_factor,
            settings.start_median_s / settings.speed,
        )
        for zone_name, zone in settings.zones.items()
        for machine_type, of in settings.machine_types.items()
    ]


@dataclass(frozen=True)
class MarketInstance:
    """A machine of the cloud. Times are seconds since the epoch."""

    native_id: str
    token: str
    """The client token of the launch."""
    zone: str
    launched_at_s: float
    starts_at_s: float
    ends_at_s: float = math.inf
    """The time from which the machine is gone: the end of its notice, or the time at which it was ended."""

    def is_there(self, now_s: float) -> bool:
        """Returns whether the machine exists at this time."""
        return now_s < self.ends_at_s


class Market:
    """The rules for one cloud."""

    def __init__(self, settings: TraceProviderSettings, began_at_s: float) -> None:
        """`began_at_s` is the time at which the traces start, in seconds since the epoch."""
        self._settings = settings
        self._began_at_s = began_at_s

    def capacity(self, zone: str, now_s: float) -> int:
        """Returns how many machines a zone can have at this time. A trace repeats after its end."""
        of = self._settings.zones.get(zone)
        if of is None:
            return 0  # The zone was removed from the settings, so its machines are reclaimed.
        gap_s, counts = of.followed
        most = of.most
        if not counts:
            return most or 0
        at_s = max(0.0, now_s - self._began_at_s) * self._settings.speed
        now = counts[int(at_s / gap_s) % len(counts)] * of.times
        return now if most is None else min(now, most)

    def next_change_s(self, now_s: float) -> float:
        """Returns the next time at which the capacity of a zone may change; infinity: no zone has a trace."""
        speed = self._settings.speed
        at_s = max(0.0, now_s - self._began_at_s) * speed
        gaps_s = [gap_s for gap_s, counts in (of.followed for of in self._settings.zones.values()) if len(counts) > 1]
        following_s = (self._began_at_s + (math.floor(at_s / gap_s) + 1) * gap_s / speed for gap_s in gaps_s)
        return min((at for at in following_s if at > now_s), default=math.inf)

    def has_room(self, zone: str, instances: Iterable[MarketInstance], now_s: float) -> bool:
        """Returns whether the zone has capacity for one more machine."""
        there = sum(one.zone == zone and one.is_there(now_s) for one in instances)
        return there < self.capacity(zone, now_s)

    def start_s(self, token: str) -> float:
        """Returns the duration of a launch. It is a deterministic function of the token."""
        sigma, median_s = self._settings.start_sigma, self._settings.start_median_s / self._settings.speed
        return median_s * random.Random(f"{self._settings.seed} {token}").lognormvariate(0, sigma)

    def noticed(self, instance: MarketInstance, now_s: float) -> MarketInstance:
        """Returns the machine with its end set to the end of a notice that begins now."""
        return replace(instance, ends_at_s=now_s + self._settings.notice_s / self._settings.speed)

    def taken(self, instances: Iterable[MarketInstance], now_s: float) -> list[MarketInstance]:
        """Returns the machines that are reclaimed now, with the end of their notice: each zone's excess, at random."""
        out = []
        kept: dict[str, list[MarketInstance]] = {}
        for one in instances:
            if one.is_there(now_s) and math.isinf(one.ends_at_s):
                kept.setdefault(one.zone, []).append(one)
        for zone, there in sorted(kept.items()):
            excess = len(there) - self.capacity(zone, now_s)
            lots = sorted(there, key=lambda one: random.Random(f"{self._settings.seed} {one.native_id}").random())
            out += [self.noticed(one, now_s) for one in lots[: max(0, excess)]]
        return out
