"""The mean time between interruptions that a job assumes without a coordinator, as the live system sets it at a launch.

It follows from the observed hazard of the building (`domain.hazard`, `activities.lifecycle.launch`), or from a prior.
"""

from collections import deque

from domain.hazard import hazard_per_h
from research.reclaim.scenario import DAY_S, HOUR_S
from research.reclaim.state import Job, Node

PRIOR_S = 24 * HOUR_S
"""The SDK's prior for a platform that is not known (`mizzen.cadence.PLATFORMS`)."""
WINDOW_S = 14 * DAY_S


class Interruptions:
    """The attempts of each building in the last two weeks: how long they ran, and how many were interrupted."""

    def __init__(self, buildings: int) -> None:
        self._ended: list[deque[tuple[float, float, bool]]] = [deque() for _ in range(buildings)]

    def ended(self, building: int, from_s: float, to_s: float, *, interrupted: bool) -> None:
        """Records an attempt. Its machine was lost or taken back, if it was interrupted."""
        self._ended[building].append((from_s, to_s, interrupted))

    def mtbf_s(self, node: Node, running: list[Job], now_s: float) -> float:
        """Returns the mean time between interruptions of a job that starts on a machine.

        `running` are the jobs that run in the building of the machine.
        """
        ended, first_s = self._ended[node.building], now_s - WINDOW_S
        while ended and ended[0][1] <= first_s:
            ended.popleft()
        hours = sum(to_s - max(from_s, first_s) for from_s, to_s, _ in ended)
        hours += sum(now_s - max(job.started_s, first_s) for job in running)
        found = hazard_per_h(sum(interrupted for *_, interrupted in ended), hours / HOUR_S)
        return PRIOR_S if found is None else HOUR_S / found
