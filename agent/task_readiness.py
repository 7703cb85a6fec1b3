"""The readiness of a task that serves requests: its port, its probes, and the state that survives agent restarts.

    serving.json    readiness of the task, in its folder; written when the readiness changes

An agent that re-attaches to a task continues with the stored readiness: a ready task stays ready until
`ProbeSpec.failures` probes in a row have failed.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from agent import records
from agent.http_probe import ProbeResult, probe
from agent.port_maps import map_port
from agent.ports import SERVING, Ports
from agent.record_files import read_sound
from agent.state import AttemptFolder
from agent.task_setup import begun_at_s
from agent.tasks import RunFolder
from domain.serving_spec import ProbeSpec
from domain.task_reports import NotReadyReport, ServingReport

_FILE = "serving.json"
_FIRST_PAUSE_S = 0.2
"""Shortest time between two probes of a task, whatever its interval."""
_LONGEST_PAUSE_S = 1.0
"""Time between two probes of a task that is not ready: it grows from `_FIRST_PAUSE_S` to this."""
_SETUP_PAUSE_S = 0.2
_IN_SETUP = "its setup has not ended"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Port:
    """The port of a task that serves requests."""

    inside: int
    """The port on which the task listens, its `MIZZEN_PORT`."""
    outside: int
    """The port of the machine on which the task can be reached."""


def open_port(
    attempt: AttemptFolder,
    fixed: int | None,
    ports: Ports,
    cgroup: str | None,
    *,
    own_network: bool = False,
) -> Port:
    """Reserves the port of an attempt's task that serves. Must be called before the task starts. Idempotent.

    A `fixed` port is mapped to a port in the range by the task's `own_network`, or if this agent may do that with the
    task's `cgroup`. Otherwise the task gets the fixed port of the machine itself.

    Raises:
        NoFreePort: no port in the range is free.
        PortTaken: the fixed port cannot be mapped, and is in use.
    """
    if fixed is None:
        port = ports.reserve(attempt, [SERVING])[SERVING]
        return Port(port, port)
    if own_network:
        return Port(fixed, ports.reserve(attempt, [SERVING])[SERVING])
    if cgroup is not None:
        outside = ports.reserve(attempt, [SERVING])[SERVING]
        try:
            map_port(cgroup, fixed, outside)
        except OSError as error:
            _log.info("port %d of %s is not mapped: %s", fixed, attempt.key, error)
        else:
            return Port(fixed, outside)
    ports.reserve_fixed(attempt, fixed)
    return Port(fixed, fixed)


@dataclass(frozen=True)
class _Stored:
    """The content of `serving.json`."""

    ready: bool
    since_s: float
    error: str | None = None
    was_ready: bool = False
    """Whether the task has been ready at any time."""
    unready: dict[str, Any] | None = None
    """`NotReadyReport`, if the agent stops the task because it did not become ready in time."""


def _read(run: RunFolder) -> _Stored | None:
    body = read_sound(run.path / _FILE)
    return _Stored(**body) if body else None


def never_ready(run: RunFolder) -> NotReadyReport | None:
    """Returns why the agent stopped the task, if it did so because the task had not become ready in time."""
    stored = _read(run)
    return None if stored is None or stored.unready is None else NotReadyReport(**stored.unready)


class Readiness:
    """Probes one task that serves requests, and keeps its readiness."""

    def __init__(self, run: RunFolder, spec: ProbeSpec, address: str, port: int, *, has_setup: bool) -> None:
        """`address` and `port` are where clients reach the task; the probes use the same."""
        self._run = run
        self._spec = spec
        self._address = address
        self._port = port
        self._has_setup = has_setup
        self._interval_s = max(_FIRST_PAUSE_S, spec.interval_s)
        self._started_at_s = run.started_at_s() or time.time()
        self._state = _read(run) or _Stored(ready=False, since_s=self._started_at_s)
        self._load: float | None = None

    @property
    def report(self) -> ServingReport:
        """The task's address and its readiness, for heartbeats."""
        state = self._state
        return ServingReport(self._address, self._port, state.ready, state.since_s, state.error, self._load)

    @property
    def given_up(self) -> bool:
        """Whether the task must be stopped, because it did not become ready in time. Survives restarts of the agent."""
        return self._state.unready is not None

    async def keep(self, changed: Callable[[], None]) -> None:
        """Probes the task until cancelled, or until `given_up`. Calls `changed` when the readiness has changed."""
        # The monotonic clock, because the time of day can be set while this waits.
        left_s = min(self._spec.initial_delay_s, self._started_at_s + self._spec.initial_delay_s - time.time())
        give_up_s = time.monotonic() + left_s
        pause_s, failures = _FIRST_PAUSE_S, 0
        while not self.given_up:
            in_setup = self._in_setup()
            result = await probe(self._address, self._port, self._spec) if not in_setup else ProbeResult(_IN_SETUP)
            error, self._load = result
            failures = 0 if error is None else failures + 1
            ready = error is None or (self._state.ready and failures < self._spec.failures)
            if ready != self._state.ready:
                await self._change(ready, error)
                changed()
            else:
                self._state = replace(self._state, error=error)
            if error is not None and not self._state.was_ready and time.monotonic() >= give_up_s:
                await self._give_up(error)
            if in_setup:
                await asyncio.sleep(_SETUP_PAUSE_S)
            elif ready:
                pause_s = _FIRST_PAUSE_S
                await asyncio.sleep(self._interval_s)
            else:
                await asyncio.sleep(min(pause_s, self._interval_s))
                pause_s = min(_LONGEST_PAUSE_S, 1.5 * pause_s)

    def _in_setup(self) -> bool:
        return self._has_setup and begun_at_s(str(self._run.begun)) is None

    async def _change(self, ready: bool, error: str | None) -> None:
        self._state = replace(
            self._state, ready=ready, since_s=time.time(), error=error, was_ready=self._state.was_ready or ready
        )
        try:
            await self._write(self._state)
        except OSError as failure:  # For example a full disk. Only an agent that re-attaches needs the file.
            _log.warning("readiness of %s cannot be written: %s", self._run.run_id, failure)

    async def _give_up(self, error: str) -> None:
        """Records that the task is stopped because it was not ready in time, unless another stop was requested.

        If the record cannot be written, the task continues, because its end could be mistaken for a success.
        """
        if self._run.stop() is not None:
            return
        unready = replace(self._state, error=error, unready=asdict(NotReadyReport(self._spec.initial_delay_s, error)))
        try:
            await self._write(unready)
        except OSError as failure:
            _log.warning("the end of %s cannot be recorded yet, retrying: %s", self._run.run_id, failure)
        else:
            self._state = unready

    async def _write(self, state: _Stored) -> None:
        await asyncio.to_thread(records.write_durably, str(self._run.path / _FILE), asdict(state))
