"""Topology: which tasks of a job must be, or should be, on one machine or in one rack, cluster or zone."""

from dataclasses import dataclass

from domain.spread import SpreadLevel


@dataclass(frozen=True)
class TopologyRule:
    """Which tasks of a job stay together."""

    required: SpreadLevel | None = None
    """The level of which one place has all tasks; the job waits until a place has room."""
    preferred: SpreadLevel | None = None
    """The same, if a place has room without evicting more; otherwise, the tasks are placed as without it."""
    slice_tasks: int = 1
    """The number of tasks of a slice; it divides the job's tasks. Each slice is in one place of `slice_level`."""
    slice_level: SpreadLevel = SpreadLevel.MACHINE
    """`MACHINE` or `RACK`."""

    def tasks_by(self, level: SpreadLevel, tasks: int, *, prefers: bool = False) -> int:
        """Returns of how many tasks each place of a level, a machine or a rack, has a multiple.

        `tasks` is the number of the job's tasks. With `prefers`, the preferred level counts as required.
        """
        if level in (self.required, self.preferred if prefers else None):
            return tasks
        return self.slice_tasks if self.slice_level is level else 1


ANYWHERE = TopologyRule()
"""The rule of a job without `topology`."""
