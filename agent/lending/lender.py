"""Carries out the commands of the machine's owner: takes resources back, and lends them again."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from agent.config import AgentConfig
from agent.gpus import GpuUse, gpu_use
from agent.lending.hours import LendingHours
from agent.lending.leaving_tasks import PERIOD_S, LeavingTask, leaving_task, view
from agent.lending.owner_record import LendingFile, OwnerRecord, in_time
from agent.lending.owner_request import OwnersWord
from agent.lending.polls import Polls
from agent.lending.task_stop import Stopping
from agent.locks import StartLocks
from agent.memory_servers import end_servers
from agent.notices import MachineNotices
from agent.state import AttemptFolder, StateFolder
from agent.task_watch import next_look
from domain.task_reports import OWNER, NoticeReport
from infra.errors import MizzenError
from mizzen.notices import Kind

if TYPE_CHECKING:
    from agent.lending.traffic import MigrationTraffic

HOURS_NOTICE_S = 300.0
"""The notice that tasks get before the lending hours end."""
_TICK_S = 5.0
_LEND_S = 5.0
"""The longest time that `lend` waits for the disk: a word that it cannot remove would take the machine again."""
_STORE_S = 60.0
"""Interval at which the GPU time is stored."""
_PARTING_S = 15.0
"""How long the agent stays connected after its machine was taken and no task runs, so that the control plane can
confirm the stops of the gangs."""
_DRIVER_S = 10.0
"""The longest time that a reclaim waits, after the end of all tasks, for the driver to free the memory of the GPUs."""
_DRIVER_POLL_S = 0.2
_log = logging.getLogger(__name__)


class BadRequest(MizzenError):
    """The owner's request is invalid. The message names the field, the value and what would be right."""


class Lender:
    """What the owner lends, and the running reclaim, if there is one."""

    def __init__(
        self,
        config: AgentConfig,
        state: StateFolder,
        notices: MachineNotices,
        locks: StartLocks,
        traffic: "MigrationTraffic | None" = None,
        clock: Callable[[], float] = time.time,
        file: LendingFile | None = None,
    ) -> None:
        self._config, self._state, self._notices = config, state, notices
        self._stopping = Stopping(config, state, locks)
        self._writing = threading.Lock()
        self._clock = clock
        self._traffic = traffic
        self.polls = Polls()
        self._stops_s: dict[str, tuple[float, float]] = {}
        """When attempts that are not notified yet must have ended, and when to notify them, in epoch seconds."""
        self._shaped = False
        self._counted_s = self._stored_s = time.monotonic()
        self._outcomes: Mapping[str, IntEnum | None] = {}
        self._file = file or LendingFile(state.path)
        self._word = OwnersWord(state.path)
        self._saying = asyncio.Lock()
        """Held while a word of the owner replaces what was said before."""
        self.changed = asyncio.Event()
        """Set when the record has changed. The waiting task must clear it."""
        self.away = asyncio.Event()
        """Set while the whole machine is the owner's and all its tasks have ended: the agent then disconnects."""
        self._quiet_since_s: float | None = None
        self.problem: str | None = None
        """Why the record could not be read or written; None: it could."""
        try:
            self.lending = self._file.read()
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            # The owner may have taken the machine back, so nothing runs until the owner lends it again.
            self.problem = f"{error.__class__.__name__}: {error}"
            self.lending = OwnerRecord(machine_at_s=self._clock())
            _log.error("%s: lending.json is damaged, so the machine takes no work: %s", config.machine, error)
        else:
            self._reserve()
        self.lending = self._heard()
        self._switch()
        if self.lending.is_whole and (self.lending.machine_at_s or 0.0) <= self._clock() and not self._stopping.held():
            self.away.set()  # The owner took the machine before it was restarted.

    # ------------------------------------------------------------------------------------------------------- requests

    async def reclaim(self, gpus: frozenset[int] | None, notice_s: float) -> None:
        """Takes GPUs back, or the whole machine (None), and returns when no task runs there any more.

        It then waits up to `_DRIVER_S` until no process holds the GPUs and their memory reads free.
        New work is refused from now on. Tasks get the notice; what still runs at its end is killed. Repeating a request
        with a shorter notice makes it more urgent. Cancelling this does not end the reclaim.

        Raises:
            BadRequest: a GPU does not exist, or the notice is not a number of seconds.
        """
        self._check(gpus)
        if not 0 <= notice_s <= 86400:
            raise BadRequest(f"notice: {notice_s:g} s: must be from 0 to 86400 s (one day)")
        at_s = self._clock() + notice_s
        async with self._saying:
            await self._change(self._heard().taking(gpus, at_s))
        await self._announce()
        await asyncio.shield(asyncio.ensure_future(self._until_free(gpus)))
        give_up_s = time.monotonic() + _DRIVER_S
        while not (await asyncio.to_thread(self._use_of_taken)).is_free and time.monotonic() < give_up_s:
            await asyncio.sleep(_DRIVER_POLL_S)

    async def lend(self, gpus: frozenset[int] | None, hours: str | None) -> None:
        """Lends GPUs of the machine, or all of it (None).

        `hours` are new lending hours; `always` removes them. With hours and without GPUs, single GPUs that the owner
        has taken stay the owner's. Outside the lending hours, the machine is the owner's until they begin; tasks that
        run get the notice of the end of a window.

        Raises:
            BadRequest: a GPU or the hours are invalid, or the disk does not answer.
        """
        self._check(gpus)
        held = await asyncio.to_thread(self._stopping.held)
        async with self._saying:
            lending = await self._lend(gpus, hours, works=held != [])
        if lending.is_whole:
            await self._announce()
        else:
            self._notices.owner_lends()

    async def _lend(self, gpus: frozenset[int] | None, hours: str | None, *, works: bool) -> OwnerRecord:
        """Changes the record, and returns it. `works`: tasks run on the machine."""
        if not await in_time(self._word.take, _LEND_S):
            raise BadRequest("lend: the disk of the agent's state folder does not answer; try again later")
        lending = self._heard()
        if hours is not None:
            try:
                lending = replace(lending, hours=None if hours == "always" else LendingHours.parse(hours))
            except ValueError as error:
                raise BadRequest(str(error)) from None
        if gpus is None and hours is not None:
            lending = lending.lending_machine()
        else:
            lending = lending.lending(gpus, self._config.gpus)
        if lending.hours is not None and not lending.hours.is_open(self._local()):
            works = works and not self.lending.is_whole
            lending = lending.taking(None, self._clock() + (HOURS_NOTICE_S if works else 0.0), by_hours=True)
        await self._change(lending)
        await in_time(self._word.adopted, _LEND_S)  # The record includes the owner's earlier commands.
        return lending

    # ---------------------------------------------------------------------------------------------------------- state

    def refuses(self, slots: Iterable[int] = ()) -> bool:
        """Returns whether the owner has taken back the machine or one of these GPU slots: no task may start on them."""
        return self._heard().refuses(slots)

    def _heard(self) -> OwnerRecord:
        """Returns the record with the owner's commands from the time in which this agent did not answer."""
        said = self._word.read()
        return self.lending if said is None else self.lending.with_word(said)

    async def _hear(self) -> None:
        """Applies the owner's commands from the time in which this agent did not answer."""
        if self._word.read() is None:
            return
        async with self._saying:
            is_taken = await in_time(self._word.take)
            await self._change(self._heard())
        await self._announce()
        if is_taken:  # Otherwise the disk hangs, and the command is applied in the next round.
            async with self._saying:
                await in_time(self._adopt)

    def _adopt(self) -> None:
        """Writes the record, and removes the command that it contains. Blocks as long as the disk does."""
        self._write()
        if self.problem is None:
            self._word.adopted()

    async def run(self) -> None:
        """Follows the lending hours, finishes a reclaim that an earlier agent began, and counts the GPU time."""
        announced = False
        while True:
            for act in (self._hear, self._apply_hours, self._finish, self._shape, self._count):
                try:
                    if not announced and (self.lending.is_whole or self.lending.gpus_at_s):
                        await self._announce()
                    announced = True
                    await act()
                except Exception:  # The others must follow: one of them kills what overstays a notice.
                    _log.exception("%s: a part of lending failed", self._config.machine)
            await asyncio.sleep(self._next_end_s())

    async def reopen_polls(self) -> None:
        """Opens the polls again after the owner has taken the machine, until cancelled (`Polls.reopening`)."""
        await self.polls.reopening(lambda: self._until_free(None))

    async def _count(self) -> None:
        """Adds the GPU time since the last round, and stores it from time to time."""
        now_s = time.monotonic()
        used = sum(len(one.slots) for one in await asyncio.to_thread(self._stopping.held))
        given_gpu_s = self.lending.given_gpu_s + used * (now_s - self._counted_s)
        self.lending = replace(self.lending, given_gpu_s=given_gpu_s)
        self._counted_s = now_s
        if used and now_s - self._stored_s >= _STORE_S:
            await asyncio.to_thread(self._write)
            self._stored_s = now_s

    async def until_lent(self) -> None:
        """Waits until the machine is not wholly the owner's."""
        while self.lending.is_whole:
            self.changed.clear()
            await self.changed.wait()

    def status(self) -> dict[str, Any]:
        """Returns what is lent, what runs, and how long until it is free, as values of JSON."""
        lending, now_s = self.lending, self._clock()
        running = [view(one, self._outcomes) for one in self._stopping.held()]
        use = self._use_of_taken()
        taken = [one for one in running if lending.is_whole or set(one["gpus"]) & set(lending.gpus_at_s)]
        return {
            "machine": self._config.machine,
            "gpus": self._config.gpus,
            "lent": not lending.is_whole,
            "machine_at_s": lending.machine_at_s,
            "by_hours": lending.by_hours,
            "gpus_at_s": {str(gpu): at_s for gpu, at_s in sorted(lending.gpus_at_s.items())},
            "free": not taken and use.is_free,
            "gpu_holders": list(use.holders),
            "gpu_used_bytes": {str(gpu): size for gpu, size in use.used_bytes.items()},
            "gpus_unknown": use.unknown,
            "free_in_s": max((one["ends_in_s"] for one in taken), default=0.0),
            "hours": None if lending.hours is None else lending.hours.text,
            "opens_at_s": self._opens_at_s(),
            "running": running,
            "given_gpu_h": lending.given_gpu_s / 3600,
            "problem": self.problem,
            "isolation": self._config.isolation.value,
            "now_s": now_s,
        }

    # -------------------------------------------------------------------------------------------------------- helpers

    def _check(self, gpus: frozenset[int] | None) -> None:
        for gpu in sorted(gpus or ()):
            if not 0 <= gpu < self._config.gpus:
                there = f"the machine has GPUs 0 to {self._config.gpus - 1}" if self._config.gpus else "it has no GPUs"
                raise BadRequest(f"gpus: {gpu}: {there}")
        if gpus is not None and not gpus:
            raise BadRequest("gpus: must name at least one GPU")

    async def _change(self, lending: OwnerRecord) -> None:
        """Applies a new record at once, and writes it. A disk that fails or hangs does not keep the owner's machine."""
        self.lending = replace(lending, said_at_s=max(self._clock(), self.lending.said_at_s))
        self._switch()
        self._quiet_since_s = None
        self.away.clear()
        self.changed.set()
        await in_time(self._write)

    def _switch(self) -> None:
        """Closes the polls and sets the kill-switch: while the machine is the owner's, no new work reaches it."""
        if not self.lending.is_whole:
            self.polls.open()
        elif (self.lending.machine_at_s or 0.0) <= self._clock():
            self.polls.close()
        if self._traffic is not None:
            switch = self._traffic.kill_switch
            (switch.on if self.lending.is_whole else switch.off)()

    def _write(self) -> None:
        """Writes the newest record. Blocks as long as the disk does."""
        with self._writing:
            try:
                self._file.write(self.lending)
                self.problem = None
            except OSError as error:
                self.problem = f"lending.json: {error.strerror}: a restart of the machine would lend it again"
                _log.error("%s: %s", self._config.machine, self.problem)
            self._reserve()

    def _reserve(self) -> None:
        try:
            self._file.reserve()
        except OSError as error:
            _log.warning("%s: no space is reserved for lending.json: %s", self._config.machine, error)

    def _use_of_taken(self) -> GpuUse:
        """Returns who uses the GPUs that the owner has taken."""
        lending = self.lending
        return gpu_use(range(self._config.gpus) if lending.is_whole else lending.gpus_at_s)

    async def _announce(self) -> None:
        """Gives the tasks that must leave their notice, and passes it on to the control plane."""
        lending, now_s = self.lending, self._clock()
        if lending.machine_at_s is not None:
            words = "the owner takes the machine back"
            self._notices.owner_takes(NoticeReport(OWNER, str(Kind.PREEMPT), True, now_s, lending.machine_at_s, words))
        running = {one.folder.key for one in await asyncio.to_thread(self._stopping.held)}
        stops_s: dict[str, tuple[float, float]] = {}
        for one in await asyncio.to_thread(self._stopping.unfinished):
            at_s = lending.due_s(one.slots)
            if at_s is None:
                continue
            if lending.machine_at_s is None and one.folder.key in running:
                words = "the owner takes GPUs back"
                report = NoticeReport(OWNER, str(Kind.PREEMPT), True, now_s, at_s, words)
                self._notices.owner_takes(report, one.folder.key)
            new_s = (at_s, self._stopping.stop_at_s(one.folder, now_s, at_s))
            before_s = self._stops_s.get(one.folder.key, new_s)
            # A repeated request leaves less time, but does not take any from the stop.
            stops_s[one.folder.key] = before_s if before_s[0] == at_s else new_s
        self._stops_s = stops_s
        await self._tell()

    async def _tell(self) -> None:
        """Notifies each task once, when its time to stop (`stop_at_s`) is reached."""
        now_s, told = self._clock(), list[tuple[AttemptFolder, float]]()
        due = {key for key, (_, stop_s) in self._stops_s.items() if stop_s <= now_s}
        for one in await asyncio.to_thread(self._stopping.unfinished) if due else ():
            at_s = self.lending.due_s(one.slots)
            if one.folder.key in due and at_s is not None:
                told.append((one.folder, self._stopping.grace_s(one.folder, max(0.0, at_s - now_s))))
        self._stops_s = {key: times_s for key, times_s in self._stops_s.items() if key not in due}
        await self._stopping.notify(told)

    async def _until_free(self, gpus: frozenset[int] | None) -> None:
        """Waits until no task runs on what the owner takes. Ends when the owner lends it again."""
        while True:
            await self._tell()
            held = await asyncio.to_thread(self._stopping.held)
            due = [one for one in held if self.lending.refuses(one.slots) and (gpus is None or one.slots & gpus)]
            running = await self._stopping.remaining([one.folder for one in due])
            if not running:
                await self._stopping.clean()
                if gpus is None:
                    await asyncio.to_thread(end_servers, self._state)
                return
            await next_look(running, self._config.poll_interval_s)

    async def _shape(self) -> None:
        """Sets the rates of the checkpoints that leave within a notice."""
        if self._traffic is None:
            return
        leaving = await asyncio.to_thread(self._leaving)
        if leaving or self._shaped:
            self._outcomes = await asyncio.to_thread(self._traffic.update, leaving, self._clock())
        self._shaped = bool(leaving)

    def _leaving(self) -> list[LeavingTask]:
        return [
            leaving_task(run, cgroup, due_s)
            for one in self._stopping.held()
            if (due_s := self.lending.due_s(one.slots)) is not None and due_s > self._clock()
            for run in one.folder.runs()
            if (cgroup := run.unified_cgroup()) is not None
        ]

    async def _finish(self) -> None:
        """Kills what still runs at the end of a notice, and lets the agent disconnect when the machine is free."""
        await self._tell()
        now_s = self._clock()
        held = await asyncio.to_thread(self._stopping.held)
        times = [(one, self.lending.due_s(one.slots)) for one in held]
        over = [one.folder for one, due_s in times if due_s is not None and due_s <= now_s]
        await self._stopping.notify([(folder, 0.0) for folder in over])
        await self._stopping.remaining(over)
        if not self.lending.is_whole or held:
            self._quiet_since_s = None
        elif self._quiet_since_s is None:
            await asyncio.to_thread(end_servers, self._state)
            self._quiet_since_s = time.monotonic()
        elif time.monotonic() - self._quiet_since_s >= _PARTING_S and not self.away.is_set():
            self.away.set()

    def _next_end_s(self) -> float:
        """Returns the pause until the next round: until a notice ends, but at most the usual interval."""
        stops_s = [stop_s for _, stop_s in self._stops_s.values()]
        ends = [*self.lending.gpus_at_s.values(), self.lending.machine_at_s or 0.0, *stops_s]
        period_s = PERIOD_S if self._shaped else _TICK_S
        now_s = self._clock()
        return max(0.05, min([period_s, *(end - now_s for end in ends if end > now_s)]))

    async def _apply_hours(self) -> None:
        hours = self.lending.hours
        if hours is None:
            return
        now = self._local()
        closes_at = hours.closes_at(now)
        if hours.is_open(now):
            if self.lending.by_hours and (closes_at is None or _left_s(closes_at, now) > HOURS_NOTICE_S):
                await self._change(self.lending.lending_machine())
                self._notices.owner_lends()
            elif closes_at is not None and _left_s(closes_at, now) <= HOURS_NOTICE_S and not self.lending.is_whole:
                await self._change(self.lending.taking(None, closes_at.timestamp(), by_hours=True))
                await self._announce()
        elif not self.lending.is_whole:
            await self._change(self.lending.taking(None, self._clock(), by_hours=True))
            await self._announce()

    def _local(self) -> datetime:
        return datetime.fromtimestamp(self._clock()).astimezone()

    def _opens_at_s(self) -> float | None:
        lending = self.lending
        opens_at = None if lending.hours is None or not lending.by_hours else lending.hours.opens_at(self._local())
        return None if opens_at is None else opens_at.timestamp()


def _left_s(until: datetime, now: datetime) -> float:
    return until.timestamp() - now.timestamp()
