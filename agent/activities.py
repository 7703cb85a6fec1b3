"""The agent's activities: preparing, running and stopping this machine's share of an attempt, and attending.

All that is decided here can be decided again by another agent process from the folders alone. So an activity whose
Temporal side ends for any reason lets go of the tasks (they go on), and its retry takes hold of them again.
"""

import asyncio
import contextlib
import logging
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

from temporalio import activity
from temporalio.exceptions import ApplicationError, ApplicationErrorCategory

from agent import tasks
from agent.config import AgentConfig
from agent.failures import is_disk_full, launch_failure, refusal
from agent.logs import Shipping
from agent.notices import MachineNotices
from agent.outcomes import kept_outcome, outcome
from agent.ports import reserve
from agent.progress import NoticeReader, read_progress
from agent.sealed import CannotUnseal, prove
from agent.staging import StagedAttempt, Stager
from agent.state import AttemptFolder, StateFolder
from agent.tasks import RunFolder, State
from domain.blame import LaunchError
from domain.protocol import (
    DETACHED,
    Activity,
    Attend,
    NodeHeartbeat,
    NodeOutcome,
    NodePrepared,
    PrepareNode,
    ProveKey,
    RunNode,
    StopNode,
)
from infra.pidfds import first_end

_log = logging.getLogger(__name__)
_LATE_S = 7.5
_UNTIMED_S = 30.0
_TRIES = 5
"""How often a machine tries to start an attempt's tasks before the gang is placed anew."""


class NodeActivities:
    """The activities of one machine."""

    def __init__(
        self, config: AgentConfig, state: StateFolder, stager: Stager, shipping: Shipping, notices: MachineNotices
    ) -> None:
        self._config = config
        self._notices = notices
        self._state = state
        self._stager = stager
        self._shipping = shipping
        self._starting: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        self.attending = 0
        """How many `machine.attend` run: none, and the machine is not known to be alive."""
        self.let_go = asyncio.Event()
        """Set when a `machine.attend` ends; whoever waits for it clears it."""

    def all(self) -> Sequence[Callable[..., Awaitable[Any]]]:
        """What the worker registers."""
        return [self.prepare, self.run, self.stop, self.attend, self.prove_key]

    @activity.defn(name=Activity.PREPARE_NODE.value)
    async def prepare(self, request: PrepareNode) -> NodePrepared:
        """Fetch the launch description, make the tasks' folders, reserve a port for each job led from here."""
        self._check_machine(request.machine)
        with _detaching(), self._judging(request):
            async with self._heartbeats():
                _, ports = await self._stage(request)
                self._refuse_stopped(request.workload_id, request.attempt)
        return NodePrepared(self._config.machine, self._config.address, ports)

    @activity.defn(name=Activity.RUN_NODE.value)
    async def run(self, request: RunNode) -> NodeOutcome:
        """Start this machine's tasks, or find those that were started, and stay with them to their end."""
        self._check_machine(request.machine)
        with _detaching():
            with self._judging(request):
                async with self._heartbeats():
                    staged, masters = await self._prepared(request)
                    async with self._lock(request.workload_id):
                        self._refuse_stopped(request.workload_id, request.attempt)
                        await self._start(staged, masters)
            try:
                await self._watch(staged)
            finally:
                self._notices.over(staged.folder.key)
            return await asyncio.to_thread(self._outcome, staged)

    @activity.defn(name=Activity.STOP_NODE.value)
    async def stop(self, request: StopNode) -> NodeOutcome:
        """Refuse the attempt from now on, give its tasks notice and `grace_s`, and return when nothing of them runs."""
        with _detaching():
            async with self._heartbeats():
                await self._end(request.workload_id, request.attempt, request.grace_s)
            return await asyncio.to_thread(self._stopped_outcome, request)

    @activity.defn(name=Activity.ATTEND.value)
    async def attend(self, request: Attend) -> None:
        """Stop what does not belong here any more, then heartbeat `ready` for as long as the agent lives."""
        self._check_machine(request.machine)
        if request.incarnation != self._state.incarnation():
            message = f"machine {request.machine} has been off since {request.incarnation}"
            raise ApplicationError(message, type="OtherIncarnation", non_retryable=True)
        with _detaching():
            self.attending += 1
            try:
                async with self._heartbeats():
                    stale = [key.rpartition(".") for key in request.stop]
                    await asyncio.gather(*(self._end(workload, int(number), 0.0) for workload, _, number in stale))
                pause_s = self._attend_pause_s()
                while True:
                    activity.heartbeat("ready")
                    await asyncio.sleep(pause_s)
            finally:
                self.attending -= 1
                self.let_go.set()

    @activity.defn(name=Activity.PROVE_KEY.value)
    async def prove_key(self, request: ProveKey) -> str:
        """Show that this machine holds the key that it is known with, after it has got another."""
        self._check_machine(request.machine)
        try:
            return prove(request.machine, self._state.private_keys(), request.challenge)
        except CannotUnseal as error:
            raise ApplicationError(str(error), type="CannotProve", non_retryable=True) from None

    def resume(self) -> None:
        """Ship what an earlier agent of this machine left unshipped. Needs a running event loop."""
        for folder in self._state.attempts():
            self._ship_all(folder)

    # ------------------------------------------------------------------------------------------------- what may run

    def _check_machine(self, machine: str) -> None:
        if machine != self._config.machine:
            raise refusal(LaunchError.WRONG_MACHINE, f"this is the agent of {self._config.machine}, not of {machine}")

    def _refuse_stopped(self, workload_id: str, attempt: int) -> None:
        stopped = self._state.stopped_attempt(workload_id)
        if attempt <= stopped:
            message = f"attempt {attempt} of {workload_id}: attempt {stopped} was stopped here"
            raise refusal(LaunchError.STOPPED_ATTEMPT, message)

    @contextlib.contextmanager
    def _judging(self, request: PrepareNode | RunNode) -> Iterator[None]:
        """Raises what goes wrong as a type of the closed list of launch errors (`domain.blame`).

        An error that may pass is tried again here, but not for ever while no task has started: another machine may do.
        """
        try:
            yield
        except Exception as error:
            folder = self._state.attempt(request.workload_id, request.attempt)
            final = activity.info().attempt >= _TRIES and not self._state.is_started(folder)
            raise launch_failure(error, final=final) from None

    async def _end_older(self, workload_id: str, attempt: int) -> None:
        """Whoever asks for an attempt has given up all older ones: what still runs of them is a zombie."""
        if attempt > 1:
            await self._end(workload_id, attempt - 1, 0.0)

    def _lock(self, workload_id: str) -> asyncio.Lock:
        return self._starting.setdefault(workload_id, asyncio.Lock())

    # ------------------------------------------------------------------------------------------------------ staging

    async def _stage(self, request: PrepareNode | RunNode) -> tuple[StagedAttempt, dict[str, int]]:
        """The attempt in its folder, and the ports of the jobs that are led from here.

        Refuses an attempt that was stopped, and ends older ones first.
        """
        self._refuse_stopped(request.workload_id, request.attempt)
        await self._end_older(request.workload_id, request.attempt)

        def stage() -> tuple[StagedAttempt, dict[str, int]]:
            staged = self._stager.stage(
                request.workload_id,
                request.attempt,
                request.launch_key,
                request.bucket_url,
                request.launch_sha256,
            )
            return staged, {} if request.leads_jobs is None else self._reserve(staged, request.leads_jobs)

        return await asyncio.to_thread(stage)

    async def _prepared(self, request: RunNode) -> tuple[StagedAttempt, dict[str, str]]:
        """The attempt in its folder, and where its jobs meet."""
        staged, ports = await self._stage(request)
        if request.leads_jobs is None:
            return staged, request.masters
        return staged, {job: f"{self._config.address}:{port}" for job, port in ports.items()}

    def _reserve(self, staged: StagedAttempt, jobs: list[str]) -> dict[str, int]:
        others = (attempt for attempt in self._state.unfinished() if attempt.key != staged.folder.key)
        return reserve(staged.folder, jobs, self._config.ports, others)

    # ------------------------------------------------------------------------------------------------------ running

    async def _start(self, staged: StagedAttempt, masters: dict[str, str]) -> None:
        def start(run: RunFolder, index: int) -> None:
            if tasks.look(run) is State.ABSENT:
                tasks.start(run, self._stager.task_launch(staged, staged.places[index], masters))

        await asyncio.gather(*(asyncio.to_thread(start, run, index) for index, run in enumerate(staged.runs)))
        self._ship(staged, staged.runs)

    async def _watch(self, staged: StagedAttempt) -> None:
        """Until nothing runs: stop all when one failed, or when the platform takes the machine.

        The tasks get that notice from here, at once: some platforms leave five seconds, and Temporal may be away.
        """
        runs = staged.runs
        readers = [NoticeReader(run, staged.masker) for run in runs]
        grace_s = staged.launch.checkpoint.grace_s
        pause_s = self._pause_s(self._config.heartbeat_interval_s)
        # Not at once, nor at the end: each one costs the Temporal server a write, and a short task needs none.
        next_heartbeat_s = time.monotonic() + pause_s
        noticed = False
        while True:
            running = await self._running(runs)
            if not running:
                return
            now_s = time.monotonic()
            if now_s >= next_heartbeat_s:
                activity.heartbeat(NodeHeartbeat([read_progress(run, staged.masker) for run in runs], len(running)))
                next_heartbeat_s = now_s + pause_s
            for told in filter(None, (reader.read() for reader in readers)):
                if told.takes_machine:
                    self._notices.of_run(staged.folder.key, told)
            leaving = self._notices.current
            if not noticed and leaving is not None:
                noticed = True
                left_s = grace_s if leaving.ends_at_s is None else max(0.0, leaving.ends_at_s - time.time())
                await self._notify(running, min(grace_s, left_s), told=False)
            if not noticed:
                ends = [run.exit() for run in runs] if len(running) < len(runs) else []
                if any(end.started and not end.succeeded for end in ends if end is not None):
                    noticed = True
                    await self._notify(running, grace_s, told=False)
            await self._next_look(running)

    async def _next_look(self, running: Sequence[RunFolder]) -> None:
        """Until one of `running` has ended, or it is time to look at what they report."""
        shims = [identities[0].pid for run in running if (identities := run.identities()) is not None]
        await first_end(shims, self._config.poll_interval_s)

    async def _running(self, runs: Sequence[RunFolder]) -> list[RunFolder]:
        """Those of `runs` that run. Lost ones are settled first, and overdue ones ended by force."""
        running = []
        for run in runs:
            state = tasks.look(run)
            if state is State.LOST:
                await asyncio.to_thread(tasks.settle, run)
            elif state is State.RUNNING and tasks.overdue(run):
                await asyncio.to_thread(tasks.force, run)
            elif state is State.RUNNING:
                running.append(run)
        return running

    # ----------------------------------------------------------------------------------------------------- stopping

    async def _end(self, workload_id: str, attempt: int, grace_s: float) -> None:
        """Stop a workload's attempts up to `attempt`, for good.

        Where the disk is full their tasks are stopped all the same; the refusal is on the disk when this returns.
        """
        try:
            await asyncio.to_thread(self._state.stop_attempts, workload_id, attempt)
        except OSError as error:
            if not is_disk_full(error):
                raise
        folders = [a for a in self._state.attempts() if a.workload_id == workload_id and a.attempt <= attempt]
        runs = [run for folder in folders for run in folder.runs()]
        # Whoever is starting tasks right now looks at the stopped attempt under the same lock.
        async with self._lock(workload_id):
            await self._notify(runs, grace_s, told=True)
        while running := await self._running(runs):
            await self._next_look(running)
        for folder in folders:
            self._ship_all(folder)
        await asyncio.to_thread(self._state.stop_attempts, workload_id, attempt)

    async def _notify(self, runs: Sequence[RunFolder], grace_s: float, *, told: bool) -> None:
        def notify(run: RunFolder) -> None:
            tasks.request_stop(run, grace_s, told=told)

        await asyncio.gather(*(asyncio.to_thread(notify, run) for run in runs))

    # ------------------------------------------------------------------------------------------------------ results

    def _outcome(self, staged: StagedAttempt) -> NodeOutcome:
        """How it ended, from the folders alone. Exits in the order in which tasks ended: the first failure first."""
        found = outcome(self._config.machine, staged.runs, staged.masker)
        return replace(found, notice=self._notices.current or found.notice)

    def _stopped_outcome(self, request: StopNode) -> NodeOutcome:
        """`stopped` only if the stop ended something: tasks that had all ended by themselves count by how they did."""
        folder = self._state.attempt(request.workload_id, request.attempt)
        try:
            staged = self._stager.load(folder)
        except CannotUnseal:
            staged = None  # Its tasks were started with another key, before this folder lost it.
        if staged is not None:
            return self._outcome(staged)
        kept = kept_outcome(self._state, folder.key)
        return NodeOutcome(self._config.machine, [], [], stopped=True) if kept is None else kept

    def _ship_all(self, folder: AttemptFolder) -> None:
        try:
            staged = self._stager.load(folder)
        except CannotUnseal as error:  # Then nothing can be masked, so nothing may leave the machine.
            _log.error("output of %s stays here: %s", folder.key, error)
            return
        if staged is not None:
            self._ship(staged, folder.runs())

    def _ship(self, staged: StagedAttempt, runs: Sequence[RunFolder]) -> None:
        bucket = partial(self._stager.bucket, staged.folder)
        for run in runs:
            if tasks.look(run) is not State.ABSENT:
                self._shipping.watch(run, bucket, staged.masker, staged.launch.logs)

    # -------------------------------------------------------------------------------------------------------- beats

    def _attend_pause_s(self) -> float:
        """Between two signs: one may be late by `_LATE_S`, or by three quarters of a short timeout.

        One that is later still costs another attempt of the activity, and not the machine.
        """
        timeout = activity.info().heartbeat_timeout
        timeout_s = _UNTIMED_S if timeout is None else timeout.total_seconds()
        seldom_s = max(timeout_s / 4, timeout_s - _LATE_S)
        return min(seldom_s, self._config.attend_interval_s or seldom_s)

    def _pause_s(self, interval_s: float) -> float:
        timeout = activity.info().heartbeat_timeout
        return interval_s if timeout is None else min(interval_s, timeout.total_seconds() / 4)

    @contextlib.asynccontextmanager
    async def _heartbeats(self) -> AsyncIterator[None]:
        """Heartbeat while the body works, for the first time a while after it began."""
        pause_s = self._pause_s(self._config.heartbeat_interval_s)

        async def beat() -> None:
            while True:
                await asyncio.sleep(pause_s)
                activity.heartbeat()

        beating = asyncio.create_task(beat())
        try:
            yield
        finally:
            beating.cancel()


@contextlib.contextmanager
def _detaching() -> Iterator[None]:
    """Let go of the tasks where the activity is cancelled.

    Only a cancellation that a workflow asked for is passed on. The others (a stopping agent, a missed heartbeat) are
    failures that a retry makes good; the SDK would report a stopping worker's as a cancellation, which ends the
    activity.
    """
    try:
        yield
    except asyncio.CancelledError:
        details = activity.cancellation_details()
        if details is not None and details.cancel_requested:
            raise
        raise ApplicationError(
            "the agent let go of the tasks, which go on",
            type=DETACHED,
            next_retry_delay=timedelta(seconds=1),
            category=ApplicationErrorCategory.BENIGN,
        ) from None
