"""Termination notices of the machine's platform, which the agent polls on behalf of all tasks on the machine.

The agent passes a notice to the tasks as SIGTERM, like any stop, so tasks need not poll. A SIGTERM to the agent itself
is a notice only if the agent serves until its allocation ends (`agent.pilot`). Otherwise it stops the agent, and the
tasks continue.

A task may also poll the platform itself and report a notice. Such a report affects only the task's own attempt, because
it is not trusted: a task must not be able to take a machine out of service. A notice that the agent reads affects
everything on the machine, which then takes no new work.
"""

import asyncio
import logging
import math
import os
import time
from collections.abc import Mapping
from signal import Signals

from agent.config import DETECT
from domain.protocol.machines import MachineNotice
from domain.task_reports import NoticeReport
from mizzen.cadence import PLATFORMS as PRIORS
from mizzen.cadence.interruptions import OF_NOTICES
from mizzen.notices import Notice, SigtermWatcher, Watcher
from mizzen.notices.current_notice import backoff_s
from mizzen.notices.detection import detect, from_environment

_log = logging.getLogger(__name__)


class MachineNotices:
    """The newest notice for this machine. `run` polls the platform; callers read `current` or await `heard`."""

    def __init__(
        self, platform: str | None, environ: Mapping[str, str] | None = None, watcher: Watcher | None = None
    ) -> None:
        """Sets up the watcher without polling. `platform` is `AgentConfig.platform`. `watcher` replaces its own.

        Raises:
            ValueError: `MIZZEN_PLATFORM` or another `MIZZEN_` variable in `environ` has an invalid value.
        """
        given = dict(os.environ if environ is None else environ)
        self._named = platform or given.get("MIZZEN_PLATFORM") or None
        # This agent may itself run as a task of another agent. That task's grace says nothing about this machine.
        given.pop("MIZZEN_GRACE_S", None)
        self._environ = {**given, "MIZZEN_PLATFORM": "" if self._named == DETECT else self._named or "sigterm"}
        self._watcher = watcher
        if watcher is None and self._named != DETECT:
            self._watcher = from_environment(self._environ)
        self._of_platform: NoticeReport | None = None
        self._of_owner: NoticeReport | None = None
        self._owner_takes_runs: dict[str, NoticeReport] = {}
        self.heard = asyncio.Event()
        """Set when a notice is new. The waiting task must clear it."""
        self._notice: Notice | None = None
        self._of_runs: dict[str, NoticeReport] = {}

    @property
    def current(self) -> NoticeReport | None:
        """The most urgent notice that the machine will certainly end, or None."""
        given = [one for one in (self._of_owner, self._of_platform) if one is not None]
        return min(given, key=lambda one: math.inf if one.ends_at_s is None else one.ends_at_s, default=None)

    @property
    def prior(self) -> str | None:
        """The platform's name in `mizzen.cadence`, which gives its rate of interruptions; None if it is unknown."""
        name = self._named if self._named != DETECT else self._watcher and self._watcher.platform
        name = OF_NOTICES.get(name, name) if name else None
        return name if name in PRIORS and name != "unknown" else None

    async def run(self) -> None:
        """Polls the platform until cancelled. Returns at once if the platform cannot be polled."""
        if self._watcher is None:
            self._watcher = await asyncio.to_thread(detect, self._environ)
            _log.info("polling platform %s for termination notices", self._watcher.platform)
        watcher, failures = self._watcher, 0
        while watcher.period_s is not None:
            try:
                self._take(await asyncio.to_thread(watcher.poll))
                failures = 0
            except Exception as error:  # An unexpected response of a metadata server must not end the agent.
                failures += 1
                if failures == 1:
                    _log.warning("cannot read notices of platform %s, retrying: %s", watcher.platform, error)
            await asyncio.sleep(backoff_s(watcher.period_s, watcher.window.seconds, failures))

    @property
    def signals(self) -> tuple[Signals, ...]:
        """The signals that are notices of the platform, if this agent serves until its platform ends it."""
        return () if self._watcher is None else self._watcher.signals

    async def signalled(self, received: int) -> None:
        """Takes a signal to this agent as the platform's notice, with the end that the platform has announced."""
        watcher = self._watcher or SigtermWatcher({})
        notice = watcher.on_signal(received)
        self._take(await asyncio.to_thread(watcher.exact, notice) or notice)

    def of_run(self, run: str, notice: NoticeReport) -> None:
        """Stores a task's report that the platform will take the machine. `run` is `workload.attempt`."""
        if self._of_runs.get(run) != notice:
            self._of_runs[run] = notice
            self.heard.set()

    def owner_takes(self, notice: NoticeReport, run: str | None = None) -> None:
        """Stores the owner's notice that the machine, or the resources of one run, are taken back at `ends_at_s`."""
        if run is None:
            self._of_owner = notice
        else:
            self._owner_takes_runs[run] = notice
            self._of_runs[run] = notice
        self.heard.set()

    def owner_lends(self) -> None:
        """Drops the owner's earlier notices."""
        self._of_owner = None
        for run in self._owner_takes_runs:
            self._of_runs.pop(run, None)
        self._owner_takes_runs.clear()

    def of_owner(self, run: str) -> NoticeReport | None:
        """Returns the owner's notice for the GPUs of a run, also after the run has ended; None: there is none."""
        return self._owner_takes_runs.get(run)

    def over(self, run: str) -> None:
        """Drops the notice that a task of `run` reported, because the run has ended here."""
        self._of_runs.pop(run, None)

    def all(self, machine: str, incarnation: str) -> list[MachineNotice]:
        """Returns the notices to send to the machine's workflow: the machine's own first, then those of sorted runs."""
        found = [] if self.current is None else [MachineNotice(machine, incarnation, self.current)]
        return found + [MachineNotice(machine, incarnation, self._of_runs[run], run) for run in sorted(self._of_runs)]

    def _take(self, notice: Notice | None) -> None:
        """Stores `notice` if it is more urgent than the stored one; drops a stored notice whose end has passed.

        A notice that is not certain, such as a rebalance recommendation, is only logged: the machine may never be
        interrupted, so acting on it could stop work for nothing.
        """
        before = self._notice
        if notice is None and before is not None and (before.ends_at_s or math.inf) < time.time():
            # The announced end has passed: the machine was stopped and restarted, or was not stopped at all.
            self._notice = self._of_platform = None
        if notice is None or not notice.supersedes(before):
            return
        self._notice = notice
        _log.warning("notice of platform %s, kind %s: %s", notice.platform, notice.kind, notice.words)
        if notice.certain:
            self._of_platform = NoticeReport(
                notice.platform, str(notice.kind), True, notice.seen_at_s, notice.ends_at_s, notice.words
            )
            self.heard.set()
