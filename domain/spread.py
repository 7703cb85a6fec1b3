"""Spreading: how far apart the workloads of a group, such as the replicas of a service, are placed."""

from dataclasses import dataclass
from enum import StrEnum


class SpreadLevel(StrEnum):
    """What two workloads of a group should not share, from the smallest to the largest."""

    MACHINE = "machine"
    RACK = "rack"
    CLUSTER = "cluster"
    ZONE = "zone"
    """All clusters of a region without a zone count as one zone."""


@dataclass(frozen=True)
class SpreadRule:
    """A workload is placed where as few others of its group are as possible."""

    group: str
    over: SpreadLevel = SpreadLevel.MACHINE
    """The level that counts first. The other levels follow, from machines to zones."""
    required: bool = False
    """Whether it waits rather than share a place of the level `over` with another workload of its group."""
    beside: str | None = None
    """Id of the workload that it replaces, which does not count."""

    @property
    def order(self) -> tuple[SpreadLevel, ...]:
        """All levels, in the order in which they count."""
        return (self.over, *(level for level in SpreadLevel if level is not self.over))
