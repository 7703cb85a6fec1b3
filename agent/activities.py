"""The agent's Temporal activities: prepare, run and stop an attempt's tasks on this machine, and report its liveness.

All state that the activities need is in the machine's folders. So if an activity ends for any reason, its tasks
continue, and a retry, even in another agent process, re-attaches to them.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from temporalio import activity
from temporalio.exceptions import ApplicationError

from agent import tasks
from agent.attempt_files import AttemptFiles
from agent.bundled_runs import run_bundle
from agent.config import AgentConfig
from agent.disk import DiskPool, DiskWatch, reserve_report
from agent.element_chunks import ElementChunk, cancel, known_results
from agent.element_runs import run_chunk
from agent.failures import is_disk_full
from agent.gpu_watch import GpuWatch
from agent.heartbeats import attend_pause_s, detaching, heartbeats, pause_s
from agent.intervals import set_pace
from agent.lending.lender import Lender
from agent.locks import StartLocks
from agent.logs import Shipping
from agent.notices import MachineNotices
from agent.outcomes import kept_outcome, left_by, outcome
from agent.output_storage import OutputStorage
from agent.ports import SERVING
from agent.record_files import DamagedRecord
from agent.sealed import CannotUnseal, prove
from agent.staged import BadLaunch, StagedAttempt
from agent.staging import Stager
from agent.start_checks import StartChecks
from agent.state import StateFolder
from agent.task_progress import read_progress
from agent.task_readiness import Readiness
from agent.task_watch import TaskWatch, next_look, notify, still_running
from agent.tasks import NotStarted, RunFolder, TaskState
from domain.protocol.activities import Activity
from domain.protocol.bundles import BundleRun, RunBundle
from domain.protocol.leases import CancelElements, ElementsRun, RunElements
from domain.protocol.machines import (
    Attend,
    NodeHeartbeat,
    NodeOutcome,
    NodePrepared,
    Pace,
    PrepareNode,
    ProveKey,
    RunNode,
    StopNode,
)

if TYPE_CHECKING:
    from agent.network.uplink import Uplink

_log = logging.getLogger(__name__)


class NodeActivities:
    """The activities of one machine."""

    def __init__(
        self,
        config: AgentConfig,
        state: StateFolder,
        stager: Stager,
        shipping: Shipping,
        notices: MachineNotices,
        lender: Lender,
        locks: StartLocks,
        gpus: GpuWatch,
        *,
        outputs: OutputStorage,
        uplink: "Uplink | None" = None,
    ) -> None:
        self._config = config
        self._outputs = outputs
        self._uplink = uplink
        self._lender = lender
        self._notices = notices
        self._state = state
        self._disk = DiskPool(config, state)
        self._stager = stager
        self._memory = stager.launches.memory
        self._checks = StartChecks(config, state, lender, gpus)
        self._files = AttemptFiles(stager, shipping, outputs, lender)
        self._beat_s = config.heartbeat_interval_s
        self._locks = locks
        self._gpus = gpus
        self.attending = 0
        """Number of `machine.attend` activities that run. If it is 0, the control plane cannot see that the machine is
        alive."""
        self.let_go = asyncio.Event()
        """Set when a `machine.attend` activity ends. The waiting task must clear it."""
        self.gone = asyncio.Event()
        """Set when the state folder is gone: the machine then counts as lost at once."""

    def all(self) -> Sequence[Callable[..., Awaitable[Any]]]:
        """Returns the activities that the worker registers."""
        return [
            self.prepare, self.run, self.stop, self.attend, self.pace, self.prove_key, self.run_elements,
            self.cancel_elements, self.run_bundle,
        ]  # fmt: skip

    @activity.defn(name=Activity.PREPARE_NODE.value)
    async def prepare(self, request: PrepareNode) -> NodePrepared:
        """Fetches the launch description, makes the tasks' folders and reserves rendezvous ports.

        Reserves a port for each job whose task 0 is on this machine. Ends older attempts of the workload first.
        """
        self._checks.check_machine(request.machine)
        with detaching(), self._checks.judging(request):
            async with heartbeats(self._beat_s, self._preparing(request)):
                if request.only_images:
                    await asyncio.to_thread(self._stager.fetch_images, request)
                    return NodePrepared(self._config.machine, self._config.address, {})
                _, ports = await self._stage(request)
                self._checks.refuse_stopped(request.workload_id, request.attempt)
        return NodePrepared(self._config.machine, self._config.address, ports)

    @activity.defn(name=Activity.RUN_NODE.value)
    async def run(self, request: RunNode) -> NodeOutcome:
        """Starts the attempt's tasks on this machine, or re-attaches to started ones, and waits until they end."""
        with detaching():
            return await self._until_ended(*await self._begin(request))

    @activity.defn(name=Activity.RUN_BUNDLE.value)
    async def run_bundle(self, request: RunBundle) -> BundleRun:
        """Like `run`, for several attempts; returns soon after the first ones have ended, or after `limit_s`."""
        self._checks.check_machine(request.machine)
        with detaching():
            return await run_bundle(request, self._begin, self._until_ended)

    @activity.defn(name=Activity.STOP_NODE.value)
    async def stop(self, request: StopNode) -> NodeOutcome:
        """Stops an attempt for good: refuses later starts, gives notice and `grace_s`, and waits for the tasks' end."""
        with detaching():
            async with heartbeats(self._beat_s):
                await self._end(request.workload_id, request.attempt, request.grace_s)
                if request.ends:
                    await asyncio.to_thread(self._memory.end, request.workload_id)
            return await asyncio.to_thread(self._stopped_outcome, request)

    @activity.defn(name=Activity.RUN_ELEMENTS.value)
    async def run_elements(self, request: RunElements) -> ElementsRun:
        """Runs leased elements in the attempt of a runner, and waits until they or the attempt have ended."""
        self._checks.check_machine(request.machine)
        folder = self._state.attempt(request.workload_id, request.attempt)
        with detaching():
            return await run_chunk(
                ElementChunk(folder, request.elements),
                partial(self._stager.load, folder),
                self._files.ship_elements,
                beat_s=self._beat_s,
                poll_interval_s=self._config.poll_interval_s,
            )

    @activity.defn(name=Activity.CANCEL_ELEMENTS.value)
    async def cancel_elements(self, request: CancelElements) -> None:
        """Stops elements of a runner's attempt; elements that were not started are never started."""
        self._checks.check_machine(request.machine)
        folder = self._state.attempt(request.workload_id, request.attempt)
        await asyncio.to_thread(cancel, folder, request.indexes)

    @activity.defn(name=Activity.ATTEND.value)
    async def attend(self, request: Attend) -> None:
        """Stops the attempts in `request.stop`, then sends the heartbeat `ready` until the agent ends."""
        self._checks.check_machine(request.machine)
        if request.incarnation != self._state.incarnation():
            message = f"machine {request.machine} was restarted since incarnation {request.incarnation}"
            raise ApplicationError(message, type="OtherIncarnation", non_retryable=True)
        with detaching():
            self.attending += 1
            try:
                async with heartbeats(self._beat_s):
                    stale = [key.rpartition(".") for key in request.stop]
                    await asyncio.gather(*(self._end(workload, int(number), 0.0) for workload, _, number in stale))
                interval_s = attend_pause_s(self._config.attend_interval_s)
                while True:
                    activity.heartbeat("ready")
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(interval_s):
                            await self.gone.wait()
                    if self.gone.is_set():
                        raise self._checks.without_folder()
            finally:
                self.attending -= 1
                self.let_go.set()

    @activity.defn(name=Activity.PACE_NODE.value)
    async def pace(self, request: Pace) -> None:
        """Tells the running tasks how often they should save. Runs that are not on this machine are ignored."""
        self._checks.check_machine(request.machine)
        await asyncio.to_thread(set_pace, self._state, request)

    @activity.defn(name=Activity.PROVE_KEY.value)
    async def prove_key(self, request: ProveKey) -> str:
        """Returns the proof that this machine still holds its registered key after a rotation to a new one."""
        self._checks.check_machine(request.machine)
        try:
            return prove(request.machine, self._state.private_keys(), request.challenge)
        except CannotUnseal as error:
            raise ApplicationError(str(error), type="CannotProve", non_retryable=True) from None

    async def resume(self) -> None:
        """Resumes shipping output that an earlier agent of this machine did not ship.

        Ends attempts whose launch description is damaged, because their tasks cannot be reported. `run` reports why.
        """
        for folder in self._state.attempts():
            try:
                folder.launch()
            except DamagedRecord as error:
                if not self._state.is_over(folder):
                    _log.error("attempt %s is ended: %s", folder.key, error)
                    try:
                        await self._end(folder.workload_id, folder.attempt, 0.0)
                    except (OSError, NotStarted) as failure:
                        _log.error("attempt %s: %s", folder.key, failure)
            self._files.ship_all(folder)
        for folder in self._state.unfinished():
            with contextlib.suppress(CannotUnseal, DamagedRecord, BadLaunch):
                if self._state.is_started(folder) and (staged := self._stager.load(folder)) is not None:
                    await self._memory.listen(staged.launch, self._stager.launches.owner(staged))

    # ------------------------------------------------------------------------------------------------------ staging

    async def _end_older(self, workload_id: str, attempt: int) -> None:
        """Ends older attempts of the workload. A request for `attempt` means that the control plane released them."""
        if attempt > 1:
            await self._end(workload_id, attempt - 1, 0.0)

    async def _stage(self, request: PrepareNode | RunNode) -> tuple[StagedAttempt, dict[str, int]]:
        """Returns the staged attempt, and the ports of the jobs whose task 0 is on this machine.

        Refuses an attempt that was stopped, and ends older attempts first.
        """
        self._checks.refuse_stopped(request.workload_id, request.attempt)
        self._checks.refuse_taken(self._state.attempt(request.workload_id, request.attempt))
        await self._end_older(request.workload_id, request.attempt)

        def stage() -> tuple[StagedAttempt, dict[str, int]]:
            staged = self._stager.stage(
                request.workload_id,
                request.attempt,
                request.launch_key,
                request.bucket_url,
                request.launch_sha256,
            )
            self._checks.refuse_weaker(staged)
            jobs = request.leads_jobs
            return staged, {} if jobs is None else self._stager.launches.ports.reserve(staged.folder, jobs)

        return await asyncio.to_thread(stage)

    def _preparing(self, request: PrepareNode | RunNode) -> Callable[[], NodeHeartbeat | None]:
        """Returns the heartbeat of an attempt that is being staged: a text about what it waits for."""

        def waits() -> NodeHeartbeat | None:
            found = self._stager.waits_for(request.workload_id, request.attempt)
            return NodeHeartbeat([], 0, preparing=found) if found else None

        return waits

    async def _prepared(self, request: RunNode) -> tuple[StagedAttempt, dict[str, str]]:
        """Returns the staged attempt, and the rendezvous address (`address:port`) of each job."""
        staged, ports = await self._stage(request)
        if request.leads_jobs is None:
            return staged, request.masters
        return staged, {job: f"{self._config.address}:{port}" for job, port in ports.items()}

    # ------------------------------------------------------------------------------------------------------ running

    async def _begin(self, request: RunNode) -> tuple[StagedAttempt, DiskWatch | None]:
        """Starts the attempt's tasks, unless they were started before."""
        self._checks.check_machine(request.machine)
        with self._checks.judging(request):
            async with heartbeats(self._beat_s, self._preparing(request)):
                staged, masters = await self._prepared(request)
                async with self._locks.of(request.workload_id):
                    self._checks.refuse_stopped(request.workload_id, request.attempt)
                    self._checks.refuse_taken(staged.folder, [slot for place in staged.places for slot in place.slots])
                    return staged, await self._start(staged, masters)

    async def _until_ended(self, staged: StagedAttempt, disk: DiskWatch | None) -> NodeOutcome:
        """Waits until the attempt's tasks have ended."""
        try:
            await self._watch(staged, disk)
        finally:
            self._notices.over(staged.folder.key)
        async with heartbeats(self._beat_s):
            await self._gpus.until_freed(staged.folder)
        await self._store_outputs(staged)
        found = await asyncio.to_thread(self._outcome, staged)
        if found.succeeded:
            await asyncio.to_thread(self._memory.end, staged.launch.workload_id)
        return found

    async def _start(self, staged: StagedAttempt, masters: dict[str, str]) -> DiskWatch | None:
        """Starts the tasks that were not started; returns the watcher of their disk space (None: it has no limit)."""

        def start(run: RunFolder, index: int) -> None:
            if tasks.inspect(run) is TaskState.ABSENT:
                reserve_report(run)
                tasks.start(run, self._stager.launches.launch_of(staged, staged.places[index], masters))

        disk = await asyncio.to_thread(self._disk_watch, staged)
        await self._memory.listen(staged.launch, self._stager.launches.owner(staged))
        await asyncio.gather(*(asyncio.to_thread(start, run, index) for index, run in enumerate(staged.runs)))
        self._files.ship(staged, staged.runs)
        return disk

    def _disk_watch(self, staged: StagedAttempt) -> DiskWatch | None:
        limit = self._disk.limit_of(staged.folder, staged.places)
        if limit is None:
            return None
        disk = DiskWatch(staged.folder, staged.runs, limit)
        if not self._state.is_started(staged.folder):
            disk.begin()
        return disk

    async def _watch(self, staged: StagedAttempt, disk: DiskWatch | None) -> None:
        serving = None
        if (run := staged.serving_run) is not None and staged.launch.serving is not None:
            address, port = self._config.address, staged.folder.ports()[SERVING]
            has_setup = staged.launch.jobs[run.job].setup is not None
            spec = staged.launch.serving.probe.with_secrets(staged.secrets.get(run.job, {}))
            serving = Readiness(run, spec, address, port, has_setup=has_setup)
        heartbeat_interval_s = pause_s(self._beat_s)
        poll_interval_s = self._config.poll_interval_s
        await TaskWatch(
            staged,
            self._notices,
            serving,
            disk,
            self._stager.launches.credentials(staged),
            self._gpus,
            heartbeat_interval_s=heartbeat_interval_s,
            poll_interval_s=poll_interval_s,
            uplink=self._uplink,
        ).until_the_end()

    # ----------------------------------------------------------------------------------------------------- stopping

    async def _end(self, workload_id: str, attempt: int, grace_s: float) -> None:
        """Stops a workload's attempts up to `attempt` for good, and waits until their tasks have ended.

        A full disk does not prevent the stop of the tasks. The record of the stop is on the disk when this returns.
        """
        try:
            await asyncio.to_thread(self._state.stop_attempts, workload_id, attempt)
        except OSError as error:
            if not is_disk_full(error):
                raise
        folders = [a for a in self._state.attempts() if a.workload_id == workload_id and a.attempt <= attempt]
        runs = [run for folder in folders for run in folder.runs()]
        ending = [a for a in folders if any(tasks.inspect(run) is TaskState.RUNNING for run in a.runs())]
        # A concurrent start checks for stopped attempts under the same lock.
        async with self._locks.of(workload_id):
            await notify(runs, grace_s, told=True)
        while running := await still_running(runs):
            await next_look(running, self._config.poll_interval_s)
        for folder in folders:
            self._files.ship_all(folder)
        await asyncio.gather(*map(self._gpus.until_freed, ending))
        await asyncio.to_thread(self._state.stop_attempts, workload_id, attempt)

    # ------------------------------------------------------------------------------------------------------ results

    def _outcome(self, staged: StagedAttempt) -> NodeOutcome:
        """Returns the attempt's outcome on this machine (`agent.outcomes.outcome`), with the machine's own notice."""
        found = outcome(self._config.machine, staged.runs, staged.masker)
        keep_s = self._config.keep_runs_s if self._lender.lending.is_whole else self._config.kept_s(staged.launch)
        for progress, run in zip(found.progress, staged.runs, strict=True):
            progress.left = left_by(run, self._config.machine, keep_s)
            progress.unstored = self._files.unstored(staged, run)
        own = self._notices.current or self._notices.of_owner(staged.folder.key)
        return replace(found, notice=own or found.notice, elements=known_results(staged.folder))

    def _stopped_outcome(self, request: StopNode) -> NodeOutcome:
        """Returns the outcome of a stopped attempt. `stopped` is false if all its tasks ended by themselves before."""
        folder = self._state.attempt(request.workload_id, request.attempt)
        try:
            staged = self._stager.load(folder)
        except (CannotUnseal, DamagedRecord):
            staged = None  # The state folder has lost the launch record, or the key that decrypts it.
        if staged is not None:
            return self._outcome(staged)
        kept = kept_outcome(self._state, folder.key)
        return NodeOutcome(self._config.machine, [], [], stopped=True) if kept is None else kept

    async def _store_outputs(self, staged: StagedAttempt) -> None:
        """Starts to store the outputs of the attempt's tasks, which have ended.

        If the tasks ended by themselves, waits until the outputs are stored, because dependent workloads may need them.
        If the tasks were stopped, it does not wait, because other workloads need their slots.
        """
        if not staged.launch.outputs:
            return
        self._files.ship(staged, staged.runs)
        if self._notices.current is not None or self._notices.of_owner(staged.folder.key) is not None:
            return
        if outcome(self._config.machine, staged.runs, staged.masker).stopped:
            return

        def active() -> NodeHeartbeat:
            now_s = time.time()
            progress = [replace(read_progress(run, staged.masker), active_at_s=now_s) for run in staged.runs]
            return NodeHeartbeat(progress, 0)

        async with heartbeats(self._beat_s, active):
            await self._outputs.until_stored(staged.runs)
