"""Monitors running tasks of an attempt: waits for their ends, gives notice, sends heartbeats."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from temporalio import activity

from agent import tasks
from agent.credentials.task_credentials import TaskCredentials
from agent.disk import DiskWatch
from agent.gpu_watch import GpuWatch
from agent.notices import MachineNotices
from agent.staged import StagedAttempt
from agent.task_progress import NoticeReader, read_progress
from agent.task_readiness import Readiness
from agent.tasks import RunFolder, TaskState
from domain.launch import TaskPlace
from domain.protocol.machines import NodeHeartbeat
from domain.task_reports import TaskProgress
from infra.pidfds import first_end

if TYPE_CHECKING:
    from agent.network.uplink import Uplink


async def next_look(running: Sequence[RunFolder], poll_interval_s: float) -> None:
    """Waits until a task in `running` has ended, or at most `poll_interval_s`."""
    shims = [identities[0].pid for run in running if (identities := run.identities()) is not None]
    await first_end(shims, poll_interval_s)


async def still_running(runs: Sequence[RunFolder]) -> list[RunFolder]:
    """Returns the tasks in `runs` that are running. Ends lost tasks, and kills tasks whose stop is overdue."""
    running = []
    for run in runs:
        state = tasks.inspect(run)
        if state is TaskState.LOST:
            await asyncio.to_thread(tasks.end_lost, run)
        elif state is TaskState.RUNNING and tasks.overdue(run):
            await asyncio.to_thread(tasks.force, run)
        elif state is TaskState.RUNNING:
            running.append(run)
    return running


async def notify(runs: Sequence[RunFolder], grace_s: float, *, told: bool) -> None:
    """Requests that the tasks stop within `grace_s` (`agent.tasks.request_stop`)."""

    def one(run: RunFolder) -> None:
        tasks.request_stop(run, grace_s, told=told)

    await asyncio.gather(*(asyncio.to_thread(one, run) for run in runs))


class TaskWatch:
    """Watches the tasks of an attempt on this machine, inside the activity that runs them."""

    def __init__(
        self,
        staged: StagedAttempt,
        notices: MachineNotices,
        serving: Readiness | None,
        disk: DiskWatch | None,
        credentials: TaskCredentials,
        gpus: GpuWatch,
        *,
        heartbeat_interval_s: float,
        poll_interval_s: float,
        uplink: "Uplink | None" = None,
    ) -> None:
        """`serving` is the readiness of the task that serves requests; None: no task on this machine serves.

        `disk`: None if tasks have no limits on disk space.
        """
        self._staged = staged
        self._notices = notices
        self._serving = serving
        self._disk = disk
        self._credentials = credentials
        self._gpus = gpus
        self._uplink = uplink
        self._heartbeat_interval_s = heartbeat_interval_s
        self._poll_interval_s = poll_interval_s
        self._readers = [NoticeReader(run, staged.masker) for run in staged.runs]
        self._running = list(staged.runs)
        # No heartbeat at start or end: each one costs the Temporal server a write, and a short task needs none.
        self._next_heartbeat_s = time.monotonic() + heartbeat_interval_s

    async def until_the_end(self) -> None:
        """Waits until no task runs. Stops all tasks if one has failed or did not become ready in time, if they use too
        much of the disk, or if the platform will take the machine. Sends heartbeats meanwhile.
        """
        helpers = [asyncio.create_task(self._credentials.keep())]
        if self._serving is not None:
            helpers.append(asyncio.create_task(self._serving.keep(self._beat)))
        if self._disk is not None:
            helpers.append(asyncio.create_task(self._disk.keep()))
        noticed = False
        try:
            while running := await still_running(self._staged.runs):
                self._running = running
                if time.monotonic() >= self._next_heartbeat_s:
                    self._beat()
                noticed = noticed or await self._give_notice()
                await next_look(running, self._poll_interval_s)
                for helper in helpers:
                    if helper.done():
                        helper.result()
            if self._credentials.are_there():
                await asyncio.to_thread(self._credentials.remove)
            if self._disk is not None:
                await self._disk.finish()
        finally:
            for helper in helpers:
                helper.cancel()

    def _beat(self) -> None:
        progress = [self._progress(place) for place in self._staged.places]
        measured = None if self._uplink is None else self._uplink.report()
        activity.heartbeat(NodeHeartbeat(progress, len(self._running), measured))
        self._next_heartbeat_s = time.monotonic() + self._heartbeat_interval_s

    def _progress(self, place: TaskPlace) -> TaskProgress:
        run = self._staged.run(place)
        progress = read_progress(run, self._staged.masker)
        if run in self._running:
            progress = replace(progress, gpu=self._gpus.report(place.slots))
        if self._serving is None or run != self._staged.serving_run:
            return progress
        return replace(progress, serving=self._serving.report)

    async def _give_notice(self) -> bool:
        """Requests that all tasks stop, if there is a reason. Returns whether there is one.

        The agent gives a platform's notice itself, because some platforms allow only 5 s and Temporal may be
        unavailable. Tasks that serve get it shortly before the end, so that their requests in progress continue.
        """
        for told in filter(None, (reader.read() for reader in self._readers)):
            if told.takes_machine:
                self._notices.of_run(self._staged.folder.key, told)
        launch, leaving = self._staged.launch, self._notices.current
        grace_s, serving = launch.checkpoint.grace_s, launch.serving
        if leaving is not None and serving is not None:
            leaving = leaving if serving.stop_at_s(leaving.at_s, leaving.ends_at_s) <= time.time() else None
        if leaving is not None:
            left_s = grace_s if leaving.ends_at_s is None else max(0.0, leaving.ends_at_s - time.time())
            grace_s = min(grace_s, left_s)
        elif not self._has_failed():
            return False
        await notify(self._running, grace_s, told=False)
        return True

    def _has_failed(self) -> bool:
        if self._serving is not None and self._serving.given_up:
            return True
        runs = self._staged.runs
        ends = [run.exit() for run in runs] if len(self._running) < len(runs) else []
        return any(end.started and not end.succeeded for end in ends if end is not None)
