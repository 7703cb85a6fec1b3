"""The shim: one small process above each task, which outlives the agent and keeps the task's status.

Forked by the agent's zygote (`agent.zygote`), in a session of its own, with the launch through a pipe, so that no
secret touches a disk. Standard library only, with `records`, `cgroups` and `view`, which are too. In FOLDER it

- holds `lock` (flock) for as long as it lives;
- writes `pid.json` before the task runs: its own identity and the task's (pid, start time, boot id);
- waits as a child subreaper, so that whatever the task leaves behind becomes its child and is killed;
- writes `exit.json` when nothing of the task is left. Both are synced to the disk.

A folder with `pid.json` or `exit.json` is never started again: a task starts at most once, whoever retries.

SIGTERM to the shim is the stop: the task gets SIGTERM, and SIGKILL at the deadline in `stop.json` (`deadline_boot_s`,
on CLOCK_BOOTTIME), or after the launch's `grace_s` where there is no such file. The notice goes to the top of the
task's process tree, and to a process below only when its parent is gone: a trainer whose data loaders died of the
notice could not save any more, and a launcher passes it on in its own way. A shell passes nothing on, so what it runs
is told with it. Until the deadline the task's children may finish even if its first process is gone.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import signal
import sys
import time
from functools import cache
from typing import Any, NoReturn

from agent.cgroups import join, kill_cgroup, memory_use, processes_in, remove_cgroup
from agent.records import reserve, write_durably, write_reserved
from agent.view import enter_view

PID_FILE = "pid.json"
EXIT_FILE = "exit.json"
STOP_FILE = "stop.json"
LOCK_FILE = "lock"
_WRITE_AGAIN_S = 0.25
CANNOT_RUN = 127
"""Exit code of a task whose command cannot be executed, as a shell has it."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SHELLS = {"sh", "bash", "dash", "ash", "ksh", "zsh", "busybox"}
"""Names of processes that do not pass SIGTERM on to what they run."""
_WATCHED = {signal.SIGCHLD, signal.SIGTERM}
_libc = ctypes.CDLL(None, use_errno=True)


@cache
def boot_id() -> str:
    """The kernel's id of this boot."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def boot_time_s() -> float:
    """Seconds since boot: a clock that every process of the machine shares and nobody sets."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def process_stat(pid: int) -> tuple[str, int, int] | None:
    """State letter, parent and start time (clock ticks since boot, field 22) of a process; None: there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return fields[0].decode(), int(fields[1]), int(fields[19])


def process_name(pid: int) -> str:
    """The name of a process (15 bytes at most); empty: there is none."""
    try:
        with open(f"/proc/{pid}/comm") as file:
            return file.read().rstrip("\n")
    except (OSError, ValueError):
        return ""


def process_table() -> dict[int, tuple[str, int, int]]:
    """`process_stat` of every process."""
    pids = (int(name) for name in os.listdir("/proc") if name.isdigit())
    return {pid: stat for pid in pids if (stat := process_stat(pid)) is not None}


def descendants(roots: set[int], table: dict[int, tuple[str, int, int]] | None = None) -> set[int]:
    """Children of `roots`, their children and so on, zombies included, `roots` not."""
    children: dict[int, list[int]] = {}
    for pid, (_, parent, _) in (process_table() if table is None else table).items():
        children.setdefault(parent, []).append(pid)
    found: set[int] = set()
    ahead = list(roots)
    while ahead:
        for child in children.get(ahead.pop(), ()):
            if child not in found and child not in roots:
                found.add(child)
                ahead.append(child)
    return found


def die_with_parent(signum: int = signal.SIGKILL) -> None:
    """Have the kernel send `signum` to this process when its parent dies."""
    _libc.prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0)


def _become_task(launch: dict[str, Any], shim: int, output: int, gate: int) -> NoReturn:
    """In the forked child: become the task once the shim has recorded it."""
    try:
        os.setsid()
        os.dup2(output, 1)
        os.dup2(output, 2)
        join(launch["limits"])
        if launch["cgroup"] is not None:
            with contextlib.suppress(OSError):  # The process tree is followed in any case.
                join([launch["cgroup"]])
        if os.read(gate, 1) != b"x":
            os._exit(CANNOT_RUN)
        os.umask(0o022)
        if launch["view"]:
            enter_view(launch["view"])
        if launch["uid"] is not None:
            os.fchown(1, launch["uid"], launch["gid"])
            os.setgroups(launch["groups"])
            os.setgid(launch["gid"])
            os.setuid(launch["uid"])
        die_with_parent()  # After setuid, which clears it.
        if os.getppid() != shim:
            os._exit(CANNOT_RUN)
        os.chdir(launch["cwd"])
        for number in signal.valid_signals():
            if signal.getsignal(number) is signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, set())
        os.execvpe(launch["argv"][0], launch["argv"], launch["env"])
    except BaseException as error:
        os.write(2, f"mizzen: cannot run {launch['argv'][0]!r}: {error}\n".encode())
    os._exit(CANNOT_RUN)


class _Task:
    """The running task, seen from its shim."""

    def __init__(self, folder: str, launch: dict[str, Any], pid: int) -> None:
        self.folder = folder
        self.launch = launch
        self.pid = pid
        self.status: int | None = None
        """How it ended, as `os.waitpid` has it; None: it has not."""
        self.deadline_s: float | None = None
        self.noticed: set[tuple[int, int]] = set()
        """Pid and start time of those that got the notice."""

    def reap(self) -> bool:
        """Bury what died, the task among it; whether a child is left.

        Every descendant is a child's, or a child: where none is left, nothing of the task is.
        """
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self.pid:
                self.status = status

    def alive(self) -> set[int]:
        """What lives of the task and its descendants."""
        if not self.reap():
            return set()  # A look at every process of the machine costs milliseconds.
        table = process_table()
        return {pid for pid in descendants({os.getpid()}, table) if table[pid][0] not in "ZX"}

    def notice(self) -> None:
        """SIGTERM to the top of the tree the first time (`pass_on`); the earliest deadline counts."""
        try:
            with open(f"{self.folder}/{STOP_FILE}") as file:
                deadline_s = float(json.load(file)["deadline_boot_s"])
        except (OSError, ValueError, KeyError):
            deadline_s = boot_time_s() + float(self.launch["grace_s"])
        self.deadline_s = deadline_s if self.deadline_s is None else min(self.deadline_s, deadline_s)
        self.pass_on()

    def pass_on(self) -> None:
        """SIGTERM, once each, to those at the top of the task's tree: the task, and whoever lost its parent.

        Where one of them is a shell, to its children too: it dies of the notice, or waits for them without a word.
        """
        table = process_table()
        children: dict[int, list[int]] = {}
        for pid, (_, parent, _) in table.items():
            children.setdefault(parent, []).append(pid)
        ahead = sorted(children.get(os.getpid(), ()))
        while ahead:
            pid = ahead.pop(0)
            state, _, start = table[pid]
            if state in "ZX":
                continue
            if process_name(pid) in _SHELLS:
                ahead += sorted(children.get(pid, ()))
            if (pid, start) not in self.noticed:
                self.noticed.add((pid, start))
                _signal(pid, signal.SIGTERM)
                _signal(pid, signal.SIGCONT)  # A stopped process would not see the notice.

    @property
    def was_noticed(self) -> bool:
        """Whether the task was given the notice before it ended; a notice may come when it has ended by itself."""
        return any(pid == self.pid for pid, _ in self.noticed)

    def kill(self) -> None:
        """SIGKILL to everything, until nothing is left that may be killed."""
        limits = self.launch["limits"]
        if self.launch["cgroup"] is not None:
            kill_cgroup(self.launch["cgroup"])
        pause_s = 0.005
        while True:
            left = False
            for pid in self.alive() | processes_in(limits):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
                except PermissionError:
                    continue  # A setuid program of another user: nobody but root can end it.
                left = True
            if not left:
                return
            time.sleep(pause_s)
            pause_s = min(0.25, 2 * pause_s)

    def wait(self) -> None:
        """Until the task has ended, and, where it was told to stop, its children too or the deadline came."""
        while True:
            self.reap()
            if self.status is not None and (self.deadline_s is None or not self.alive()):
                return
            timeout_s = 3600.0
            if self.deadline_s is not None:
                timeout_s = self.deadline_s - boot_time_s()
                if timeout_s <= 0:
                    return
                self.pass_on()
                # Who dies below the top sends us no signal, and leaves children that do not know yet.
                timeout_s = min(timeout_s, 0.25)
            seen = signal.sigtimedwait(_WATCHED, timeout_s)
            if seen is not None and seen.si_signo == signal.SIGTERM:
                self.notice()


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def supervise(folder: str, launch: dict[str, Any], started: int) -> None:
    """Run the task in `folder` to its end. Closes the descriptor `started` once it is recorded."""
    lock = os.open(f"{folder}/{LOCK_FILE}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return  # Another shim has this run.
    if os.path.exists(f"{folder}/{PID_FILE}") or os.path.exists(f"{folder}/{EXIT_FILE}"):
        return
    # Before anything runs: how it ends must be told, however full the disk is by then.
    for name in (EXIT_FILE, STOP_FILE):
        reserve(f"{folder}/{name}")
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    for ignored in (signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    shim = os.getpid()
    for name, value in (("limits", []), ("view", {})):
        launch.setdefault(name, value)
    output = os.open(launch["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    gate, opener = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(opener)
        os.close(started)
        _become_task(launch, shim, output, gate)
    os.close(gate)
    os.close(output)
    identities = {"shim": shim, "task": pid}
    body: dict[str, Any] = {"boot_id": boot_id(), "started_at_s": time.time(), "cgroup": launch["cgroup"]}
    body["limits"] = launch["limits"]
    for name, number in identities.items():
        stat = process_stat(number)
        body[name] = {"pid": number, "start": stat[2] if stat is not None else 0}
    write_durably(f"{folder}/{PID_FILE}", body)
    os.write(opener, b"x")
    os.close(opener)
    os.close(started)
    launch.pop("env")  # Secrets need not stay in memory.
    task = _Task(folder, launch, pid)
    task.wait()
    task.kill()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1] if task.status is None else task.status)
    memory = memory_use(launch["limits"])
    for path in {*launch["limits"], *filter(None, [launch["cgroup"]])}:
        remove_cgroup(path)
    exited: dict[str, Any] = {"exit_code": code if code >= 0 else None, "signal": -code if code < 0 else None}
    exited["ended_at_s"] = time.time()
    exited["noticed"] = task.was_noticed
    if memory is not None and code != 0:
        exited["memory_limit_bytes"], exited["memory_peak_bytes"] = memory
    while True:
        try:
            write_reserved(f"{folder}/{EXIT_FILE}", exited)
            return
        except OSError as error:  # While this process lives, the agent waits for the status.
            print(f"the exit status {exited} is not on the disk yet: {error}", file=sys.stderr, flush=True)
            time.sleep(_WRITE_AGAIN_S)


def main(folder: str, launch: dict[str, Any], started: int) -> None:
    """Be the shim of the run in `folder`: to the end of its task, or until it is refused.

    Closes the descriptor `started` once the task is recorded; writes the errno of a system call that failed before.
    """
    try:
        supervise(folder, launch, started)
    except OSError as error:
        if not os.path.exists(f"{folder}/{PID_FILE}"):  # Else `started` is closed.
            os.write(started, str(error.errno or 0).encode())
        raise
