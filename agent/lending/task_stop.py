"""Stops the tasks whose resources the owner of the machine takes, whatever else fails.

A task is normally told through its shim, which keeps the deadline. If the request cannot be recorded, for example on a
broken disk, its shim is signalled, and the agent kills the task itself. A failure with one task never prevents the stop
of the others.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from signal import SIGTERM

from agent import sandbox, tasks
from agent.config import AgentConfig
from agent.locks import StartLocks
from agent.processes import with_run_ids
from agent.state import AttemptFolder, StateFolder
from agent.tasks import NotStarted, RunFolder, TaskState
from domain.launch import LaunchDescription

_LOCK_S = 2.0
"""The longest wait for a workload's start that is under way. If it takes longer, only its running tasks are told now,
and the others when the notice ends."""
_CLEAN_S = 30.0
"""The longest wait for the removal of the files that ended tasks have left."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Held:
    """An attempt with tasks on this machine that have not ended."""

    folder: AttemptFolder
    slots: frozenset[int]
    """The GPU slots that its tasks hold here."""


class Stopping:
    """The attempts on this machine, and the ways to end them."""

    def __init__(self, config: AgentConfig, state: StateFolder, locks: StartLocks) -> None:
        self._config, self._state, self._locks = config, state, locks

    def held(self) -> list[Held]:
        """Returns the attempts that have tasks running here."""
        found = []
        for folder in self._state.unfinished():
            if any(_is_there(run) for run in folder.runs()):
                found.append(Held(folder, self.slots(folder)))
        return found

    def unfinished(self) -> list[Held]:
        """Returns the attempts that have tasks running here, or still to be started."""
        return [Held(folder, self.slots(folder)) for folder in self._state.unfinished()]

    def slots(self, folder: AttemptFolder) -> frozenset[int]:
        """Returns the GPU slots that an attempt's tasks hold here; none if its launch is not known or unreadable."""
        try:
            launch = folder.launch()
        except (OSError, ValueError) as error:
            _log.warning("the launch of %s cannot be read: %s", folder.key, error)
            return frozenset()
        places = () if launch is None else launch.on_machine(self._config.machine)
        return frozenset(slot for place in places for slot in place.slots)

    def grace_s(self, folder: AttemptFolder, left_s: float) -> float:
        """Returns the time that an attempt's tasks get to save: what its workload asks for, at most `left_s`."""
        launch = _readable(folder)
        return left_s if launch is None else min(left_s, launch.checkpoint.grace_s)

    def stop_at_s(self, folder: AttemptFolder, now_s: float, at_s: float) -> float:
        """Returns when to notify an attempt's tasks if they must have ended by `at_s`, in seconds since the epoch.

        Tasks that serve are notified late, so that their streams can end; all others at once, which is 0.
        """
        launch = _readable(folder)
        return 0.0 if launch is None or launch.serving is None else launch.serving.stop_at_s(now_s, at_s)

    async def notify(self, folders: Iterable[tuple[AttemptFolder, float]]) -> None:
        """Tells the tasks of attempts to stop, each within its grace in seconds, all at the same time.

        Tasks that were not started can never be started afterwards.
        """
        await asyncio.gather(*(self._notify(folder, grace_s) for folder, grace_s in folders))

    async def remaining(self, folders: Sequence[AttemptFolder]) -> list[RunFolder]:
        """Returns the tasks of attempts that run. Ends lost tasks, and kills those whose deadline has passed."""
        return [run for folder in folders for run in folder.runs() if await asyncio.to_thread(_runs, run)]

    async def clean(self) -> None:
        """Waits until the private `/tmp` and others of attempts without running tasks are removed, within `_CLEAN_S`.

        The owner gets the machine without files of tasks.
        """
        give_up_s = time.monotonic() + _CLEAN_S
        while not await asyncio.to_thread(self._is_clean):
            if time.monotonic() > give_up_s:
                _log.warning("%s: files of tasks are still being removed", self._config.machine)
                return
            await asyncio.sleep(0.05)

    def _is_clean(self) -> bool:
        ended = [one for one in self._state.attempts() if not any(_is_there(run) for run in one.runs())]
        left = [folder for folder in ended if not sandbox.clear(str(folder.private))]
        return not left

    async def _notify(self, folder: AttemptFolder, grace_s: float) -> None:
        lock = self._locks.of(folder.workload_id)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LOCK_S), lock:
                await asyncio.gather(*(asyncio.to_thread(_notify, run, grace_s) for run in self._planned(folder)))
                return
        runs = [run for run in folder.runs() if tasks.inspect(run) is TaskState.RUNNING]
        await asyncio.gather(*(asyncio.to_thread(_notify, run, grace_s) for run in runs))

    def _planned(self, folder: AttemptFolder) -> list[RunFolder]:
        """Returns the folders of all tasks of an attempt on this machine, including tasks that have not started."""
        launch = _readable(folder)
        if launch is None:
            return folder.runs()
        planned = {(place.job, place.task) for place in launch.on_machine(self._config.machine)}
        planned |= {(run.job, run.task) for run in folder.runs()}
        return [folder.run(job, task) for job, task in sorted(planned)]


def _readable(folder: AttemptFolder) -> LaunchDescription | None:
    try:
        return folder.launch()
    except (OSError, ValueError):
        return None


def _is_there(run: RunFolder) -> bool:
    """Returns whether processes of a task run. A lost task may have left some, or only an end without a record."""
    state = tasks.inspect(run)
    return state is TaskState.RUNNING or (state is TaskState.LOST and bool(with_run_ids({run.run_id})))


def _notify(run: RunFolder, grace_s: float) -> None:
    try:
        tasks.request_stop(run, grace_s, told=False, owner=True)
        return
    except (OSError, NotStarted) as error:
        _log.error("task %s: the request to stop it cannot be recorded: %s", run.run_id, error)
    if grace_s <= 0:
        _kill(run)
        return
    with contextlib.suppress(OSError):  # Without a record, the agent keeps the deadline itself.
        if (identities := run.identities()) is not None:
            identities[0].send(SIGTERM)  # The shim decides which processes get it.


def _runs(run: RunFolder) -> bool:
    state = tasks.inspect(run)
    if state is TaskState.RUNNING and tasks.overdue(run):
        _kill(run)
        state = tasks.inspect(run)
    if state is TaskState.LOST:
        # This kills what is left of the task before it writes the record.
        with contextlib.suppress(OSError):
            tasks.end_lost(run)
        return False
    return state is TaskState.RUNNING


def _kill(run: RunFolder) -> None:
    """Kills a task's shim and all its processes, even if the record of its end cannot be written."""
    try:
        tasks.force(run)
    except OSError as error:
        _log.error("task %s was killed, but its end cannot be recorded: %s", run.run_id, error)
