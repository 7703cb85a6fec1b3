"""Messages for copying tables between regions and verifying the copies."""

from dataclasses import dataclass

NIGHTLY = "nightly"
ON_DEMAND = "on demand"
"""The two shares of the bandwidth between regions: `NIGHTLY` for planned moves, `ON_DEMAND` for copies that a workload
or an operator waits for."""


@dataclass
class ReplicateTable:
    """Request for a complete, verified replica of a table in a region."""

    table: str
    source_region: str
    """The table's home at the time of the request. Each partition is copied from the home at the time of its copy."""
    target_region: str
    share: str = ON_DEMAND
    """`ON_DEMAND` or `NIGHTLY`."""


@dataclass
class Scrub:
    """Request to verify the copies in a region that are due for verification."""

    region: str
