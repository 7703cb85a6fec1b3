"""Inputs, outcomes and counters of the auction."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf

from domain.reasons import Reason
from domain.scheduling import Bid, PlacementRequest, Plan


@dataclass(frozen=True)
class Candidate:
    """A queued workload in an auction."""

    request: PlacementRequest
    regions: frozenset[str] | None = None
    """Regions that the user allows and that have the data; None: all regions."""
    planned_region: str | None = None
    """Region planned by the slow path (MAST 6). It wins ties between bids that are equal in all criteria."""
    waited_s: float = 0.0
    """Time since the submission without time on hold. Running time counts, so preemptions do not change it."""
    max_runtime_s: float = inf

    def may_run_in(self, region: str) -> bool:
        """Returns whether the workload may run in a region."""
        return self.regions is None or region in self.regions

    def preference(self, plan: Plan) -> tuple[object, ...]:
        """Returns the sort key of a plan: quality, then the region planned by the slow path, then the region name.

        Each region has at most one plan for the workload, so this is a total order.
        """
        return plan.quality.key, plan.region != self.planned_region, plan.region

    def best(self, bids: Iterable[Bid]) -> Plan | None:
        """Returns the best plan of the bids; None if no bid has a plan."""
        return min((bid.plan for bid in bids if bid.plan is not None), key=self.preference, default=None)


@dataclass(frozen=True)
class AuctionOutcome:
    """The auction's decision on one workload."""

    workload: str
    bid: Bid | None
    """The winning bid; None if the workload keeps waiting."""
    bids: Mapping[str, Bid] = field(default_factory=dict)
    """The latest bid of each region."""
    reserved: Reason | None = None
    """The reason that names the reserved region, if a reservation was made."""
    starts_at_s: float | None = None
    """Latest start of the reservation, if there is one whose start is known."""
    reserves_at_s: float = inf
    """When the workload will have waited long enough for a reservation, if a region has none yet."""

    @property
    def retry_at_s(self) -> float:
        """The earliest time at which the outcome may change although nothing happens until then; infinity: never."""
        if self.bid is not None:
            return inf
        known_s = inf if self.starts_at_s is None else self.starts_at_s
        return min([known_s, self.reserves_at_s, *(bid.retry_at_s for bid in self.bids.values())])

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """Reasons why the workload waits: the reservation, then those of the regions by name. Empty if it won."""
        if self.bid is not None:
            return ()
        said = [reason for _, bid in sorted(self.bids.items()) for reason in bid.reasons]
        return tuple([self.reserved, *said] if self.reserved is not None else said)

    @property
    def plan(self) -> Plan | None:
        """The winning plan, if any."""
        return self.bid.plan if self.bid is not None else None


@dataclass
class Stats:
    """Counters of an auction."""

    bids: int = 0
    """Bids made, including those answered from a cache."""
    rebids: int = 0
    """Bids made again because the first bid was stale."""
    rounds: int = 0
    """Rounds of bidding: one per batch, and one for each time that a workload's stale bids were renewed."""
    negative_hits: int = 0
    negative_misses: int = 0
    awards: int = 0
