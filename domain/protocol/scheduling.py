"""Scans, bids, awards and dry runs."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class ScanTicket:
    """What a scan pass found: how long the queue is, and whom to ask for bids.

    The order itself stays with the process that scanned: a batch of it is named by the place where it begins.
    """

    scan: int
    workloads: list[str] = field(default_factory=list)
    """The whole queue: only in histories of before there was `queued`."""
    regions: list[str] = field(default_factory=list)
    """Those to be asked. A region whose RMS is the process that scanned bids when it awards."""
    batch: int = 1
    bid_timeout_s: float = 30.0
    """How long the pass waits for the bids of `regions` on a batch."""
    interval_s: float = 300.0
    queued: int = 0
    """Workloads in the queue, held ones not among them."""
    probed: list[str] = field(default_factory=list)
    """Silent regions that are asked again in this pass, which does not wait for them."""
    probe_timeout_s: float = 30.0
    silent: list[str] = field(default_factory=list)
    """Silent regions: the pass places nothing there."""
    rest_s: float | None = None
    """The next tick is due this soon; None: after the interval."""


@dataclass
class BidRequest:
    """Asks a region to bid on a batch of a scan's queue, each workload against the same state, which is newer than it.

    The batch is where `scan` put it into Postgres (`infra.db.logs.ScanBatch`).
    """

    region: str
    scan: int
    first: int = 0
    """Where in the queue the batch begins, from 0."""


@dataclass
class AwardRequest:
    """Asks for the plans of a batch to be awarded in queue order."""

    scan: int
    first: int = 0
    unreachable: list[str] = field(default_factory=list)
    waited_s: float = 0.0


@dataclass
class AwardResult:
    """How a batch went: counts."""

    awarded: int
    waiting: int
    rebids: int
    """Plans that an earlier award of the batch, or a change meanwhile, had made stale."""
    over: bool = False
    """There is nothing to go on with: the process that scanned is gone. Another scan has been asked for."""
    rest_s: float | None = None
    """The next tick is due this soon; None: after the interval."""


@dataclass
class DryRunRequest:
    """Asks what would happen to a workload if it were submitted now. Nothing is written."""

    spec: dict[str, Any]
    """`domain.spec.WorkloadSpec` as JSON."""


@dataclass
class DryRunResult:
    """What would happen: a place with its victims, or each region's reasons why not."""

    admitted: bool
    rank: int
    over_quota: bool
    region: str | None = None
    machines: list[str] = field(default_factory=list)
    victims: list[str] = field(default_factory=list)
    reasons: list[dict[str, Any]] = field(default_factory=list)
