"""What goes into an auction and what comes out."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf

from domain.reasons import Reason
from domain.scheduling import Bid, PlacementRequest, Plan


@dataclass(frozen=True)
class Candidate:
    """One queued workload, in its turn."""

    request: PlacementRequest
    regions: frozenset[str] | None = None
    """Where it may run: as its user wishes and its data allows. None: anywhere."""
    planned_region: str | None = None
    """Where the slow path planned it (MAST 6): of bids that are equal in every criterion the one from there wins."""
    waited_s: float = 0.0
    max_runtime_s: float = inf

    def may_run_in(self, region: str) -> bool:
        """Whether a region may have it."""
        return self.regions is None or region in self.regions

    def preference(self, plan: Plan) -> tuple[object, ...]:
        """The order of plans for it: their quality, then where the slow path wanted it, then the region's name.

        A region has one plan for it, so this is a total order.
        """
        return plan.quality.key, plan.region != self.planned_region, plan.region

    def best(self, bids: Iterable[Bid]) -> Plan | None:
        """The plan that it gets of what regions bid; None: no region has one."""
        return min((bid.plan for bid in bids if bid.plan is not None), key=self.preference, default=None)


@dataclass(frozen=True)
class Outcome:
    """What the auction decided about one workload."""

    workload: str
    bid: Bid | None
    """The bid that won; None: it waits."""
    bids: Mapping[str, Bid] = field(default_factory=dict)
    """What every region said last."""
    reserved: Reason | None = None
    """Where it waits for what is kept for it, if a reservation is made."""
    starts_at_s: float | None = None
    """When it is expected to start then."""

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """Why it waits: the reservation, and what regions said, by region. None if it won."""
        if self.bid is not None:
            return ()
        said = [reason for _, bid in sorted(self.bids.items()) for reason in bid.reasons]
        return tuple([self.reserved, *said] if self.reserved is not None else said)

    @property
    def plan(self) -> Plan | None:
        """The plan that won."""
        return self.bid.plan if self.bid is not None else None


@dataclass
class Stats:
    """What an auction has counted so far."""

    bids: int = 0
    """Requests that a region looked at, whether the negative cache answered or not."""
    rebids: int = 0
    """Those of them that an earlier award had made stale."""
    rounds: int = 0
    """How often regions were asked: once for each batch, and again for each workload whose bids were stale."""
    negative_hits: int = 0
    negative_misses: int = 0
    awards: int = 0
    joint_heads: int = 0
    """Heads of the queue for which a joint choice was looked for."""
    joint_gains: int = 0
    """Workloads that were placed because of it."""
    joint_spared: int = 0
    """Evictions that it made needless."""

    @property
    def negative_hit_rate(self) -> float:
        """The fraction of bids that the negative cache spared; 0 where none was asked for."""
        asked = self.negative_hits + self.negative_misses
        return self.negative_hits / asked if asked else 0.0
