"""Selects the regions that a scheduling pass requests bids from, so that an unresponsive region does not delay others.

A region that misses the deadline becomes *silent*: passes leave it out, and probe it with exponential backoff without
waiting for the reply. A reply within the deadline makes it normal again. A region that replies, but late, is *slow*: it
is not left out, because the awarding process can compute its bids itself.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class ProbeBackoff:
    """Exponential backoff, in seconds, for probes of a region that missed the deadline. Each pause doubles."""

    first_s: float = 2.0
    longest_s: float = 60.0

    def pause_s(self, misses: int) -> float:
        """Returns the pause after the `misses`-th consecutive miss, counted from 1."""
        return float(min(self.longest_s, self.first_s * 2.0 ** min(misses - 1, 60)))


@dataclass(frozen=True)
class Asking:
    """The regions from which a pass requests bids."""

    waited_for: list[str]
    """Regions whose bids the pass waits for, until the deadline."""
    probed: list[str]
    """Silent or slow regions whose backoff has ended. The pass does not wait for their bids."""


@dataclass(frozen=True)
class Missed:
    """State of a region that missed the deadline and has not met it since."""

    since_s: float
    """Time of the first missed request, in seconds since the epoch."""
    misses: int
    """Consecutive misses, including probes."""
    next_s: float
    """Time of the next probe."""
    slow: bool = False
    """Whether the region replies late, instead of not at all."""
    heard: bool = False
    """Whether the region has replied since the last request."""


class Silence:
    """The regions that missed the deadline, in the memory of one scheduling process. The state is not persistent."""

    def __init__(self, backoff: ProbeBackoff = ProbeBackoff()) -> None:
        self._backoff = backoff
        self._missed: dict[str, Missed] = {}

    @property
    def missed(self) -> Mapping[str, Missed]:
        """Silent and slow regions, by name."""
        return self._missed

    @property
    def silent(self) -> list[str]:
        """Silent regions, which passes leave out, sorted."""
        return [region for region, m in sorted(self._missed.items()) if not m.slow]

    def due_s(self, now_s: float) -> float | None:
        """Returns the seconds until the next probe is due; None if no region missed the deadline."""
        return min((max(0.0, m.next_s - now_s) for m in self._missed.values()), default=None)

    def asking(self, regions: Iterable[str], now_s: float) -> Asking:
        """Returns the regions of `regions` to request bids from. The state of all other regions is removed."""
        regions = sorted(regions)
        for gone in self._missed.keys() - set(regions):
            del self._missed[gone]
        due = [region for region in regions if region in self._missed and self._missed[region].next_s <= now_s]
        for region in due:
            known = self._missed[region]
            self._again(region, replace(known, slow=known.heard, heard=False), now_s)
        return Asking([region for region in regions if region not in self._missed], due)

    def miss(self, region: str, asked_s: float, now_s: float) -> None:
        """Records that a region missed the deadline of the request made at `asked_s`. Repeated calls change nothing."""
        if region not in self._missed:
            self._again(region, Missed(asked_s, 0, now_s), now_s)

    def answer(self, region: str, *, in_time: bool) -> None:
        """Records a reply of a region, within the deadline or late."""
        if in_time:
            self._missed.pop(region, None)
        elif region in self._missed:
            self._missed[region] = replace(self._missed[region], slow=True, heard=True)

    def _again(self, region: str, known: Missed, now_s: float) -> None:
        misses = known.misses + 1
        self._missed[region] = replace(known, misses=misses, next_s=now_s + self._backoff.pause_s(misses))
