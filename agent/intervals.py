"""Writes how often a task should save to the file that the SDK's cadence reads (`mizzen.cadence.interval_file`).

The values come from a coordinator (`reclaim.intervals`). The agent only checks and stores them. The file is readable
for the task's user and replaced atomically, so the task sees the old or the new values. It is not synced: it expires
soon, and a machine that fails loses its tasks as well.
"""

import json
import logging

from agent.records import publish
from agent.state import StateFolder
from agent.tasks import RunFolder
from domain.protocol.machines import Pace
from mizzen.cadence.interval_file import MAX_INTERVAL_S, MIN_INTERVAL_S, SiteInterval, parse

_log = logging.getLogger(__name__)


def write_interval(run: RunFolder, interval: SiteInterval) -> None:
    """Replaces the interval of a task. The folder of the task must exist. The longest interval is `MAX_INTERVAL_S`.

    Raises:
        OSError: the file cannot be written, for example because the disk is full. The old file stays.
        ValueError: a value is out of the range that the SDK accepts. The old file stays.
    """
    clipped = {name: min(getattr(interval, name), MAX_INTERVAL_S) for name in ("interval_s", "least_s")}
    interval = interval._replace(**clipped)
    body = {name: value for name, value in interval._asdict().items() if value is not None}
    if parse(json.dumps(body).encode()) != interval:
        raise ValueError(f"{interval}: a value is out of the range that the SDK accepts")
    publish(str(run.interval_file), body)


def set_pace(state: StateFolder, pace: Pace) -> None:
    """Writes the intervals of a machine's tasks. Unknown runs and invalid values are ignored."""
    wanted = {one.run: one for one in pace.runs}
    for attempt in state.unfinished():
        one = wanted.get(attempt.key)
        if one is None:
            continue
        try:
            interval = SiteInterval(
                max(MIN_INTERVAL_S, one.interval_s), pace.expires_at_s, one.hazard_per_h, one.period_s, one.offset_s,
                one.least_s,
            )  # fmt: skip
            for run in attempt.runs():
                write_interval(run, interval)
        except (OSError, ValueError) as error:
            _log.warning("the interval of %s is not set: %s", attempt.key, error)
