"""Writes how often a task should save to the file that the SDK's cadence reads (`mizzen.cadence.interval_file`).

The values come from a coordinator (`reclaim.intervals`). The agent only checks and stores them. The file is readable
for the task's user and replaced atomically, so the task sees the old or the new values. It is not synced: it expires
soon, and a machine that fails loses its tasks as well.
"""

import logging
from dataclasses import dataclass
from math import isfinite

from agent.records import publish
from agent.state import StateFolder
from agent.tasks import RunFolder
from domain.protocol import Pace

MIN_INTERVAL_S = 1.0
MAX_INTERVAL_S = 86_400.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TaskInterval:
    """How often a task should save. A longer or infinite interval is written as `MAX_INTERVAL_S`."""

    interval_s: float
    expires_at_s: float
    """Seconds since the epoch. From then on the task uses its own formula, because the coordinator is silent."""
    hazard_per_h: float | None = None
    """The expected interruptions of the task's gang per hour."""
    period_s: float | None = None
    """Saves begin `offset_s` after a multiple of this period since the epoch (staggered starts); None: at any time."""
    offset_s: float = 0.0
    least_s: float = 0.0
    """The task's own formula may shorten the interval, but not below this."""

    def __post_init__(self) -> None:
        if not self.interval_s >= MIN_INTERVAL_S:
            raise ValueError(f"interval_s: {self.interval_s}: must be {MIN_INTERVAL_S:g} or more seconds")
        if not (isfinite(self.expires_at_s) and self.expires_at_s > 0):
            raise ValueError(f"expires_at_s: {self.expires_at_s}: must be a time in seconds since the epoch")
        if self.hazard_per_h is not None and not (isfinite(self.hazard_per_h) and self.hazard_per_h >= 0):
            raise ValueError(f"hazard_per_h: {self.hazard_per_h}: must be 0 or more interruptions per hour")
        if self.period_s is not None and not 1 <= self.period_s <= MAX_INTERVAL_S:
            raise ValueError(f"period_s: {self.period_s}: must be 1 to {MAX_INTERVAL_S:g} seconds")
        if not 0 <= self.offset_s <= (self.period_s or 0.0):
            raise ValueError(f"offset_s: {self.offset_s}: must be 0 to period_s ({self.period_s})")
        if not self.least_s >= 0:
            raise ValueError(f"least_s: {self.least_s}: must be 0 or more seconds")


def write_interval(run: RunFolder, interval: TaskInterval) -> None:
    """Replaces the interval of a task. The folder of the task must exist.

    Raises:
        OSError: the file cannot be written, for example because the disk is full. The old file stays.
    """
    body = {"interval_s": min(interval.interval_s, MAX_INTERVAL_S), "expires_at_s": interval.expires_at_s}
    if interval.hazard_per_h is not None:
        body["hazard_per_h"] = interval.hazard_per_h
    if interval.period_s is not None:
        body |= {"period_s": interval.period_s, "offset_s": interval.offset_s}
    if interval.least_s > 0:
        body["least_s"] = min(interval.least_s, MAX_INTERVAL_S)
    publish(str(run.interval_file), body)


def set_pace(state: StateFolder, pace: Pace) -> None:
    """Writes the intervals of a machine's tasks. A run that is not here, or whose values are invalid, is left out."""
    wanted = {one.run: one for one in pace.runs}
    for attempt in state.unfinished():
        one = wanted.get(attempt.key)
        if one is None:
            continue
        try:
            interval = TaskInterval(
                max(MIN_INTERVAL_S, one.interval_s), pace.expires_at_s, one.hazard_per_h, one.period_s, one.offset_s,
                one.least_s,
            )  # fmt: skip
            for run in attempt.runs():
                write_interval(run, interval)
        except (OSError, ValueError) as error:
            _log.warning("the interval of %s is not set: %s", attempt.key, error)


def remove_interval(run: RunFolder) -> None:
    """Removes the interval of a task, which then uses its own formula. Does nothing if there is none."""
    run.interval_file.unlink(missing_ok=True)
