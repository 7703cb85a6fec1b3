"""One task of one attempt on this machine: its folder, and functions that start it, read its state and stop it.

    lock, pid.json, exit.json, stop.json    state shared by agent and shim (`agent.shim`)
    output.log                              standard output and error of the task
    errors.log                              its standard error, if the document says `output: separate`
    shim.log                                errors of the shim
    script.sh, setup.sh                     the job's script and its setup script, if it has them
    begun                                   when the command began, after the setup script (`agent.task_setup`)
    work/                                   working directory and HOME; owned by the task's user
    report/report.json                      the task's report; the folder is owned by the task's user
    interval.json                           how often the task should save, if a coordinator decides it
    credentials/                            credentials of the task for its buckets (`agent.credentials`)
    session                                 its time is when a session was last open (`agent.sessions`)
    disk.json                               why the task was stopped, if its attempt used up the disk (`agent.disk`)
    serving.json                            readiness of a task that serves requests (`agent.task_readiness`)
    ship.json                               how much of the output was shipped (`agent.logs`)

The folder contains all state of the task, so any agent process can continue with it. The functions block for a few
milliseconds unless their docstring says otherwise.
"""

import contextlib
import errno
import fcntl
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import Any

from agent import cgroups, records, sandbox, shim
from agent.containers.engine import EngineError, open_engine
from agent.launch import TaskLaunch
from agent.processes import ProcessIdentity, holder_of, kill_until_gone, with_run_ids
from agent.record_files import read_sound
from agent.task_setup import BEGUN_FILE
from agent.zygote_client import NoZygote, start_shim
from domain.ids import run_id
from domain.spec import MountSpec

_STARTING_S = 10.0
"""Timeout for a shim that holds the lock to record its task."""
BACKSTOP_S = 5.0
"""If a task still runs this long after the deadline of its stop, the agent kills it without its shim."""


class NotStarted(Exception):
    """The task was not started. The message contains the shim's error output, if there is any."""


class TaskState(Enum):
    """State of a task on this machine."""

    ABSENT = "absent"
    """The task was not started."""
    RUNNING = "running"
    """The task's shim is alive."""
    LOST = "lost"
    """The task's shim has died without recording an exit status."""
    ENDED = "ended"


@dataclass(frozen=True)
class ReportedExit:
    """How a task ended. If `exit_code` and `signal` are None, its exit status was lost or it was never started."""

    exit_code: int | None
    signal: int | None
    ended_at_s: float
    started: bool
    memory_limit_bytes: int | None = None
    """The task's memory limit, if the kernel killed one of its processes for reaching it, else None."""
    memory_peak_bytes: int | None = None
    noticed: bool = True
    """Whether the task got notice before it ended. True if its shim has not recorded an exit status."""
    in_setup: bool = False
    """Whether the task ended before its setup script had succeeded."""
    restarts: int = 0
    """Single-task restarts that counted towards the limit for this exit status (`agent.restarts`)."""

    @property
    def succeeded(self) -> bool:
        """Whether the task ended by itself with exit code 0."""
        return self.exit_code == 0


@dataclass(frozen=True)
class Stop:
    """A stop that was requested while the task ran."""

    deadline_boot_s: float
    """Time at which the task gets SIGKILL, in seconds on CLOCK_BOOTTIME."""
    told: bool
    """Whether the control plane requested the stop. False if the agent decided it."""
    owner: bool = False
    """Whether the owner has taken back the machine, or the task's GPUs."""


@dataclass(frozen=True)
class RunFolder:
    """The folder of one task of one attempt."""

    path: Path
    workload_id: str
    attempt: int
    job: str
    task: int

    @property
    def run_id(self) -> str:
        """The task's `MIZZEN_RUN_ID`."""
        return run_id(self.workload_id, self.attempt, self.job, self.task)

    @property
    def work(self) -> Path:
        """The task's working directory."""
        return self.path / "work"

    def mounted(self, mounts: Sequence[MountSpec]) -> dict[str, Path]:
        """Returns the absolute paths at which the task sees its own files, each with their path on the machine.

        The task cannot replace these files by links, because their folder belongs to the agent.
        """
        paths = (mount.target for mount in mounts if mount.is_absolute)
        return {path: self.path / "mounts" / str(number) for number, path in enumerate(paths)}

    @property
    def report(self) -> Path:
        """Path of the task's report (`MIZZEN_REPORT`)."""
        return self.path / "report" / "report.json"

    @property
    def interval_file(self) -> Path:
        """Path of the file with the interval between saves (`MIZZEN_INTERVAL_FILE`, `agent.intervals`)."""
        return self.path / "interval.json"

    @property
    def deadline_file(self) -> Path:
        """Path of the file that says until when a stopped task may run (`MIZZEN_DEADLINE_FILE`)."""
        return self.path / "deadline.json"

    @property
    def session_file(self) -> Path:
        """Path of the file whose time says when a session was last open in the task (`MIZZEN_SESSION_FILE`)."""
        return self.path / "session"

    @property
    def output(self) -> Path:
        """Path of the file with the task's standard output and error."""
        return self.path / "output.log"

    @property
    def errors(self) -> Path:
        """Path of the file with the task's standard error, if its document asks for a file of its own."""
        return self.path / "errors.log"

    def started_at_s(self) -> float | None:
        """Returns when the task was started, in epoch seconds, or None if it was not."""
        body = self._read(shim.PID_FILE)
        return None if body is None else float(body.get("started_at_s", self._written_at_s(shim.PID_FILE)))

    @property
    def script(self) -> Path:
        """Path of the job's script."""
        return self.path / "script.sh"

    @property
    def setup_script(self) -> Path:
        """Path of the task's setup script."""
        return self.path / "setup.sh"

    @property
    def begun(self) -> Path:
        """Path of the file that says when the command began after the setup script."""
        return self.path / BEGUN_FILE

    def exit(self) -> ReportedExit | None:
        """Returns how the task ended, or None if no exit status was recorded yet."""
        body = self._read(shim.EXIT_FILE)
        if body is None:
            return None
        return ReportedExit(
            body.get("exit_code"),
            body.get("signal"),
            float(body.get("ended_at_s", self._written_at_s(shim.EXIT_FILE))),
            body.get("started", True),
            body.get("memory_limit_bytes"),
            body.get("memory_peak_bytes"),
            body.get("noticed", True),
            body.get("in_setup", False),
            body.get("restarts", 0),
        )

    def stop(self) -> Stop | None:
        """Returns the stop that was requested while the task ran, or None.

        If the record is damaged, returns a stop whose deadline has passed.
        """
        body = self._read(shim.STOP_FILE)
        if body is None:
            return None
        return Stop(float(body.get("deadline_boot_s", 0)), bool(body.get("told", True)), bool(body.get("owner", False)))

    def identities(self) -> tuple[ProcessIdentity, ProcessIdentity] | None:
        """Returns the identities of the shim and of the task's first process, or None if the task was not started.

        If the record is damaged, both are the identity of the shim, which is found by its lock.
        """
        body = self._read(shim.PID_FILE)
        if body is None:
            return None
        if not body:
            found = holder_of(self.path / shim.LOCK_FILE) or ProcessIdentity(-1, 0, "")
            return found, found
        boot_id = str(body["boot_id"])
        return ProcessIdentity.from_json(body["shim"], boot_id), ProcessIdentity.from_json(body["task"], boot_id)

    def first_pid(self) -> int:
        """Returns the pid of the task's first process.

        Raises:
            OSError: the task was not started, or runs in a container.
        """
        body = self._read(shim.PID_FILE)
        if body is None or "task" not in body:
            raise ProcessLookupError(errno.ESRCH, "the task was not started")
        return int(body["task"]["pid"])

    def unified_cgroup(self) -> Path | None:
        """Returns the task's cgroup v2; None: the task was not started, or has none."""
        body = self._read(shim.PID_FILE)
        return None if body is None or not body.get("cgroup") else Path(body["cgroup"])

    def cgroups(self) -> list[str]:
        """Returns the paths of the task's cgroups: those with limits, and the one for killing all its processes."""
        body = self._read(shim.PID_FILE)
        return [] if body is None else sorted({*body.get("limits", []), *filter(None, [body.get("cgroup")])})

    def container(self) -> tuple[str, str] | None:
        """Returns the engine's socket and the name of the task's container; None: not started, or without an image."""
        body = self._read(shim.PID_FILE)
        told = None if body is None else body.get("container")
        return None if told is None else (str(told["socket"]), str(told["name"]))

    def _read(self, name: str) -> dict[str, Any] | None:
        return read_sound(f"{self.path}/{name}")

    def _written_at_s(self, name: str) -> float:
        return (self.path / name).stat().st_mtime

    @contextlib.contextmanager
    def locked(self) -> Iterator[bool]:
        """Context manager that holds a shim's lock. Yields False if another process, such as a shim, holds it."""
        descriptor = os.open(self.path / shim.LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True
        finally:
            os.close(descriptor)


def private(path: str, flags: int) -> int:
    """Opens a file that only its owner may read; for the `opener` argument of `open`."""
    return os.open(path, flags, 0o600)


def start(run: RunFolder, launch: TaskLaunch) -> None:
    """Starts the task if it was not started, and returns when its shim has recorded it. Idempotent.

    Raises:
        NotStarted: the shim failed before it recorded the task.
        OSError: the disk is full.
    """
    if inspect(run) is not TaskState.ABSENT:
        return
    with open(run.path / "shim.log", "ab", opener=private) as log:
        try:
            body = json.dumps(launch.to_json()).encode()
            failed = start_shim(run.path, body, log.fileno(), sandboxed=launch.sandbox is not None)
        except NoZygote as error:
            raise NotStarted(f"task {run.run_id} could not be started: {error}") from None
    if inspect(run) is TaskState.ABSENT and not _recorded(run):
        if failed in (errno.ENOSPC, errno.EDQUOT):
            raise OSError(failed, os.strerror(failed), str(run.path))
        complaint = (run.path / "shim.log").read_text(errors="replace")[-2000:]
        raise NotStarted(f"task {run.run_id} could not be started: {complaint.strip() or 'its shim was killed'}")


def _recorded(run: RunFolder) -> bool:
    """Whether another shim, which holds the lock, records the task within `_STARTING_S`."""
    give_up_s = time.monotonic() + _STARTING_S
    while inspect(run) is TaskState.ABSENT:
        with run.locked() as free:
            if free:
                return inspect(run) is not TaskState.ABSENT
        if time.monotonic() > give_up_s:
            return False
        time.sleep(0.02)
    return True


def inspect(run: RunFolder) -> TaskState:
    """Returns the current state of the task."""
    if os.path.exists(f"{run.path}/{shim.EXIT_FILE}"):  # noqa: PTH110 - `Path` takes longer than the call
        return TaskState.ENDED
    identities = run.identities()
    if identities is None:
        return TaskState.ABSENT
    if identities[0].alive():
        return TaskState.RUNNING
    # The shim may have recorded the exit status after the first check.
    return TaskState.ENDED if (run.path / shim.EXIT_FILE).exists() else TaskState.LOST


def end_lost(run: RunFolder) -> None:
    """Ends a lost task: kills its remaining processes and records that its exit status is unknown."""
    while inspect(run) is TaskState.LOST:
        with run.locked() as free:
            if free and inspect(run) is TaskState.LOST:
                _sweep(run)
                _write_exit(run, started=True)
        time.sleep(0 if free else 0.02)


def request_stop(run: RunFolder, grace_s: float, *, told: bool, owner: bool = False) -> None:
    """Requests that the shim stops the task: SIGTERM as notice, and SIGKILL after `grace_s` seconds.

    A task that was not started can never be started afterwards. A task that has ended keeps its exit status. If there
    are several requests, the earliest deadline applies. `told` and `owner` are as in `Stop`.

    Raises:
        NotStarted: the lock of a task that was not started is held, so the task can neither be started nor stopped.
    """
    while inspect(run) is TaskState.ABSENT:
        run.path.mkdir(mode=0o711, parents=True, exist_ok=True)
        with run.locked() as free:
            if free and inspect(run) is TaskState.ABSENT:
                _write_exit(run, started=False)
        if not free and not _recorded(run):
            raise NotStarted(f"task {run.run_id} cannot be stopped: it was not started, and its lock is held")
    identities = run.identities()
    if inspect(run) is not TaskState.RUNNING or identities is None:
        return
    before = run.stop()
    deadline_s = shim.boot_time_s() + grace_s
    body = {
        "deadline_boot_s": deadline_s if before is None else min(deadline_s, before.deadline_boot_s),
        "told": told or (before is not None and before.told),
        "owner": owner or (before is not None and before.owner),
    }
    records.write_reserved(str(run.path / shim.STOP_FILE), body)
    with contextlib.suppress(OSError):  # Without the file the task uses the time that its launch description names.
        records.publish(str(run.deadline_file), {"deadline_boot_s": body["deadline_boot_s"]})
    identities[0].send(SIGTERM)


def overdue(run: RunFolder) -> bool:
    """Whether more than `BACKSTOP_S` have passed since the deadline of the task's stop."""
    stop = run.stop()
    return stop is not None and shim.boot_time_s() > stop.deadline_boot_s + BACKSTOP_S


def force(run: RunFolder) -> None:
    """Kills a task without its shim: first the shim, then the remaining processes. The exit status is lost."""
    identities = run.identities()
    if identities is not None:
        table = shim.process_table()
        tree = {pid: table[pid][2] for pid in shim.descendants({identities[0].pid}, table)}
        if identities[0].send(SIGKILL):
            kill_until_gone(lambda: {p for p, stat in shim.process_table().items() if tree.get(p) == stat[2]})
    end_lost(run)


def _sweep(run: RunFolder) -> None:
    identities = run.identities()
    if identities is not None:
        identities[1].send(SIGKILL)
    folders = run.cgroups()
    if (container := run.container()) is not None:
        with contextlib.suppress(EngineError):  # `agent.containers.leftovers` removes it later.
            open_engine(container[0]).remove(container[1])
    for path in folders:
        cgroups.kill_cgroup(path)
    kill_until_gone(lambda: with_run_ids({run.run_id}) | cgroups.processes_in(folders))
    for path in folders:
        cgroups.remove_cgroup(path)
        if container is not None and (parent := cgroups.engine_parent(path)) is not None:
            cgroups.remove_engine_parent(parent)
    sandbox.clear(str(run.path.parent / "private"))


def _write_exit(run: RunFolder, *, started: bool) -> None:
    if started and records.recover_reserved(str(run.path / shim.EXIT_FILE)):
        return  # The shim was killed after it wrote the record, but before it renamed the file.
    body = {"exit_code": None, "signal": None, "started": started, "ended_at_s": time.time()}
    records.write_reserved(str(run.path / shim.EXIT_FILE), body)
