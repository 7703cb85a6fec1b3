"""What a policy has learned about its zones: an immutable value."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ZoneRecord:
    """What launches and preemptions have shown about one zone. Times are those of observations, in seconds."""

    up_s: float
    """For how long the zone had held replicas without a loss at `seen_at_s`."""
    seen_at_s: float
    """The last time at which the zone held a replica, lost one or refused one."""
    lost_at_s: float | None = None
    """The last time at which the zone preempted a replica; None: never."""
    refused_at_s: float | None = None
    """The last time at which the zone refused a launch; None: never."""
    down: bool = False
    """Whether the zone held no replica when it last preempted one or refused a launch, and has held none since."""
    refusals: int = 0
    """The number of refusals since the last launch that succeeded."""
    losses: float = 0.0
    """The number of losses, with decay. Replicas that are preempted at the same time are one loss."""
    held_h: float = 0.0
    """The time in hours during which the zone held a replica, with decay."""
    granted: float = 0.0
    """The number of launches that succeeded, with decay."""
    refused: float = 0.0
    """The number of launches that were refused, with decay."""


@dataclass(frozen=True)
class Knowledge:
    """All that a policy has learned. The start value is that of a policy without any observation."""

    now_s: float | None = None
    """The time of the last observation."""
    zones: Mapping[str, ZoneRecord] = field(default_factory=dict)
    """The record of each zone in which a launch was tried."""
    starting: Mapping[int, float] = field(default_factory=dict)
    """The number of each provisioning replica, with the time at which it was first observed."""
    newest: int = -1
    """The highest number of a replica so far."""
    cold_start_s: float | None = None
    """The mean time from the launch of a replica until it was ready, of recent replicas; None: none was ready yet."""
    cold_starts: int = 0
    """The number of replicas in `cold_start_s`, up to a limit."""
    whole_losses: float = 0.0
    """Losses after which the zone held no replica."""
    partial_losses: float = 0.0
    """Losses after which the zone still held a replica."""
    joint_losses: float = 0.0
    """Losses of a zone at the same time as another zone of its group lost replicas."""
    single_losses: float = 0.0
    """Losses of a zone while another zone of its group kept all its replicas."""
