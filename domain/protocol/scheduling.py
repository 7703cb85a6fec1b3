"""Messages for scans, bids, awards and dry runs."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class ScanTicket:
    """The result of a scan: the length of the queue, and the regions from which bids are requested.

    The queue order stays in the memory of the process that scanned. A batch is identified by the position of its first
    workload.
    """

    scan: int
    regions: list[str] = field(default_factory=list)
    """Regions from which bids are requested. Regions whose RMS runs in the process that scanned are not listed: they
    bid during the award."""
    batch: int = 1
    bid_timeout_s: float = 30.0
    """How long the pass waits for the bids of `regions` on a batch."""
    interval_s: float = 300.0
    queued: int = 0
    """Number of workloads in the queue, without held ones."""
    probed: list[str] = field(default_factory=list)
    """Unresponsive regions that receive a bid request in this pass; the pass does not wait for the response."""
    probe_timeout_s: float = 30.0
    silent: list[str] = field(default_factory=list)
    """Unresponsive regions; the pass places nothing there."""
    rest_s: float | None = None
    """Seconds until the next tick; None: `interval_s`."""


@dataclass
class BidRequest:
    """Request to a region to bid on a batch of a scan's queue.

    All bids of the batch are computed on the same state of the region, which is newer than the scan. The region reads
    the batch from Postgres, where the scan wrote it (`infra.db.logs.ScanBatch`).
    """

    region: str
    scan: int
    first: int = 0
    """Position of the batch's first workload in the queue, from 0."""


@dataclass
class AwardRequest:
    """Request to award the plans of a batch in queue order."""

    scan: int
    first: int = 0
    unreachable: list[str] = field(default_factory=list)
    waited_s: float = 0.0


@dataclass
class AwardResult:
    """The numbers of awarded and waiting workloads of a batch."""

    awarded: int
    waiting: int
    rebids: int
    """Plans that were computed again, because an earlier award of the batch or another change had made them stale."""
    over: bool = False
    """True: the pass cannot continue, because the process that scanned has stopped. A new scan has been requested."""
    rest_s: float | None = None
    """Seconds until the next tick; None: the interval of the `ScanTicket`."""


@dataclass
class DryRunRequest:
    """Request to compute what would happen to a workload if it were submitted now. Nothing is written."""

    spec: dict[str, Any]
    """`domain.spec.WorkloadSpec` as JSON."""
    submitted_by: str = ""
    """The person who would submit it."""


@dataclass
class DryRunResult:
    """The result of a dry run: a placement with its victims, or each region's reasons for refusing."""

    admitted: bool
    rank: int
    over_quota: bool
    region: str | None = None
    machines: list[str] = field(default_factory=list)
    victims: list[str] = field(default_factory=list)
    reasons: list[dict[str, Any]] = field(default_factory=list)
