"""Names of the segments of a task's log in its region's bucket (`agent.logs` describes the format)."""

import re
from enum import StrEnum
from typing import NamedTuple

END = "end"
"""Name of the empty object that follows the last segment."""
_NAME = re.compile(r"([0-9]{20})-([0-9]{13})\.(log|out|err)")


class TaskOutput(StrEnum):
    """The content of a segment; the value is the suffix of its name."""

    BOTH = "log"
    STDOUT = "out"
    STDERR = "err"


class Segment(NamedTuple):
    """One segment."""

    offset: int
    """Offset of its first byte in the log."""
    at_ms: int
    """When its end was read from the task's output, in milliseconds since the epoch: no line in it is newer."""
    output: TaskOutput = TaskOutput.BOTH

    @property
    def name(self) -> str:
        """The name of its object."""
        return f"{self.offset:020d}-{self.at_ms:013d}.{self.output}"


def segment_of(name: str) -> Segment | None:
    """Returns the segment whose object has this name; None: it is no segment."""
    found = _NAME.fullmatch(name)
    return None if found is None else Segment(int(found[1]), int(found[2]), TaskOutput(found[3]))
