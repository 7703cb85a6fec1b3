"""The time limit for the launch of a gang on machines that owners lend, derived from the durations of other launches.

Such a machine can accept a launch, send heartbeats, and never start a task. Its gang then waits for the limit.
"""

from collections.abc import Sequence

LONGEST_S = 600.0
"""The limit of launches on machines that are not lent, and the largest one on those that are."""
LEAST_LAUNCHES = 3
"""Without so many recorded launches, the limit is `LONGEST_S`."""
_FACTOR = 5.0
_SLOWEST_SHARE = 0.1
"""The slowest tenth of the launches does not count: a single machine must not raise the limit for itself."""
_ARCHIVE_BYTES_S = 1e6
"""The bandwidth that a machine needs to fetch the working directory in time."""


def launch_limit_s(took_s: Sequence[float], least_s: float, archive_bytes: int = 0, timeouts: int = 0) -> float:
    """Returns the longest launch of an attempt on lent machines, in seconds.

    Args:
        took_s: what launches took on other machines.
        least_s: the smallest limit.
        archive_bytes: the size of the working directory that each machine must fetch.
        timeouts: the attempts of this workload that reached their limit. Each doubles the limit, so that even a
            slow launch on a slow machine succeeds eventually.
    """
    if len(took_s) < LEAST_LAUNCHES:
        return LONGEST_S
    slow_s = sorted(took_s)[int((1 - _SLOWEST_SHARE) * (len(took_s) - 1))]
    limit_s = max(least_s, _FACTOR * slow_s) + archive_bytes / _ARCHIVE_BYTES_S
    return min(LONGEST_S, limit_s * 2.0 ** min(timeouts, 10))


def is_only_launch(ran_s: float, *, timed_out: bool, reported: bool) -> bool:
    """Returns whether a gang that a machine refused had not run yet: its time then does not count as runtime.

    A machine can also refuse a gang that has run for days, for example because its agent has lost its key.

    Args:
        ran_s: the time since its start, in seconds.
        timed_out: whether the machine did not refuse, but reported no task until the limit of the launch.
        reported: whether a task has reported a step or has ended by itself.
    """
    return not reported and (timed_out or ran_s <= LONGEST_S)
