"""Whether this machine may start what it is asked to start, and what a failed launch means to the workflow."""

import contextlib
from collections.abc import Iterator, Sequence

from temporalio import activity
from temporalio.exceptions import ApplicationError

from agent.config import AgentConfig
from agent.failures import launch_failure, refusal
from agent.gpu_watch import GpuWatch
from agent.lending.lender import Lender
from agent.staged import StagedAttempt
from agent.state import AttemptFolder, StateFolder
from domain.blame import LaunchError
from domain.protocol.machines import PrepareNode, RunNode

_TRIES = 5
"""Number of tries to start an attempt's tasks on this machine before the gang is placed elsewhere."""


class StartChecks:
    """The checks before a start, on one machine. Each raises `ApplicationError` with a type of `LaunchError`."""

    def __init__(self, config: AgentConfig, state: StateFolder, lender: Lender, gpus: GpuWatch) -> None:
        self._config = config
        self._state = state
        self._lender = lender
        self._gpus = gpus

    def check_machine(self, machine: str) -> None:
        """Refuses requests to another machine, and all requests once the state folder is gone."""
        if machine != self._config.machine:
            raise refusal(LaunchError.WRONG_MACHINE, f"this is the agent of {self._config.machine}, not of {machine}")
        if not self._state.is_there():
            raise self.without_folder()

    def without_folder(self) -> ApplicationError:
        """Returns the error to raise once the machine's state folder is gone."""
        message = f"the state folder {self._state.path} was deleted or replaced while the agent ran"
        return refusal(LaunchError.MACHINE_FAULT, message, final=True)

    def refuse_stopped(self, workload_id: str, attempt: int) -> None:
        """Refuses an attempt that was stopped on this machine."""
        stopped = self._state.stopped_attempt(workload_id)
        if attempt <= stopped:
            self._state.attempt(workload_id, attempt).launch()  # Its damage is why it was stopped.
            message = f"attempt {attempt} of {workload_id}: attempt {stopped} was stopped on this machine"
            raise refusal(LaunchError.STOPPED_ATTEMPT, message)

    def refuse_taken(self, folder: AttemptFolder, slots: Sequence[int] = ()) -> None:
        """Refuses to start tasks if the owner has taken the machine back, or GPUs in `slots`, or if their memory is not
        free.

        Tasks that already run are not affected: they get the owner's notice.
        """
        if self._lender.refuses(slots) and not self._state.is_started(folder):
            what = "the machine" if self._lender.lending.is_whole else "GPUs of the machine"
            raise refusal(LaunchError.TAKEN_BACK, f"the owner of {self._config.machine} has taken {what} back")
        if self._gpus.unfreed & sum(1 << slot for slot in slots) and not self._state.is_started(folder):
            message = f"memory of GPUs of {self._config.machine} is not free: an earlier task still occupies it"
            raise refusal(LaunchError.MACHINE_FAULT, message)

    def refuse_weaker(self, staged: StagedAttempt) -> None:
        """Refuses to start tasks with less isolation than they require: the mode may have changed since placement."""
        own, required = self._config.isolation, staged.launch.isolation
        if own.rank < required.rank and not self._state.is_started(staged.folder):
            message = (
                f"isolation {own} of {self._config.machine} is weaker than {required}, which the workload requires"
            )
            raise refusal(LaunchError.MACHINE_FAULT, message, final=True)

    @contextlib.contextmanager
    def judging(self, request: PrepareNode | RunNode) -> Iterator[None]:
        """Converts exceptions to launch errors (`domain.blame`).

        A temporary error is retried on this machine. If no task has started after `_TRIES` tries, the error becomes
        final, so that the gang is placed on other machines.
        """
        try:
            yield
        except Exception as error:
            folder = self._state.attempt(request.workload_id, request.attempt)
            final = activity.info().attempt >= _TRIES and not self._state.is_started(folder)
            raise launch_failure(error, final=final) from None
