"""What the machine's platform says before it takes the machine, asked by the agent for all tasks that run there.

The tasks hear of it by SIGTERM, as of any stop, and ask nobody themselves. The agent's own SIGTERM is no notice: it
stops the agent, and tasks go on. So of platforms that tell by a signal only, the agent hears nothing.

A task that listens to its platform itself may hear first, or alone. Its word is about its own attempt; the agent's is
about everything on the machine, which takes no new work then. A task could say anything, and must not empty a machine.
"""

import asyncio
import logging
import math
import os
import time
from collections.abc import Mapping

from agent.config import DETECT
from domain.protocol import MachineNotice
from domain.reported import NoticeReport
from mizzen.cadence import PLATFORMS as PRIORS
from mizzen.cadence.interruptions import OF_NOTICES
from mizzen.notices import Notice, Watcher
from mizzen.notices.detection import detect, from_environment
from mizzen.notices.watching import backoff_s

_log = logging.getLogger(__name__)


class MachineNotices:
    """The newest notice of this machine. `run` polls; everybody else looks at `current` or waits for `heard`."""

    def __init__(self, platform: str | None, environ: Mapping[str, str] | None = None) -> None:
        """Nothing is asked yet. `platform` is the configuration's (`AgentConfig.platform`).

        Raises:
            ValueError: `MIZZEN_PLATFORM`, or another of mizzen's variables, is not in its form.
        """
        given = dict(os.environ if environ is None else environ)
        self._named = platform or given.get("MIZZEN_PLATFORM") or None
        # A task of another agent may be an agent itself: whose grace that is says nothing of this machine.
        given.pop("MIZZEN_GRACE_S", None)
        self._environ = {**given, "MIZZEN_PLATFORM": "" if self._named == DETECT else self._named or "sigterm"}
        self._watcher: Watcher | None = None if self._named == DETECT else from_environment(self._environ)
        self.current: NoticeReport | None = None
        """The most urgent notice of a certain end; None: there was none."""
        self.heard = asyncio.Event()
        """Set when there is something new to tell; whoever waits for it clears it."""
        self._notice: Notice | None = None
        self._of_runs: dict[str, NoticeReport] = {}

    @property
    def prior(self) -> str | None:
        """The name by which tasks find out how often this platform interrupts (`mizzen.cadence`); None: not known."""
        name = self._named if self._named != DETECT else self._watcher and self._watcher.platform
        name = OF_NOTICES.get(name, name) if name else None
        return name if name in PRIORS and name != "unknown" else None

    async def run(self) -> None:
        """Polls the platform for as long as it is wanted; ends at once where there is nothing to poll."""
        if self._watcher is None:
            self._watcher = await asyncio.to_thread(detect, self._environ)
            _log.info("notices of %s", self._watcher.platform)
        watcher, failures = self._watcher, 0
        while watcher.period_s is not None:
            try:
                self._take(await asyncio.to_thread(watcher.poll))
                failures = 0
            except Exception as error:  # whatever a metadata server answers must not end the agent
                failures += 1
                if failures == 1:
                    _log.warning("notices of %s cannot be read, and will be asked again: %s", watcher.platform, error)
            await asyncio.sleep(backoff_s(watcher.period_s, watcher.window.seconds, failures))

    def of_run(self, run: str, notice: NoticeReport) -> None:
        """A task of `run` (`workload.attempt`) reports that the platform takes the machine."""
        if self._of_runs.get(run) != notice:
            self._of_runs[run] = notice
            self.heard.set()

    def over(self, run: str) -> None:
        """Nothing of `run` runs here any more: nobody needs its word."""
        self._of_runs.pop(run, None)

    def all(self, machine: str, incarnation: str) -> list[MachineNotice]:
        """What the machine's workflow is to be told: the machine's own notice first, then those of runs, sorted."""
        found = [] if self.current is None else [MachineNotice(machine, incarnation, self.current)]
        return found + [MachineNotice(machine, incarnation, self._of_runs[run], run) for run in sorted(self._of_runs)]

    def _take(self, notice: Notice | None) -> None:
        """Advice to leave is logged and no more: whoever follows it stops work that may never be interrupted."""
        before = self._notice
        if notice is None and before is not None and (before.ends_at_s or math.inf) < time.time():
            # The machine was stopped and is back, or was left in peace.
            self._notice = self.current = None
        if notice is None or not notice.supersedes(before):
            return
        self._notice = notice
        _log.warning("notice: %s says %s: %s", notice.platform, notice.kind, notice.words)
        if notice.certain:
            self.current = NoticeReport(
                notice.platform, str(notice.kind), True, notice.seen_at_s, notice.ends_at_s, notice.words
            )
            self.heard.set()
