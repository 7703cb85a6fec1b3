"""The tasks that leave a machine within a notice, as the control of their traffic sees them."""

from dataclasses import dataclass
from pathlib import Path

PERIOD_S = 1.0
"""Interval of decisions about the traffic while tasks leave."""


@dataclass(frozen=True)
class LeavingTask:
    """A task that must leave."""

    run_id: str
    cgroup: Path
    """Its cgroup v2."""
    checkpoint_bytes: int | None
    """What the save of its newest checkpoint has sent; None: it has saved none. The last save sends about as much."""
    deadline_s: float
    """When the machine is the owner's, in seconds since the epoch."""
    pre_sync: bool = False
    """Whether it sends parts ahead of its last checkpoint now."""
