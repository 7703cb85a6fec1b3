"""Runs the agents of several machines on one computer, each in a process forked from one parent.

Importing Temporal's SDK takes a second and 60 MB, which the forks share. Each machine has its own process and its own
state folder, so one machine can be killed (`power_off`) without affecting the others.
"""

import contextlib
import gc
import logging
import os
import shutil
import signal
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agent import cgroups, shim
from agent.config import AgentConfig
from agent.host import run_agent
from agent.memory_servers import end_servers
from agent.processes import kill_until_gone, with_run_ids
from agent.state import POWERED_OFF, StateFolder
from infra.config.services import TemporalSettings
from infra.liveness_pipe import LOOP, REPORT_INTERVAL_S, LivenessListener, LivenessReporter
from infra.process_exit import end_process, stop_signals

_SIGNALS = {*stop_signals(), signal.SIGCHLD}
_MAX_RESTART_PAUSE_S = 10.0
_STEADY_S = 30.0
"""An agent that ran for longer than this is restarted without backoff."""
_STOP_PATIENCE_S = 20.0
_STUCK_AFTER_S = 30.0
_FIRST_SIGN_S = 120.0
"""Minimum time from an agent's start to its first liveness sign before it counts as stuck."""
_HELD_UP_S = 2.0
_POLL_S = 0.25
_log = logging.getLogger(__name__)


@dataclass
class _Child:
    config: AgentConfig
    pid: int | None = None
    started_s: float = 0.0
    due_s: float = 0.0
    """Earliest time at which the agent may be restarted (monotonic)."""
    failures: int = 0
    listener: LivenessListener = field(default_factory=LivenessListener)
    heard_s: float = 0.0
    """Time of the agent's last liveness sign, or of its start (monotonic)."""
    speaks: bool = False
    """Whether the agent has sent a liveness sign since its start."""

    wanted: bool = True
    """False if the machine is gone for good."""

    @property
    def off(self) -> bool:
        return (self.config.state_dir / POWERED_OFF).exists()


def serve_many(
    configs: Sequence[AgentConfig],
    temporal: TemporalSettings,
    *,
    launched: Callable[[], Sequence[AgentConfig]] | None = None,
    stuck_after_s: float = _STUCK_AFTER_S,
) -> None:
    """Runs the agents of several machines until SIGTERM, SIGINT or SIGHUP. Their tasks continue.

    Blocks. Must be called in a separate process with one thread, before anything connects to Temporal. An agent is
    restarted if it dies or sends no liveness sign for `stuck_after_s`. The agent of a machine that was powered off is
    restarted when the machine is powered on. When this process ends for any reason, the agents end, too.

    Args:
        configs: the permanent machines.
        temporal: connection settings of the agents.
        launched: returns the launched machines, and is called repeatedly. If a machine disappears from the result, its
            processes are killed and its state folder is removed.
        stuck_after_s: time without a liveness sign, in seconds, after which an agent is killed and restarted.

    Raises:
        ValueError: two machines have the same name or state folder.
    """
    for name in ("machine", "state_dir"):
        if len({str(getattr(config, name)) for config in configs}) < len(configs):
            raise ValueError(f"{name}: must be different for each machine")
    if any(config.bucket_url is None or config.bucket_url.startswith("s3:") for config in configs):
        import mizzen.objects.s3  # noqa: F401 - imported here so that the forks share it
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    gc.collect()
    gc.freeze()  # The collector then does not write to shared pages, which would copy them in each fork.
    children = [_Child(config) for config in configs]
    always = {config.machine for config in configs}
    try:
        stopping = False
        reporter = LivenessReporter.inherited()
        while not stopping:
            reporter.report()
            if launched is not None:
                _update(children, launched, always)
            for child in children:
                if child.pid is None and child.wanted and not child.off and time.monotonic() >= child.due_s:
                    _start(child, temporal)
            idle = all(child.pid is not None for child in children) and launched is None
            pause_s = REPORT_INTERVAL_S if idle else REPORT_INTERVAL_S / 2
            began_s = time.monotonic()
            stopping = _next_signal(_SIGNALS, pause_s) not in (None, signal.SIGCHLD)
            _reap(children)
            # Time during which this process was stopped or got no CPU does not count against the agents.
            _kill_stuck(children, stuck_after_s, held_up=time.monotonic() - began_s > pause_s + _HELD_UP_S)
    finally:
        _stop(children)


def _update(children: list[_Child], launched: Callable[[], Sequence[AgentConfig]], always: Collection[str]) -> None:
    """Adds agents for new machines in `launched`, and ends the machines that are not in it any more."""
    try:
        there = {config.machine: config for config in launched()}
    except Exception as error:  # A failure of `launched` must not stop the other agents.
        _log.warning("cannot list the launched machines, retrying: %s", error)
        return
    known = {child.config.machine for child in children}
    children += [_Child(config) for machine, config in there.items() if machine not in known]
    for child in list(children):
        if child.config.machine in always or child.config.machine in there:
            continue
        child.wanted = False
        if end_machine(child.config.state_dir) and child.pid is None:
            children.remove(child)


def _next_signal(signals: set[signal.Signals], timeout_s: float) -> int | None:
    """Returns the first pending signal in `signals`, all of which must be blocked, or None after `timeout_s`.

    Polls instead of waiting in `sigtimedwait`: if the process is stopped during the wait and continued after the
    timeout, CPython returns a signal that never arrived.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        seen = signal.sigtimedwait(signals, 0)
        if seen is not None:
            return seen.si_signo
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            return None
        time.sleep(min(_POLL_S, left_s))


def _kill_stuck(children: list[_Child], stuck_after_s: float, *, held_up: bool) -> None:
    """Kills agents that sent no liveness sign in time. Their tasks continue, and the next agent re-attaches to them.

    If `held_up`, this process was itself delayed, so the time without signs starts again.
    """
    now_s = time.monotonic()
    for child in children:
        if child.pid is None:
            continue
        if child.listener.take(LOOP):
            child.heard_s, child.speaks = now_s, True
        elif held_up:
            child.heard_s = now_s
        elif now_s - child.heard_s > (stuck_after_s if child.speaks else max(stuck_after_s, _FIRST_SIGN_S)):
            _log.warning("agent of %s (pid %d) sends no liveness signs; killing it", child.config.machine, child.pid)
            child.heard_s = now_s
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)


def _kill_stopped_predecessor(child: _Child) -> None:
    """Kills an agent of an earlier parent process if it is stopped by a signal: it would hold the folder's lock."""
    other = StateFolder(child.config.state_dir).agent()
    if other is None or not other.alive():
        return
    stat = shim.process_stat(other.pid)
    if stat is not None and stat[0] in "Tt":
        _log.warning("agent of %s (pid %d) of an earlier run is stopped; killing it", child.config.machine, other.pid)
        other.send(signal.SIGKILL)


def _start(child: _Child, temporal: TemporalSettings) -> None:
    _kill_stopped_predecessor(child)
    child.listener.clear()
    child.heard_s, child.speaks = time.monotonic(), False
    parent = os.getpid()
    pid = os.fork()
    if pid != 0:
        child.pid, child.started_s = pid, time.monotonic()
        return
    code = 1
    try:
        shim.die_with_parent(signal.SIGTERM)
        os.setpgid(0, 0)  # Ctrl-C then reaches only the parent, which forwards it.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        if os.getppid() == parent:
            own = {"api_key": child.config.machine_key} if child.config.machine_key else {}
            run_agent(child.config, temporal.model_copy(update=own), LivenessReporter(child.listener.writing))
        code = 0
    except BaseException:
        _log.exception("agent of %s", child.config.machine)
    finally:
        end_process(code)


def _reap(children: list[_Child]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        for child in children:
            if child.pid == pid:
                now_s = time.monotonic()
                child.pid = None
                child.failures = 0 if now_s - child.started_s > _STEADY_S else child.failures + 1
                pause_s = min(_MAX_RESTART_PAUSE_S, 0.25 * 2**child.failures) if child.failures > 1 else 0.0
                child.due_s = now_s + pause_s
                how = os.waitstatus_to_exitcode(status)
                level = logging.INFO if how == 0 else logging.WARNING
                _log.log(level, "agent of %s (pid %d) ended with exit code %d", child.config.machine, pid, how)


def _stop(children: list[_Child]) -> None:
    for child in children:
        if child.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGTERM)
    give_up_s = time.monotonic() + _STOP_PATIENCE_S
    while any(child.pid is not None for child in children):
        _next_signal({signal.SIGCHLD}, 0.5)
        if time.monotonic() > give_up_s:
            for child in children:
                if child.pid is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(child.pid, signal.SIGKILL)
        _reap(children)


def power_off(state_dir: Path) -> None:
    """Simulates a power failure of a machine: kills its agent, shims and tasks with SIGKILL at once.

    No exit status is written, and output that was not shipped stays on the disk. The next boot has a new incarnation.
    Used in demonstrations and tests with several machines on one computer. Returns when none of the processes runs.

    Raises:
        PermissionError: some processes could not be killed.
    """
    state = StateFolder(state_dir)
    (state.path / POWERED_OFF).touch()
    runs = [run for attempt in state.attempts() for run in attempt.runs()]
    run_ids = {run.run_id for run in runs}
    known = {identity for run in runs for identity in run.identities() or ()}
    agent = state.agent()
    if agent is not None:
        agent.send(signal.SIGSTOP)  # A stopped agent cannot start a task while its processes are listed.

    def alive() -> set[int]:
        roots = {identity.pid for identity in (*known, *([agent] if agent else ())) if identity.alive()}
        return roots | shim.descendants(roots) | with_run_ids(run_ids)

    left = kill_until_gone(alive)
    if left:
        raise PermissionError(f"power_off {state_dir}: processes {sorted(left)} could not be killed")
    for run in runs:
        for path in run.cgroups():
            cgroups.remove_cgroup(path)
    state.clear_private()
    end_servers(state)
    (state.path / "incarnation").unlink(missing_ok=True)


def end_machine(state_dir: Path) -> bool:
    """Kills all processes of a machine and removes its state folder. Returns False if that failed; call it again."""
    try:
        if state_dir.is_dir():
            power_off(state_dir)
            shutil.rmtree(state_dir, ignore_errors=True)
    except OSError as error:
        _log.warning("machine with state folder %s cannot be ended now: %s", state_dir, error)
        return False
    return True
