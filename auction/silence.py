"""Which regions a scheduling pass asks for bids, waits for, and leaves out: a silent region costs the others no time.

A region that misses the deadline is silent: passes leave it out, and ask it again with exponential backoff without
waiting for the answer. An answer within the deadline ends that. A region whose answers come, but late, is slow: it is
not left out, since the awarding process can bid in its place.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Backoff:
    """Pauses before a region that missed the deadline is asked again, in seconds: each is twice the one before."""

    first_s: float = 2.0
    longest_s: float = 60.0

    def pause_s(self, misses: int) -> float:
        """The pause after the `misses`-th miss in a row, counted from 1."""
        return float(min(self.longest_s, self.first_s * 2.0 ** min(misses - 1, 60)))


@dataclass(frozen=True)
class Asking:
    """The regions that a pass asks."""

    waited_for: list[str]
    """Their bids are waited for, until the deadline."""
    probed: list[str]
    """Silent or slow ones whose backoff has ended: asked, and not waited for."""


@dataclass(frozen=True)
class Missed:
    """A region that missed the deadline and has not met it since."""

    since_s: float
    """When the first question that it missed was asked, in seconds since 1970."""
    misses: int
    """In a row, probes included."""
    next_s: float
    """When it is asked again."""
    slow: bool = False
    """Whether it answers, late."""
    heard: bool = False
    """Whether it has answered since it was asked last."""


class Silence:
    """What one scheduling process knows of regions that missed the deadline. It is gone with the process."""

    def __init__(self, backoff: Backoff = Backoff()) -> None:
        self._backoff = backoff
        self._missed: dict[str, Missed] = {}

    @property
    def missed(self) -> Mapping[str, Missed]:
        """Regions that are silent or slow."""
        return self._missed

    @property
    def silent(self) -> list[str]:
        """Regions that passes leave out, sorted."""
        return [region for region, m in sorted(self._missed.items()) if not m.slow]

    def due_s(self, now_s: float) -> float | None:
        """In how many seconds a region is to be asked again; None: all answer in time."""
        return min((max(0.0, m.next_s - now_s) for m in self._missed.values()), default=None)

    def asking(self, regions: Iterable[str], now_s: float) -> Asking:
        """The regions that a pass over `regions` asks; others are forgotten."""
        regions = sorted(regions)
        for gone in self._missed.keys() - set(regions):
            del self._missed[gone]
        due = [region for region in regions if region in self._missed and self._missed[region].next_s <= now_s]
        for region in due:
            known = self._missed[region]
            self._again(region, replace(known, slow=known.heard, heard=False), now_s)
        return Asking([region for region in regions if region not in self._missed], due)

    def miss(self, region: str, asked_s: float, now_s: float) -> None:
        """A region that was asked at `asked_s`, and waited for, has not answered by now. Repeated, nothing changes."""
        if region not in self._missed:
            self._again(region, Missed(asked_s, 0, now_s), now_s)

    def answer(self, region: str, *, in_time: bool) -> None:
        """A region has answered, within the deadline or later."""
        if in_time:
            self._missed.pop(region, None)
        elif region in self._missed:
            self._missed[region] = replace(self._missed[region], slow=True, heard=True)

    def _again(self, region: str, known: Missed, now_s: float) -> None:
        misses = known.misses + 1
        self._missed[region] = replace(known, misses=misses, next_s=now_s + self._backoff.pause_s(misses))
