"""An attempt whose files are on this machine."""

from dataclasses import dataclass
from functools import cached_property

from agent.sealed import Secrets
from agent.secret_masks import Masker
from agent.state import AttemptFolder
from agent.tasks import RunFolder
from domain.launch import LaunchDescription, TaskPlace


class BadLaunch(Exception):
    """The launch description is invalid, or belongs to another attempt."""


@dataclass(frozen=True)
class StagedAttempt:
    """An attempt whose files are all on this machine."""

    folder: AttemptFolder
    launch: LaunchDescription
    places: tuple[TaskPlace, ...]
    """The tasks of the attempt that are placed on this machine."""
    secrets: Secrets
    masker: Masker

    def run(self, place: TaskPlace) -> RunFolder:
        """Returns the folder of one task of this attempt."""
        return self.folder.run(place.job, place.task)

    @cached_property
    def runs(self) -> list[RunFolder]:
        """The folders of the attempt's tasks on this machine."""
        return [self.run(place) for place in self.places]

    @property
    def serving_run(self) -> RunFolder | None:
        """The folder of the task that serves requests, task 0 of the first job; None: no task on this machine does."""
        if self.launch.serving is None:
            return None
        job = next(iter(self.launch.jobs))
        return next((self.run(place) for place in self.places if (place.job, place.task) == (job, 0)), None)
