"""Decides which tiers a save reaches: the first tier at each save, each further one after an interval of its own.

The interval of a tier is Young's, for the failures after which it is the fastest tier that is left, and for the cost of
writing it, which is measured. Failures are of three classes: the process is lost (the memory of its machine is left),
the machine is lost (the memory of a peer is left), and both machines are lost (the bucket is left).
"""

import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from mizzen.cadence import Mtbf, best_interval_s
from mizzen.cadence.interruptions import gang_machines, number

PROCESS_HAZARD = "MIZZEN_PROCESS_HAZARD_PER_H"
BOTH_HAZARD = "MIZZEN_BOTH_HAZARD_PER_H"
PROCESS_PART = 0.5
BOTH_FACTOR = 10.0
_BACKGROUND_PART = 0.1
"""What a second of writing in the background costs the training, in seconds, for the choice of the interval."""
_LONGEST_PART = 0.5
"""A tier is written for at most this fraction of the time."""
_RETRY_S = 60.0
_WRITES = 5


@dataclass(frozen=True, kw_only=True)
class Tiers:
    """Settings of the tiers: the memory of this machine and of a peer, `local`, the root. Each has its own interval.

    The mean times between failures are measured by the scheduler, unless they are given. Without a measurement, the
    loss of a machine has the mean time of the platform, the loss of a process half of it, and the loss of both machines
    ten times of it.
    """

    memory_bytes: int | None = None
    """Limit of the memory server of each machine; by default a quarter of the memory of the machine or container. It
    needs room for two checkpoints, and with peers for two of the other machine's. 0: no memory tier."""
    peers: bool = False
    """Whether checkpoints are also copied to the memory of another machine of the run, over the network."""
    address: str | None = None
    """`host` or `host:port` at which other machines reach this one. By default the scheduler's address of this machine,
    or the one of its default route, and a free port."""
    idle_s: float = 3600.0
    """The memory server of a machine ends, and its content is lost, if it was not used for so long."""
    process_mtbf_s: float | None = None
    """Mean seconds between losses of a process of the gang, with or without its machine."""
    machine_mtbf_s: float | None = None
    """Mean seconds between losses of a machine of the gang."""
    both_mtbf_s: float | None = None
    """Mean seconds between losses of a machine together with its peer."""

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "idle_s", "process_mtbf_s", "machine_mtbf_s", "both_mtbf_s"):
            value, least = getattr(self, name), 0 if name == "memory_bytes" else 1
            if value is not None and not least <= value < inf:
                raise ValueError(f"{name}={value}: must be {least} or more")
        host, separator, port = (self.address or "host").partition(":")
        if not host or (separator and not (port.isdecimal() and 0 < int(port) < 1 << 16)):
            raise ValueError(f"address={self.address!r}: must be 'host' or 'host:port'")

    def process_mtbf(self, machine: Mtbf) -> Mtbf:
        """Return the mean time between losses of a process; `machine`: that of the scheduler or platform."""
        if self.process_mtbf_s is not None:
            return Mtbf(self.process_mtbf_s, machine.source, "as set in Tiers for the loss of a process")
        measured_s = _measured_s(PROCESS_HAZARD)
        if measured_s is not None and self.machine_mtbf_s is None:
            # With its machine a process is lost, too.
            return Mtbf(min(measured_s, machine.mtbf_s), "hazard", "as measured for the loss of a process")
        mtbf_s = PROCESS_PART * (self.machine_mtbf_s or machine.mtbf_s)
        return Mtbf(mtbf_s, machine.source, f"half of the mean time between losses of a machine, {machine.why}")


def _measured_s(name: str) -> float | None:
    """Return the mean seconds between losses in the whole gang, from a rate for each machine hour; None: not known."""
    hazard_per_h = number(os.environ, name, float, lambda n: n > 0, "more than 0 losses per hour")
    return None if hazard_per_h is None else 3600.0 / (hazard_per_h * gang_machines(os.environ))


class TierCadence:
    """Chooses the tiers of each save of one process. Tiers are numbered from the fastest, 0."""

    def __init__(self, tiers: Tiers, machine: Mtbf, count: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`machine`: mean time between losses of a machine, as known; `count`: number of tiers."""
        machine_s = tiers.machine_mtbf_s or machine.mtbf_s
        measured_s = _measured_s(BOTH_HAZARD) if tiers.machine_mtbf_s is None else None
        both_s = tiers.both_mtbf_s or max(machine_s, measured_s or BOTH_FACTOR * machine_s)
        self._mtbf_s = (tiers.process_mtbf(machine).mtbf_s, machine_s, both_s)
        self._clock = clock
        self._saved_s: list[float | None] = [None] * count
        self._retry_s = [0.0] * count
        self._writes = [deque[float](maxlen=_WRITES) for _ in range(count)]
        self._holds = 0

    def interval_s(self, tier: int, background: bool) -> float:
        """Return the least time between two saves of a tier; 0 for the first one, and before its first save."""
        if not tier or not self._writes[tier]:
            return 0.0
        written = sorted(self._writes[tier])[len(self._writes[tier]) // 2]
        cost_s = written * (_BACKGROUND_PART if background else 1.0)
        return max(best_interval_s(self._mtbf_s[self._holds], cost_s)[0], written / _LONGEST_PART)

    def reach(self, background: bool) -> int:
        """Return how many tiers a save writes now; 0: none is due."""
        now_s = self._clock()
        due = [
            1 + tier
            for tier, saved_s in enumerate(self._saved_s)
            if self.tries(tier) and (saved_s is None or now_s >= saved_s + self.interval_s(tier, background))
        ]
        return max(due, default=0)

    def tries(self, tier: int) -> bool:
        """Return whether a tier has not failed a short time ago."""
        return self._clock() >= self._retry_s[tier]

    def failed(self, tier: int) -> None:
        """Record that a tier could not be written: it is left out for some time, because the failure may take long."""
        self._retry_s[tier] = self._clock() + _RETRY_S

    def written(self, tier: int, began_s: float) -> None:
        """Record that a save has written a tier; `began_s`: when it began, by the clock of this object."""
        now_s = self._clock()
        self._saved_s[tier] = now_s
        self._writes[tier].append(now_s - began_s)

    def holds(self, failures: int) -> None:
        """Record which losses the faster tiers survive: 0: none; 1: of a process; 2: also of a machine."""
        self._holds = failures
