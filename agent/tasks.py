"""One task of one attempt on this machine: its folder, starting it, looking at it, stopping it.

    lock, pid.json, exit.json, stop.json    between agent and shim (`agent.shim`)
    output.log                              what the task printed
    shim.log                                what the shim complained of
    script.sh                               the job's script, where it has one
    work/                                   working directory and HOME; the task's own
    report/report.json                      what the task reports; the folder is the task's own
    ship.json                               how far its output was shipped (`agent.logs`)

Nothing is kept in memory that matters: whoever looks at the folder knows all there is to know. The functions block, a
few milliseconds where not said otherwise.
"""

import contextlib
import errno
import fcntl
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import Any

from agent import cgroups, records, shim
from agent.launch import TaskLaunch
from agent.processes import Identity, kill_until_gone, with_run_ids
from agent.starting import NoZygote, start_shim
from domain.ids import run_id

_STARTING_S = 10.0
"""How long a shim that holds the lock may take to record its task."""
BACKSTOP_S = 5.0
"""After the deadline of a stop: when the agent takes over from a shim that does not get it done."""


class NotStarted(Exception):
    """The shim could not record its task; the message is what it printed."""


class State(Enum):
    """Where a task is."""

    ABSENT = "absent"
    """Nobody has started it."""
    RUNNING = "running"
    """Its shim lives."""
    LOST = "lost"
    """Its shim is gone and left no status."""
    ENDED = "ended"


@dataclass(frozen=True)
class Exit:
    """How a task ended; neither code nor signal: its status was lost, or it was stopped before it started."""

    exit_code: int | None
    signal: int | None
    ended_at_s: float
    started: bool
    memory_limit_bytes: int | None = None
    """Set where the kernel killed one of its processes because the task had reached its limit of memory."""
    memory_peak_bytes: int | None = None
    noticed: bool = True
    """Whether it was given notice before it ended. Of a shim that does not say it: assumed, where it was to stop."""

    @property
    def succeeded(self) -> bool:
        """Whether it ended by itself with exit code 0."""
        return self.exit_code == 0


@dataclass(frozen=True)
class Stop:
    """A stop that a task was told of while it ran."""

    deadline_boot_s: float
    """On CLOCK_BOOTTIME."""
    told: bool
    """By the control plane; else its agent's own decision."""


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
        """Its working directory."""
        return self.path / "work"

    @property
    def report(self) -> Path:
        """Its `MIZZEN_REPORT`."""
        return self.path / "report" / "report.json"

    @property
    def output(self) -> Path:
        """Its standard output and error."""
        return self.path / "output.log"

    def started_at_s(self) -> float | None:
        """When (epoch seconds) it was started; None: it was not."""
        body = self._read(shim.PID_FILE)
        return None if body is None else float(body["started_at_s"])

    def exit(self) -> Exit | None:
        """How it ended; None: it has not, or nobody knows yet."""
        body = self._read(shim.EXIT_FILE)
        if body is None:
            return None
        return Exit(
            body.get("exit_code"),
            body.get("signal"),
            float(body["ended_at_s"]),
            body.get("started", True),
            body.get("memory_limit_bytes"),
            body.get("memory_peak_bytes"),
            body.get("noticed", True),
        )

    def stop(self) -> Stop | None:
        """The stop that it was told of, if any."""
        body = self._read(shim.STOP_FILE)
        if body is None:
            return None
        return Stop(float(body["deadline_boot_s"]), bool(body["told"]))

    def identities(self) -> tuple[Identity, Identity] | None:
        """Shim and task; None: not started."""
        body = self._read(shim.PID_FILE)
        if body is None:
            return None
        boot_id = str(body["boot_id"])
        return Identity.from_json(body["shim"], boot_id), Identity.from_json(body["task"], boot_id)

    def cgroups(self) -> list[str]:
        """The task's cgroups: those with limits, and one in which all of it can be killed at once."""
        body = self._read(shim.PID_FILE)
        return [] if body is None else sorted({*body.get("limits", []), *filter(None, [body["cgroup"]])})

    def _read(self, name: str) -> Any:
        try:
            return json.loads((self.path / name).read_bytes())
        except FileNotFoundError:
            return None

    @contextlib.contextmanager
    def locked(self) -> Iterator[bool]:
        """Hold the lock that a shim holds for its life; gives False where another holds it."""
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
    """An opener (`open`) of files that only their owner may read."""
    return os.open(path, flags, 0o600)


def start(run: RunFolder, launch: TaskLaunch) -> None:
    """Start the task, if nobody has: returns when it is recorded. The shim decides, so repetition does no harm.

    Raises:
        NotStarted: the shim failed before it had recorded the task.
        OSError: the disk is full.
    """
    if look(run) is not State.ABSENT:
        return
    with open(run.path / "shim.log", "ab", opener=private) as log:
        try:
            failed = start_shim(run.path, json.dumps(launch.to_json()).encode(), log.fileno())
        except NoZygote as error:
            raise NotStarted(f"task {run.run_id} could not be started: {error}") from None
    if look(run) is State.ABSENT and not _recorded(run):
        if failed in (errno.ENOSPC, errno.EDQUOT):
            raise OSError(failed, os.strerror(failed), str(run.path))
        complaint = (run.path / "shim.log").read_text(errors="replace")[-2000:]
        raise NotStarted(f"task {run.run_id} could not be started: {complaint.strip() or 'its shim was killed'}")


def _recorded(run: RunFolder) -> bool:
    """Whether another shim, which holds the lock, records the task soon."""
    give_up_s = time.monotonic() + _STARTING_S
    while look(run) is State.ABSENT:
        with run.locked() as free:
            if free:
                return look(run) is not State.ABSENT
        if time.monotonic() > give_up_s:
            return False
        time.sleep(0.02)
    return True


def look(run: RunFolder) -> State:
    """Where the task is, now."""
    if (run.path / shim.EXIT_FILE).exists():
        return State.ENDED
    identities = run.identities()
    if identities is None:
        return State.ABSENT
    if identities[0].alive():
        return State.RUNNING
    # It may have ended between the two looks.
    return State.ENDED if (run.path / shim.EXIT_FILE).exists() else State.LOST


def settle(run: RunFolder) -> None:
    """Close the books of a lost task: kill what it left behind, and write that its status is unknown."""
    while look(run) is State.LOST:
        with run.locked() as free:
            if free and look(run) is State.LOST:
                _sweep(run)
                _write_exit(run, started=True)
        time.sleep(0 if free else 0.02)


def request_stop(run: RunFolder, grace_s: float, *, told: bool) -> None:
    """Give the task notice (SIGTERM) and `grace_s` seconds; the shim sees to it from there.

    One that was not started never will be. One that has ended keeps its status. Of several deadlines the earliest
    counts.
    """
    while look(run) is State.ABSENT:
        run.path.mkdir(mode=0o711, parents=True, exist_ok=True)
        with run.locked() as free:
            if free and look(run) is State.ABSENT:
                _write_exit(run, started=False)
        if not free and not _recorded(run):
            raise NotStarted(f"task {run.run_id} is neither started nor can it be stopped: its lock is held")
    identities = run.identities()
    if look(run) is not State.RUNNING or identities is None:
        return
    before = run.stop()
    deadline_s = shim.boot_time_s() + grace_s
    body = {
        "deadline_boot_s": deadline_s if before is None else min(deadline_s, before.deadline_boot_s),
        "told": told or (before is not None and before.told),
    }
    records.write_reserved(str(run.path / shim.STOP_FILE), body)
    identities[0].send(SIGTERM)


def overdue(run: RunFolder) -> bool:
    """Whether a running task should long have been stopped by its shim."""
    stop = run.stop()
    return stop is not None and shim.boot_time_s() > stop.deadline_boot_s + BACKSTOP_S


def force(run: RunFolder) -> None:
    """End a task without its shim's help: the shim first, then all that is left. Its status is lost."""
    identities = run.identities()
    if identities is not None:
        table = shim.process_table()
        tree = {pid: table[pid][2] for pid in shim.descendants({identities[0].pid}, table)}
        if identities[0].send(SIGKILL):
            kill_until_gone(lambda: {p for p, stat in shim.process_table().items() if tree.get(p) == stat[2]})
    settle(run)


def _sweep(run: RunFolder) -> None:
    identities = run.identities()
    if identities is not None:
        identities[1].send(SIGKILL)
    folders = run.cgroups()
    for path in folders:
        cgroups.kill_cgroup(path)
    kill_until_gone(lambda: with_run_ids({run.run_id}) | cgroups.processes_in(folders))
    for path in folders:
        cgroups.remove_cgroup(path)


def _write_exit(run: RunFolder, *, started: bool) -> None:
    if started and records.recover_reserved(str(run.path / shim.EXIT_FILE)):
        return  # Its shim was killed between the record and its name.
    body = {"exit_code": None, "signal": None, "started": started, "ended_at_s": time.time()}
    records.write_reserved(str(run.path / shim.EXIT_FILE), body)
