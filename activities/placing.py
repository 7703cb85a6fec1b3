"""Placing a batch in memory: the best of all bids for each workload in queue order, on what was placed before it."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

import rms.award
import rms.compare
from activities.bids import Asked, region_bid
from activities.held import Held
from domain.scheduling import Bid

Answers = dict[str, Bid]
"""By region."""


@dataclass
class Placing:
    """The bids on a batch, and which of them an award has made stale."""

    held: Held
    answers: Mapping[str, Answers]
    """By workload: first bids, and reasons of regions that did not answer."""
    regions: Set[str]
    """Those that may bid."""
    changed: set[str] = field(default_factory=set)
    """Regions in which something was placed since the first bids."""
    rebids: int = 0

    def place(self, batch: Sequence[Asked]) -> list[Bid | None]:
        """The best bid for each workload of `batch`, which is placed in the columns; None: no region has a plan."""
        return [self._place(asked) for asked in batch]

    def _place(self, asked: Asked) -> Bid | None:
        answers = self.answers[asked.entry.workload]
        for region in answers.keys() - self.regions:
            if answers[region].plan is not None:
                del answers[region]  # It is gone since it bid.
        stale = {r for r, b in answers.items() if b.plan is not None and r in self.changed}
        stale |= self.regions - answers.keys()  # What it bid, it bid in a process that is not this one.
        fresh: set[str] = set()
        while True:
            for region in sorted(stale):
                answers[region] = region_bid(self.held.planner(region), asked)
                self.rebids += 1
            fresh |= stale
            plan = rms.compare.best([b.plan for b in answers.values() if b.plan is not None])
            if plan is None:
                return None
            region = plan.region
            try:
                rms.award.award(self.held.planner(region).region, plan, asked.request)
            except ValueError:
                # The region knew other facts than this process does: it bids again, here.
                if region in fresh:
                    raise
                stale = {region}
                continue
            self.changed.add(region)
            return answers[region]
