"""Classes of network traffic when machines are taken back by their owners (ReclaimNet, section VII.A)."""

from enum import StrEnum

OVERHEAD_SHARE = 0.06
"""Bytes of headers for each byte of payload, at least: 4.6 % for full segments of IPv4 on Ethernet, 6.0 % of IPv6. An
agent measures its own."""


class TrafficClass(StrEnum):
    """The class of a packet, marked in its header."""

    PLANNED = "planned"
    """Migrations within a notice, however short."""
    PRE_SYNC = "pre-sync"
    """Parts of checkpoints that are sent ahead of time."""
    RESEARCH = "research"
    """All other traffic."""

    @property
    def dscp(self) -> int:
        """The DSCP value: AF41, CS1 or best effort."""
        return _DSCP[self]


_DSCP = {
    TrafficClass.PLANNED: 34,
    TrafficClass.PRE_SYNC: 8,
    TrafficClass.RESEARCH: 0,
}
