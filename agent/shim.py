"""The shim: a small parent process of each task, which outlives the agent and records the task's exit status.

The agent's zygote (`agent.zygote`) forks the shim, in its own session. The launch arrives through a pipe, so that no
secret is written to a disk. Uses only the standard library and modules of the agent that do so. With a sandbox, the
shim is in the PID namespace of its task (`agent.sandbox`), because a process can be the subreaper only of processes in
its own namespace. The files contain the pids that the processes have on the machine, outside the namespace.
In FOLDER the shim

- holds `lock` (flock) while it lives;
- writes `pid.json` before the task runs: its own identity and the task's (pid, start time, boot id);
- is a child subreaper: processes that the task leaves running become its children, and it kills them;
- writes `exit.json` when no process of the task is left. Both files are synced to the disk;
- with a setup script, `begun` contains the time at which the script succeeded and the command began;
- starts the command again after failures, as far as the launch allows (`agent.restarts`).

A shim never starts a task in a folder with `pid.json` or `exit.json`, so a task starts at most once despite retries.

SIGTERM to the shim stops the task: the task gets SIGTERM as notice, and SIGKILL at the deadline in `stop.json`
(`deadline_boot_s`, on CLOCK_BOOTTIME), or after the launch's `grace_s` if that file does not exist. `agent.termination`
decides which of the task's processes get the SIGTERM. They may run until the deadline even if the task's first process
has ended. If this is a shell that ended by the signal, the recorded status is that of the command that it ran.
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

from agent.cgroups import join, kill_cgroup, memory_kills, memory_use, processes_in, remove_cgroup
from agent.records import reserve, write_durably, write_reserved
from agent.restarts import PAUSE_S, Restarts
from agent.sandbox import Sandbox, hold
from agent.seccomp import restrict
from agent.task_network import forward
from agent.task_setup import (
    BEGUN_FILE,
    CANNOT_RUN,
    await_setup,
    begun_at_s,
    execute,
    mark_begun,
    open_awaited,
    open_begun,
    run_setup,
)
from agent.termination import TaskNotice, read_processes

PID_FILE = "pid.json"
EXIT_FILE = "exit.json"
STOP_FILE = "stop.json"
LOCK_FILE = "lock"
_TABLES = 3
"""How often the processes are listed again while a child exists but is not found in the list."""
_WRITE_AGAIN_S = 0.25

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
WATCHED = {signal.SIGCHLD, signal.SIGTERM}
_prctl = ctypes.CDLL(None, use_errno=True).prctl


@cache
def boot_id() -> str:
    """Returns the kernel's id of this boot."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def boot_time_s() -> float:
    """Returns the seconds since boot. All processes of the machine share this clock, and it cannot be set."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def process_stat(pid: int, proc: str = "/proc") -> tuple[str, int, int] | None:
    """Returns state letter, parent pid and start time (clock ticks since boot, field 22 of `stat`) of a process.

    Returns None if the process does not exist. `proc` is `/proc` as the PID namespace sees it to which `pid` belongs.
    """
    try:
        with open(f"{proc}/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return fields[0].decode(), int(fields[1]), int(fields[19])


def process_table(proc: str = "/proc") -> dict[int, tuple[str, int, int]]:
    """Returns `process_stat` of every process, by pid."""
    pids = (int(name) for name in os.listdir(proc) if name.isdigit())
    return {pid: stat for pid in pids if (stat := process_stat(pid, proc)) is not None}


def descendants(roots: set[int], table: dict[int, tuple[str, int, int]] | None = None) -> set[int]:
    """Returns the pids of all descendants of `roots`, including zombies, without `roots` themselves."""
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
    """Makes the kernel send `signum` to this process when its parent dies."""
    _prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0)


def become_task(
    launch: dict[str, Any], shim: int, outputs: tuple[int, int], gate: tuple[int, int], sandbox: Sandbox | None
) -> NoReturn:
    """Runs in the forked child: waits until the shim has recorded the task, then executes the task's command.

    `outputs` become stdout and stderr. `gate` has the descriptors that say so, and to which this process writes its pid
    on the machine.
    """
    try:
        os.setsid()
        os.write(gate[1], os.readlink("/proc/self").encode())
        os.close(gate[1])
        for descriptor, target in zip(outputs, (1, 2), strict=True):
            os.dup2(descriptor, target)
        join(launch["limits"])
        if launch["cgroup"] is not None:
            with contextlib.suppress(OSError):  # Without the cgroup, the shim finds processes by the process tree.
                join([launch["cgroup"]])
        if os.read(gate[0], 1) != b"x":
            os._exit(CANNOT_RUN)
        os.umask(0o022)
        # Opened as the agent's user, so the setup script and the command cannot write to these files.
        begun = None if launch["setup"] is None else open_begun(launch["begun"])
        awaited = None if begun is None or launch["setup_by"] is None else open_awaited(launch["setup_by"])
        if launch["uid"] is not None:
            for descriptor in (1, 2):
                os.fchown(descriptor, launch["uid"], launch["gid"])
        isolate(launch, shim, sandbox)
        os.chdir(launch["cwd"])
        reset_signals()
        if begun is not None:
            if awaited is None:
                run_setup(launch["setup"], launch["env"], launch["shares"])
            else:
                await_setup(awaited)
            mark_begun(begun)
    except BaseException as error:
        os.write(2, f"mizzen: cannot start the task: {error}\n".encode())
        os._exit(CANNOT_RUN)
    execute(launch["argv"], launch["env"])


def isolate(launch: dict[str, Any], shim: int, sandbox: Sandbox | None) -> None:
    """Moves this process, a child of the shim, into the task's sandbox and to the task's user. It ends with the shim.

    Raises:
        OSError: the sandbox has ended, or the kernel refuses a step.
    """
    if sandbox is not None:
        sandbox.enter()
    if launch["uid"] is not None:
        os.setgroups(launch["groups"])
        os.setgid(launch["gid"])
        os.setuid(launch["uid"])
    if sandbox is not None:
        restrict()
    die_with_parent()  # After setuid, which clears it.
    if os.getppid() != shim:
        os._exit(CANNOT_RUN)


def reset_signals() -> None:
    """Gives all signals the default action, and unblocks them."""
    for number in signal.valid_signals():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, set())


class Task:
    """The running task, as its shim tracks it."""

    def __init__(self, folder: str, launch: dict[str, Any], pid: int, proc: str) -> None:
        self.folder = folder
        self.launch = launch
        self.pid = pid
        self.proc = proc
        self.status: int | None = None
        """Wait status of the task's first process (`os.waitpid`), or None while it runs."""
        self.ended: dict[int, int] = {}
        """Wait status of each process that was reaped after the notice, by pid."""
        self.deadline_s: float | None = None
        self.given: TaskNotice | None = None
        """The notice; None: there was none."""

    def reap(self) -> bool:
        """Reaps all children that have ended. Returns whether any child is left.

        Every process of the task is a descendant of a child, so if no child is left, no process of the task is left.
        """
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if self.given is not None:
                self.ended[pid] = status
            if pid == self.pid:
                self.status = status

    def alive(self) -> set[int]:
        """Returns the pids of the task and its descendants that are alive."""
        # Reading the table takes milliseconds. If a process's parents end meanwhile, the table does not show that this
        # shim has adopted it, so it is read again. The number of tries is limited, because /proc may hide processes of
        # other users.
        for _ in range(_TABLES):
            if not self.reap():
                break
            table = process_table(self.proc)
            found = {pid for pid in descendants({os.getpid()}, table) if table[pid][0] not in "ZX"}
            if found:
                return found
        return set()

    def notice(self) -> None:
        """Handles a stop: sets the deadline and sends SIGTERM (`pass_on`). If there are several stops, the earliest
        deadline applies.
        """
        deadline_s = stop_deadline_s(self.folder, float(self.launch["grace_s"]))
        self.deadline_s = deadline_s if self.deadline_s is None else min(self.deadline_s, deadline_s)
        self.pass_on()

    def pass_on(self) -> None:
        """Sends SIGTERM to the processes of the task that are due to get it (`agent.termination`)."""
        living = read_processes(descendants({os.getpid()}, process_table(self.proc)), self.proc)
        if self.given is None:
            self.given = TaskNotice(self.pid, boot_time_s())
        assert self.deadline_s is not None
        for pid in self.given.due(living, boot_time_s(), self.deadline_s):
            _signal(pid, signal.SIGTERM)
            _signal(pid, signal.SIGCONT)  # A stopped process handles SIGTERM only after it is continued.

    @property
    def was_noticed(self) -> bool:
        """Whether the task got SIGTERM. False if its first process had already ended when the stop arrived."""
        return self.given is not None and self.given.noticed

    def kill(self) -> None:
        """Sends SIGKILL to all processes of the task until none is left that this process may kill."""
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
                    continue  # A setuid program runs as another user, so only root can kill it.
                left = True
            if not left:
                return
            time.sleep(pause_s)
            pause_s = min(0.25, 2 * pause_s)

    def wait(self) -> None:
        """Waits until the task has ended. After a stop, also waits for its descendants, but at most to the deadline."""
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
                # Which processes get SIGTERM depends on the ends of others, which send the shim no signal: poll.
                timeout_s = min(timeout_s, 0.25)
            seen = signal.sigtimedwait(WATCHED, timeout_s)
            if seen is not None and seen.si_signo == signal.SIGTERM:
                self.notice()


def stop_deadline_s(folder: str, grace_s: float) -> float:
    """Returns when the task in `folder`, which is to stop, gets SIGKILL, in seconds on CLOCK_BOOTTIME."""
    try:
        with open(f"{folder}/{STOP_FILE}") as file:
            return float(json.load(file)["deadline_boot_s"])
    except (OSError, ValueError, KeyError):
        return boot_time_s() + grace_s


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def supervise(folder: str, launch: dict[str, Any], started: int) -> None:
    """Runs the task in `folder` to its end. Closes the descriptor `started` once the task is recorded.

    Returns at once if another shim holds the folder's lock, or if the task was started or stopped before.
    """
    lock = os.open(f"{folder}/{LOCK_FILE}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return  # Another shim holds the lock of this run.
    if os.path.exists(f"{folder}/{PID_FILE}") or os.path.exists(f"{folder}/{EXIT_FILE}"):
        return
    # Reserved before the task starts, so that both files can be written even if the disk is full later.
    for name in (EXIT_FILE, STOP_FILE):
        reserve(f"{folder}/{name}")
    defaults: dict[str, Any] = {"limits": [], "setup": None, "sandbox": None, "container": None}
    defaults |= {"setup_by": None, "shares": (), "restarts": {}, "lane": None, "ports": ()}
    launch = {**defaults, "begun": f"{folder}/{BEGUN_FILE}", **launch}
    if launch["container"] is not None:
        # Imported only where it is used: HTTP costs time and memory.
        from agent.containers.container_shim import NotCreated, supervise_container

        try:
            supervise_container(folder, launch, started)
        except NotCreated as error:
            print(error, file=sys.stderr, flush=True)
            os.write(started, b"0")
        return
    sandbox = None if launch["sandbox"] is None else hold(**launch["sandbox"])
    if sandbox is not None:
        if launch["ports"]:
            forward(launch["sandbox"]["folder"], launch["ports"])
        sandbox.fork_inside()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    for ignored in (signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    body: dict[str, Any] = {"boot_id": boot_id(), "started_at_s": time.time(), "cgroup": launch["cgroup"]}
    body["limits"] = launch["limits"]
    if launch["lane"] is not None:
        from agent.lane import ElementLane

        ElementLane(folder, launch, sandbox).run(body, started)
        return
    restarts, now, kills = Restarts(launch["restarts"]), launch, 0
    waiting: int | None = started
    while True:
        pid = _begin(folder, now, sandbox, body, waiting)
        if not launch["restarts"]:
            launch.pop("env")  # Do not keep secrets in memory.
        task = Task(folder, launch, pid, "/proc" if sandbox is None else sandbox.proc)
        task.wait()
        task.kill()
        task.reap()
        status = os.waitpid(pid, 0)[1] if task.status is None else task.status
        code = os.waitstatus_to_exitcode(status if task.given is None else task.given.status(status, task.ended))
        in_setup = launch["setup"] is not None and begun_at_s(launch["begun"]) is None
        if in_setup or task.given is not None or _is_stopped(folder) or (line := restarts.next(code)) is None:
            break
        output, errors = open_outputs(launch)
        os.write(errors, line.encode())
        os.close(output)
        os.close(errors)
        if signal.sigtimedwait({signal.SIGTERM}, PAUSE_S) is not None:
            break
        now, kills, waiting = launch | {"setup": None}, memory_kills(launch["limits"]), None
    memory = memory_use(launch["limits"], kills)
    for path in {*launch["limits"], *filter(None, [launch["cgroup"]])}:
        remove_cgroup(path)
    exited: dict[str, Any] = {"exit_code": code if code >= 0 else None, "signal": -code if code < 0 else None}
    exited["ended_at_s"] = time.time()
    exited["noticed"] = task.was_noticed
    if in_setup:
        exited["in_setup"] = True
    if used := restarts.used(code):
        exited["restarts"] = used
    if memory is not None and code != 0:
        exited["memory_limit_bytes"], exited["memory_peak_bytes"] = memory
    write_exit(folder, exited)
    if sandbox is not None:  # After the status, because large folders take long.
        sandbox.release()


def _begin(
    folder: str, launch: dict[str, Any], sandbox: Sandbox | None, body: dict[str, Any], started: int | None
) -> int:
    """Forks the task, records it in `body` and `pid.json`, and lets it run; returns its pid."""
    outputs, shim = open_outputs(launch), os.getpid()
    gate, opener = os.pipe()
    told, telling = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(opener)
        if started is not None:
            os.close(started)
        become_task(launch, shim, outputs, (gate, telling), sandbox)
    for descriptor in (gate, *outputs, telling):
        os.close(descriptor)
    # In a PID namespace, `getpid` and `fork` return other numbers than those of the machine.
    identities = {"shim": int(os.readlink("/proc/self")), "task": int(os.read(told, 16) or 0)}
    os.close(told)
    for name, number in identities.items():
        stat = process_stat(number)
        body[name] = {"pid": number, "start": stat[2] if stat is not None else 0}
    write_durably(f"{folder}/{PID_FILE}", body)
    os.write(opener, b"x")
    os.close(opener)
    if started is not None:
        os.close(started)
    return pid


def open_outputs(launch: dict[str, Any]) -> tuple[int, int]:
    """Opens the files for stdout and stderr, which may be the same; returns two descriptors."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    output = os.open(launch["output"], flags, 0o600)
    errors = launch.get("errors")
    return output, os.dup(output) if errors is None else os.open(errors, flags, 0o600)


def _is_stopped(folder: str) -> bool:
    """Whether a stop was requested, although the task may have ended before it got the notice."""
    return os.path.exists(f"{folder}/{STOP_FILE}")


def write_exit(folder: str, exited: dict[str, Any]) -> None:
    """Writes the exit record of a task, as soon as the disk has room."""
    while True:
        try:
            write_reserved(f"{folder}/{EXIT_FILE}", exited)
            break
        except OSError as error:  # The agent waits for the status while this process lives, so retrying is safe.
            print(f"the exit status {exited} cannot be written yet, retrying: {error}", file=sys.stderr, flush=True)
            time.sleep(_WRITE_AGAIN_S)


def main(folder: str, launch: dict[str, Any], started: int) -> None:
    """Runs the shim of the run in `folder`. Returns when its task has ended, or at once if it may not be started.

    Closes the descriptor `started` once the task is recorded. If a system call fails before that, writes its errno to
    `started`.
    """
    if "session" in launch:
        # Imported only where it is used.
        from agent.sessions.session_shim import attend

        attend(launch, started)
        return
    try:
        supervise(folder, launch, started)
    except OSError as error:
        if not os.path.exists(f"{folder}/{PID_FILE}"):  # If the file exists, `started` is closed.
            os.write(started, str(error.errno or 0).encode())
        raise
