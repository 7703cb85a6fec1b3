"""Several machines on one computer: a process for each, forked from one that has imported everything.

Importing Temporal's SDK costs a second and 60 MB; a fork shares both. Each machine stays a process of its own with a
state folder of its own, so its death is real (`power_off`) and costs the others nothing.
"""

import contextlib
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agent import shim
from agent.config import AgentConfig
from agent.host import run_agent
from agent.processes import kill_until_gone, with_run_ids
from agent.state import POWERED_OFF, StateFolder
from infra.config import TemporalSettings

_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}
_MAX_RESTART_PAUSE_S = 10.0
_STEADY_S = 30.0
"""An agent that lived for so long is started again without a pause."""
_STOP_PATIENCE_S = 20.0
_log = logging.getLogger(__name__)


@dataclass
class _Child:
    config: AgentConfig
    pid: int | None = None
    started_s: float = 0.0
    due_s: float = 0.0
    """When it may be started again (monotonic)."""
    failures: int = 0

    @property
    def off(self) -> bool:
        return (self.config.state_dir / POWERED_OFF).exists()


def serve_many(configs: Sequence[AgentConfig], temporal: TemporalSettings) -> None:
    """Run the agents of several machines until SIGTERM or SIGINT; their tasks go on. Blocks; call it in a process of
    its own, with one thread, before anything has connected to Temporal.

    An agent that dies is started again, unless its machine was powered off; then it is, once it is powered on. The
    agents end with this process, however it ends.

    Raises:
        ValueError: two machines share a name or a state folder.
    """
    for field in ("machine", "state_dir"):
        if len({str(getattr(config, field)) for config in configs}) < len(configs):
            raise ValueError(f"{field}: two machines have the same")
    if any(config.bucket_url is None or config.bucket_url.startswith("s3:") for config in configs):
        import mizzen.objects.s3  # noqa: F401 - so that the forks share it
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    gc.collect()
    gc.freeze()  # What is never looked at is never copied.
    children = [_Child(config) for config in configs]
    try:
        stopping = False
        while not stopping:
            for child in children:
                if child.pid is None and not child.off and time.monotonic() >= child.due_s:
                    _start(child, temporal)
            # With all of them up there is nothing to look at until a signal comes.
            idle = all(child.pid is not None for child in children)
            seen = signal.sigtimedwait(_SIGNALS, 3600.0 if idle else 0.5)
            stopping = seen is not None and seen.si_signo != signal.SIGCHLD
            _reap(children)
    finally:
        _stop(children)


def _start(child: _Child, temporal: TemporalSettings) -> None:
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
            run_agent(child.config, temporal)
        code = 0
    except BaseException:
        _log.exception("agent of %s", child.config.machine)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # Without waiting for a bucket that does not answer.


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
        signal.sigtimedwait({signal.SIGCHLD}, 0.5)
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
        cgroup = run.cgroup()
        if cgroup is not None:
            shim.remove_cgroup(cgroup)
    (state.path / "incarnation").unlink(missing_ok=True)


def power_on(state_dir: Path) -> None:
    """Let the agent of a machine that was powered off be started again, as a new incarnation."""
    (state_dir / POWERED_OFF).unlink(missing_ok=True)
