"""Restarts of a single task without its gang: how often the shim restarts the command after a failure, by exit status.

Like `agent.shim`, this uses only the standard library.
"""

from collections import Counter
from collections.abc import Mapping

OTHER = "other"
"""The key of the limit for all exit statuses without a separate limit."""
PAUSE_S = 1.0
"""The time between a failure and the next start."""


class Restarts:
    """The restarts of one task in one attempt."""

    def __init__(self, limits: Mapping[str, int | None]) -> None:
        """`limits`: exit status, as a shell has it, or `other`, to a number of restarts; None: without limit."""
        self._limits = limits
        self._used: Counter[str] = Counter()

    def _key(self, code: int) -> str:
        status = str(code if code >= 0 else 128 - code)
        return status if status in self._limits else OTHER

    def used(self, code: int) -> int:
        """Returns the restarts so far that count towards the limit of an exit code (negative for a signal)."""
        return self._used[self._key(code)]

    def next(self, code: int) -> str | None:
        """Counts a restart after a failure and returns a log line; None: no restart is left, or it is not a failure."""
        key = self._key(code)
        limit = self._limits.get(key, 0)
        if code == 0 or (limit is not None and self._used[key] >= limit):
            return None
        self._used[key] += 1
        ended = f"exit code {code}" if code > 0 else f"signal {-code}"
        number = f"{self._used[key]}" if limit is None else f"{self._used[key]} of {limit}"
        return f"mizzen: the task ended with {ended} and is started again: restart {number}\n"
