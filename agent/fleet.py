"""Several machines on one computer: a process for each, forked from one that has imported everything.

Importing Temporal's SDK costs a second and 60 MB; a fork shares both. Each machine stays a process of its own with a
state folder of its own, so its death is real (`power_off`) and costs the others nothing.
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
from agent.processes import kill_until_gone, with_run_ids
from agent.state import POWERED_OFF, StateFolder
from infra.config import TemporalSettings
from infra.exits import end_process
from infra.liveness_pipe import LOOP, REPORT_INTERVAL_S, LivenessListener, LivenessReporter

_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}
_MAX_RESTART_PAUSE_S = 10.0
_STEADY_S = 30.0
"""An agent that lived for so long is started again without a pause."""
_STOP_PATIENCE_S = 20.0
_STUCK_AFTER_S = 30.0
_FIRST_SIGN_S = 120.0
"""An agent may need so long from its start to its first sign of life."""
_HELD_UP_S = 2.0
_POLL_S = 0.25
_log = logging.getLogger(__name__)


@dataclass
class _Child:
    config: AgentConfig
    pid: int | None = None
    started_s: float = 0.0
    due_s: float = 0.0
    """When it may be started again (monotonic)."""
    failures: int = 0
    listener: LivenessListener = field(default_factory=LivenessListener)
    heard_s: float = 0.0
    """When it last gave a sign of life (monotonic), or was started."""
    speaks: bool = False
    """It has given a sign since its start."""

    wanted: bool = True
    """False: its machine is gone for good."""

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
    """Run the agents of several machines until SIGTERM or SIGINT; their tasks go on. Blocks; call it in a process of
    its own, with one thread, before anything has connected to Temporal.

    An agent that dies, or gives no sign of life for `stuck_after_s`, is started again, unless its machine was powered
    off; then it is, once it is powered on. The agents end with this process, however it ends.

    Args:
        configs: machines that are always there.
        temporal: where agents dial.
        launched: is asked all the time which other machines there are. One that it does not name any more is gone: its
            processes are killed, and its state folder is removed.
        stuck_after_s: see above.

    Raises:
        ValueError: two machines share a name or a state folder.
    """
    for name in ("machine", "state_dir"):
        if len({str(getattr(config, name)) for config in configs}) < len(configs):
            raise ValueError(f"{name}: two machines have the same")
    if any(config.bucket_url is None or config.bucket_url.startswith("s3:") for config in configs):
        import mizzen.objects.s3  # noqa: F401 - so that the forks share it
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    gc.collect()
    gc.freeze()  # What is never looked at is never copied.
    children = [_Child(config) for config in configs]
    always = {config.machine for config in configs}
    try:
        stopping = False
        reporter = LivenessReporter.inherited()
        while not stopping:
            reporter.report()
            if launched is not None:
                _follow(children, launched, always)
            for child in children:
                if child.pid is None and child.wanted and not child.off and time.monotonic() >= child.due_s:
                    _start(child, temporal)
            idle = all(child.pid is not None for child in children) and launched is None
            pause_s = REPORT_INTERVAL_S if idle else REPORT_INTERVAL_S / 2
            began_s = time.monotonic()
            stopping = _next_signal(_SIGNALS, pause_s) not in (None, signal.SIGCHLD)
            _reap(children)
            # Time in which this process was itself stopped or starved is no agent's.
            _kill_stuck(children, stuck_after_s, held_up=time.monotonic() - began_s > pause_s + _HELD_UP_S)
    finally:
        _stop(children)


def _follow(children: list[_Child], launched: Callable[[], Sequence[AgentConfig]], always: Collection[str]) -> None:
    """Adds agents for machines that were launched, and kills everything of machines that are gone."""
    try:
        there = {config.machine: config for config in launched()}
    except Exception as error:  # whatever is wrong with one source of machines, the others' agents go on
        _log.warning("machines that were launched: %s; looked for again", error)
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
    """The first of these blocked signals that comes in time.

    It polls: if this process is stopped while `sigtimedwait` waits, and continued after the time-out, CPython returns
    a signal that never came.
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
    """Kills agents that are stopped or stuck; their tasks go on, and the next agent finds them."""
    now_s = time.monotonic()
    for child in children:
        if child.pid is None:
            continue
        if child.listener.take(LOOP):
            child.heard_s, child.speaks = now_s, True
        elif held_up:
            child.heard_s = now_s
        elif now_s - child.heard_s > (stuck_after_s if child.speaks else max(stuck_after_s, _FIRST_SIGN_S)):
            _log.warning("agent of %s (pid %d) gives no sign of life; killing it", child.config.machine, child.pid)
            child.heard_s = now_s
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)


def _kill_stopped_predecessor(child: _Child) -> None:
    """An agent of an earlier, killed parent that is stopped by a signal would keep the machine's folder for ever."""
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
        os.setpgid(0, 0)  # A Ctrl-C is the parent's to pass on.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        if os.getppid() == parent:
            run_agent(child.config, temporal, LivenessReporter(child.listener.writing))
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
                _log.log(level, "agent of %s (pid %d) ended with %d", child.config.machine, pid, how)


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
    """The machine dies without notice: its agent, every shim and every task of it get SIGKILL at once.

    No status is written and no log is finished. Its next boot is another incarnation. For demonstrations and tests of
    machines that share a computer; returns when nothing of it runs.
    """
    state = StateFolder(state_dir)
    (state.path / POWERED_OFF).touch()
    runs = [run for attempt in state.attempts() for run in attempt.runs()]
    run_ids = {run.run_id for run in runs}
    known = {identity for run in runs for identity in run.identities() or ()}
    agent = state.agent()
    if agent is not None:
        agent.send(signal.SIGSTOP)  # So that it starts nothing while it is being looked at.

    def alive() -> set[int]:
        roots = {identity.pid for identity in (*known, *([agent] if agent else ())) if identity.alive()}
        return roots | shim.descendants(roots) | with_run_ids(run_ids)

    left = kill_until_gone(alive)
    if left:
        raise PermissionError(f"power_off {state_dir}: processes {sorted(left)} could not be killed")
    for run in runs:
        for path in run.cgroups():
            cgroups.remove_cgroup(path)
    (state.path / "incarnation").unlink(missing_ok=True)


def end_machine(state_dir: Path) -> bool:
    """The machine is gone for good, with its folder; False: something of it could not be killed, try again."""
    try:
        if state_dir.is_dir():
            power_off(state_dir)
            shutil.rmtree(state_dir, ignore_errors=True)
    except OSError as error:
        _log.warning("machine in %s cannot be ended now: %s", state_dir, error)
        return False
    return True


def power_on(state_dir: Path) -> None:
    """Let the agent of a machine that was powered off be started again, as a new incarnation."""
    (state_dir / POWERED_OFF).unlink(missing_ok=True)
