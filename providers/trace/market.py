"""The rules of a cloud that follows traces: who gets a machine, when it starts, who is taken. Pure."""

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace

from capacity.offers import Offer, Shape
from providers.trace.settings import TraceSettings


def offers_of(name: str, settings: TraceSettings) -> list[Offer]:
    """What a cloud offers: each of its types of machine in each of its zones."""
    return [
        Offer(
            name,
            zone.region,
            zone_name,
            zone.kind,
            Shape(machine_type, of.gpus, of.gpu_type, round(of.cpus * 1000), of.memory),
            of.usd_per_h * zone.price_factor,
            settings.start_median_s,
        )
        for zone_name, zone in settings.zones.items()
        for machine_type, of in settings.machine_types.items()
    ]


@dataclass(frozen=True)
class Instance:
    """A machine of the cloud. Times are seconds since the epoch."""

    native_id: str
    token: str
    """The client token that it was launched with."""
    zone: str
    launched_at_s: float
    starts_at_s: float
    ends_at_s: float = math.inf
    """When it is gone: the end of its notice, or the moment in which it was ended."""

    def is_there(self, now_s: float) -> bool:
        """Whether the cloud has it."""
        return now_s < self.ends_at_s


class Market:
    """The rules for one cloud."""

    def __init__(self, settings: TraceSettings, began_at_s: float) -> None:
        """`began_at_s`: when the traces began, in seconds since the epoch."""
        self._settings = settings
        self._began_at_s = began_at_s

    def capacity(self, zone: str, now_s: float) -> int:
        """How many machines a zone has at a time; what a trace says repeats after its end."""
        of = self._settings.zones.get(zone)
        if of is None:
            return 0  # It is not in the settings any more: its machines go.
        gap_s, counts = of.followed
        most = of.most
        if not counts:
            return most or 0
        at_s = max(0.0, now_s - self._began_at_s) * self._settings.speed
        now = counts[int(at_s / gap_s) % len(counts)] * of.times
        return now if most is None else min(now, most)

    def next_change_s(self, now_s: float) -> float:
        """When a zone next has another number of machines, at the earliest; infinity: none follows a trace."""
        speed = self._settings.speed
        at_s = max(0.0, now_s - self._began_at_s) * speed
        gaps_s = [gap_s for gap_s, counts in (of.followed for of in self._settings.zones.values()) if len(counts) > 1]
        following_s = (self._began_at_s + (math.floor(at_s / gap_s) + 1) * gap_s / speed for gap_s in gaps_s)
        return min((at for at in following_s if at > now_s), default=math.inf)

    def has_room(self, zone: str, instances: Iterable[Instance], now_s: float) -> bool:
        """Whether one more can be launched."""
        there = sum(one.zone == zone and one.is_there(now_s) for one in instances)
        return there < self.capacity(zone, now_s)

    def start_s(self, token: str) -> float:
        """How long a launch takes: the same for the same token."""
        sigma = self._settings.start_sigma
        return self._settings.start_median_s * random.Random(f"{self._settings.seed} {token}").lognormvariate(0, sigma)

    def noticed(self, instance: Instance, now_s: float) -> Instance:
        """The machine, with the end of a notice that begins now."""
        return replace(instance, ends_at_s=now_s + self._settings.notice_s)

    def taken(self, instances: Iterable[Instance], now_s: float) -> list[Instance]:
        """Those that the cloud takes now, with the end of their notice: as many as a zone has too many, by lot."""
        out = []
        kept: dict[str, list[Instance]] = {}
        for one in instances:
            if one.is_there(now_s) and math.isinf(one.ends_at_s):
                kept.setdefault(one.zone, []).append(one)
        for zone, there in sorted(kept.items()):
            excess = len(there) - self.capacity(zone, now_s)
            lots = sorted(there, key=lambda one: random.Random(f"{self._settings.seed} {one.native_id}").random())
            out += [self.noticed(one, now_s) for one in lots[: max(0, excess)]]
        return out
