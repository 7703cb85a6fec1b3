"""Copies of tables, and their verification."""

from dataclasses import dataclass

NIGHTLY = "nightly"
ON_DEMAND = "on demand"
"""Shares of the bandwidth between regions: of planned moves, and of what a workload or an operator waits for."""


@dataclass
class ReplicateTable:
    """Asks for a complete, verified replica of a table in a region."""

    table: str
    source_region: str
    """The table's home when it was asked for; each partition is copied from the home of its moment."""
    target_region: str
    share: str = ON_DEMAND
    """`ON_DEMAND` or `NIGHTLY`."""


@dataclass
class Scrub:
    """Asks for what is due in a region to be verified."""

    region: str
