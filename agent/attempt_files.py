"""Uploads of the agent to the region's bucket: the output of tasks and elements, and the outputs of a document."""

import contextlib
import logging
from collections.abc import Sequence
from functools import partial

from agent import tasks
from agent.lending.lender import Lender
from agent.logs import Shipping
from agent.output_storage import OutputStorage, is_stored
from agent.record_files import DamagedRecord
from agent.sealed import CannotUnseal
from agent.staged import StagedAttempt
from agent.staging import Stager
from agent.state import AttemptFolder
from agent.tasks import RunFolder, TaskState
from domain.task_reports import UnstoredOutput

_log = logging.getLogger(__name__)


class AttemptFiles:
    """Starts the shipping of logs and the storing of outputs for the tasks of attempts. All methods are idempotent."""

    def __init__(self, stager: Stager, shipping: Shipping, outputs: OutputStorage, lender: Lender) -> None:
        self._stager, self._shipping = stager, shipping
        self._outputs, self._lender = outputs, lender

    def ship_all(self, folder: AttemptFolder) -> None:
        """Ships the remaining output of an attempt, if it was staged on this machine."""
        try:
            staged = self._stager.load(folder)
        except (CannotUnseal, DamagedRecord) as error:  # Secrets cannot be masked, so the output may not leave.
            _log.error("output of %s is not shipped: %s", folder.key, error)
            return
        if staged is not None:
            self.ship(staged, folder.runs())
            self.ship_elements(staged)

    def ship(self, staged: StagedAttempt, runs: Sequence[RunFolder]) -> None:
        """Ships the output of tasks, and stores the outputs of those that have ended."""
        bucket = partial(self._stager.bucket, staged.folder)
        for run in runs:
            if tasks.inspect(run) is not TaskState.ABSENT:
                self._shipping.watch(run, bucket, staged.masker, staged.launch.logs)
            # The owner has taken the machine back, so its network must not be used for uploads.
            is_due = bool(staged.launch.outputs) and not self._lender.lending.is_whole
            if is_due and (end := run.exit()) is not None and end.started:
                self._outputs.watch(run, staged.launch.outputs, bucket, self._stager.launches.owner(staged))

    def ship_elements(self, staged: StagedAttempt) -> None:
        """Ships the output of a runner's elements, and then removes it from this machine."""
        bucket = partial(self._stager.bucket, staged.folder)
        for run in staged.folder.elements():
            with contextlib.suppress(ValueError):  # Its records are not synced: a crash of the machine can damage them.
                if tasks.inspect(run) is not TaskState.ABSENT:
                    self._shipping.watch(run, bucket, staged.masker, staged.launch.logs, removes=True)

    def unstored(self, staged: StagedAttempt, run: RunFolder) -> list[UnstoredOutput]:
        """Returns which outputs of a task were not stored, and why."""
        if self._lender.lending.is_whole and not is_stored(run) and run.started_at_s() is not None:
            return [UnstoredOutput(name, "the owner took the machine back") for name in staged.launch.outputs]
        return self._outputs.unstored(run)
