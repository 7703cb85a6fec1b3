"""An agent that serves until its allocation ends (`mizzen agent --once`): the batch script of a pilot job, or a pod.

A signal of the platform is its notice, also while the control plane is away. The agent then ends its tasks, waits until
their output is stored, and exits.
"""

import asyncio
import logging
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import replace

from agent.config import AgentConfig
from agent.lending.task_stop import Stopping
from agent.locks import StartLocks
from agent.logs import shipped
from agent.notices import MachineNotices
from agent.state import AttemptFolder, StateFolder
from domain import agent_exits
from mizzen.notices import Kind, MetadataError, Notice, SlurmWatcher
from mizzen.notices.notice import number
from mizzen.notices.slurm import PERIOD_S

_TOLD_S = 3.0
"""If a task got no notice from the control plane within this time, the agent gives it one."""
_PARTING_S = 15.0
"""How long the agent runs after the end of all tasks, for requests of the control plane and unstored output."""
_LEAST_PARTING_S = 3.0
_UNKNOWN_S = 30.0
"""The assumed time until the end, if the platform does not announce it."""
_POLL_S = 0.25
_ASK_S = 5.0
_MOVED_S = 30.0
"""If the end of a job comes forward by more than this, Slurm preempts the job."""
_log = logging.getLogger(__name__)


class PilotWatcher(SlurmWatcher):
    """Reads the end time of the job from Slurm's controller: at the start, at a signal, and again near the end.

    Slurm before 23.11 does not give the end time to the job, and no version reports a changed end time.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        super().__init__(environ)
        self.period_s = PERIOD_S
        if self._asked is not None:
            self.lead_s = self._asked[1]
        self._environ = {**environ, "SLURM_TIME_FORMAT": "%s"}
        self._job = environ.get("SLURM_JOB_ID", "")

    def poll(self) -> Notice | None:
        """Return the notice of the time limit, `lead_s` before the end that the controller names now.

        Raises:
            MetadataError: the controller does not answer.
        """
        if self.ends_at_s is None or self._clock() >= self.ends_at_s - self.lead_s:
            self.ends_at_s = self._end()[0] or self.ends_at_s
        return super().poll()

    def exact(self, notice: Notice) -> Notice | None:
        """Return the notice of a signal with the end that the controller names; unchanged if it does not answer.

        A preemption brings the end forward. Otherwise the signal of `--signal` may come a minute early, and is a hint.
        """
        try:
            ends_at_s, state = self._end()
        except MetadataError as error:
            _log.warning("%s", error)
            return notice
        words = f"{notice.words}; the job is {state}"
        now_s, before_s = self._clock(), self.ends_at_s
        if state != "RUNNING" or ends_at_s is None or ends_at_s <= now_s:
            return replace(notice, words=words)
        if before_s is not None and ends_at_s < before_s - _MOVED_S:
            return replace(
                notice, kind=Kind.PREEMPT, words=f"{words}, its end was brought forward", ends_at_s=ends_at_s
            )
        self.ends_at_s = ends_at_s
        if notice.kind is not Kind.WALLTIME:
            given = [at_s for at_s in (ends_at_s, notice.ends_at_s) if at_s is not None]
            return replace(notice, words=words, ends_at_s=min(given))
        return replace(notice, words=words, ends_at_s=ends_at_s, certain=now_s >= ends_at_s - self.lead_s)

    def _end(self) -> tuple[float | None, str]:
        """Returns when the job ends, in seconds since the epoch (None: unknown), and its state."""
        command = ["squeue", "--noheader", f"--jobs={self._job}", "--format=%e|%T"]
        try:
            done = subprocess.run(
                command, env=self._environ, capture_output=True, text=True, timeout=_ASK_S, check=True
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise MetadataError(f"the controller does not say when job {self._job} ends: {error}") from None
        end, _, state = done.stdout.strip().partition("|")
        return number(end), state or "unknown"


def machine_notices(config: AgentConfig, environ: Mapping[str, str]) -> MachineNotices:
    """Returns the notices of a machine. Only the agent of a pilot asks Slurm's controller.

    Raises:
        ValueError: a `MIZZEN_` variable has an invalid value.
    """
    watcher = PilotWatcher(environ) if config.once and config.platform == "slurm" else None
    return MachineNotices(config.platform, environ, watcher)


class Pilot:
    """Ends an agent that serves only until its allocation ends."""

    def __init__(self, config: AgentConfig, state: StateFolder, notices: MachineNotices, locks: StartLocks) -> None:
        self._config, self._state, self._notices = config, state, notices
        self._stopping = Stopping(config, state, locks)
        self._signals: set[asyncio.Task[None]] = set()
        self.status = agent_exits.STOPPED
        """The exit status of the agent."""

    def listen(self) -> None:
        """Treats SIGTERM and the platform's other signals as its notice: tasks may save before the agent stops."""
        loop = asyncio.get_running_loop()
        for received in {signal.SIGTERM, *self._notices.signals}:
            loop.add_signal_handler(received, self._hear, received)

    def _hear(self, received: int) -> None:
        hearing = asyncio.create_task(self._notices.signalled(received))
        self._signals.add(hearing)
        hearing.add_done_callback(self._signals.discard)

    async def run(self, stop: asyncio.Event) -> None:
        """Sets `stop` once there was a notice, all tasks have ended, and their output is stored."""
        while self._notices.current is None:
            await asyncio.sleep(_POLL_S)
        began_s = time.monotonic()
        while held := [one.folder for one in await asyncio.to_thread(self._stopping.held)]:
            if time.monotonic() - began_s > _TOLD_S:
                await self._tell(held)
                await self._stopping.remaining(held)
            await asyncio.sleep(_POLL_S)
        ended_s = time.monotonic()
        await asyncio.sleep(_LEAST_PARTING_S)
        while not (stored := await asyncio.to_thread(self._is_stored)) and time.monotonic() - ended_s < _PARTING_S:
            await asyncio.sleep(_POLL_S)
        self.status = agent_exits.NOTICED if stored else agent_exits.UNSTORED
        _log.info("%s: no task runs after the notice; the agent ends", self._config.machine)
        stop.set()

    async def _tell(self, held: list[AttemptFolder]) -> None:
        """Gives notice to the tasks that have none."""
        current = self._notices.current
        ends_at_s = None if current is None else current.ends_at_s
        now_s = time.time()
        at_s = now_s + _UNKNOWN_S if ends_at_s is None else ends_at_s
        left_s = max(0.0, at_s - now_s)
        untold = [
            (folder, self._stopping.grace_s(folder, left_s))
            for folder in held
            if all(run.stop() is None for run in folder.runs())
            and self._stopping.stop_at_s(folder, now_s, at_s) <= now_s
        ]
        await self._stopping.notify(untold)

    def _is_stored(self) -> bool:
        return all(shipped(run) for attempt in self._state.attempts() for run in attempt.runs())
