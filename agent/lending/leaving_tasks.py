"""The tasks that leave a machine within a notice, as the control of their traffic sees them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Protocol

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


class Switch(Protocol):
    """The kill-switch of the machine's network (`agent.network.edge.KillSwitch`)."""

    def on(self) -> None:
        """Refuses new connections from now on."""

    def off(self) -> None:
        """Permits new connections again."""


class RateEnforcer(Protocol):
    """What enforces rates on the machine's interface (`agent.lending.traffic`). Its methods block for milliseconds."""

    @property
    def kill_switch(self) -> Switch:
        """The flag by which the machine refuses new connections to its tasks."""
        ...

    def update(self, leaving: Sequence[LeavingTask], now_s: float) -> Mapping[str, IntEnum | None]:
        """Sets the rates of the tasks that leave, and ends those of others.

        Returns what became of each task (`reclaim.admission.FlowOutcome`), by run id; None: its size is not known.
        """
        ...
