"""The knowledge of a policy about its zones: an immutable value, which can be stored as JSON."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class ZoneRecord:
    """The observed launches and preemptions of one zone. Times are those of observations, in seconds."""

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
    room: int | None = None
    """How many replicas the zone held when it last refused another one; None: it never did, or has held more since."""
    losses: float = 0.0
    """The number of losses, with decay. Replicas that are preempted at the same time are one loss."""
    held_h: float = 0.0
    """The time in hours during which the zone held a replica, with decay."""
    granted: float = 0.0
    """The number of launches that succeeded, with decay."""
    refused: float = 0.0
    """The number of launches that were refused, with decay."""

    def moved(self, by_s: float) -> "ZoneRecord":
        """Returns the record with all times moved by `by_s` seconds."""
        return replace(
            self,
            seen_at_s=self.seen_at_s + by_s,
            lost_at_s=_moved(self.lost_at_s, by_s),
            refused_at_s=_moved(self.refused_at_s, by_s),
        )


def _moved(at_s: float | None, by_s: float) -> float | None:
    return None if at_s is None else at_s + by_s


@dataclass(frozen=True)
class LaunchRecord:
    """One replica that has been launched and has not ended. Times are those of observations, in seconds."""

    asked_at_s: float
    """When the replica was launched."""
    target: int
    """N_tar when it was launched."""
    zone: str | None
    """The zone; None: on-demand."""
    granted_at_s: float | None = None
    """When it was first observed after the grant; None: the launch is not answered yet."""
    is_ready: bool = False
    """Whether it has been ready."""

    def moved(self, by_s: float) -> "LaunchRecord":
        """Returns the record with all times moved by `by_s` seconds."""
        return replace(self, asked_at_s=self.asked_at_s + by_s, granted_at_s=_moved(self.granted_at_s, by_s))


@dataclass(frozen=True)
class Knowledge:
    """All that a policy has learned. The start value is that of a policy without any observation."""

    now_s: float | None = None
    """The time of the last observation."""
    zones: Mapping[str, ZoneRecord] = field(default_factory=dict)
    """The record of each zone in which a launch was tried."""
    launches: Mapping[int, LaunchRecord] = field(default_factory=dict)
    """The record of each replica of the last observation, by number."""
    target: int = 0
    """N_tar at the last observation."""
    launched_at_s: float | None = None
    """When a spot replica was launched last, or a launch was refused last; None: never. It may have ended since."""
    answer_s: float | None = None
    """The mean time from a launch until its answer, of recent launches; None: none was answered yet."""
    answers: int = 0
    """The number of launches in `answer_s`, up to a limit."""
    cold_start_s: float | None = None
    """The mean time from the grant of a replica until it was ready, of recent replicas; None: none was ready yet."""
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
    following_losses: float = 0.0
    """Losses of a zone that probably followed the loss of another zone of its group."""
    watched_losses: float = 0.0
    """Losses of a zone after which another zone of its group was held, each as often as there are such zones."""

    def moved(self, by_s: float) -> "Knowledge":
        """Returns the knowledge with all times moved by `by_s` seconds, after the clock was set."""
        return replace(
            self,
            now_s=_moved(self.now_s, by_s),
            launched_at_s=_moved(self.launched_at_s, by_s),
            zones={name: record.moved(by_s) for name, record in self.zones.items()},
            launches={number: record.moved(by_s) for number, record in self.launches.items()},
        )
