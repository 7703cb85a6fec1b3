"""Runs one seed: a stack under faults and requests, then a phase without faults, then the checks."""

import contextlib
import heapq
import os
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from tests.chaos.faults import Faults
from tests.chaos.judge import Violation, judge
from tests.chaos.observed import Observed, read_journals
from tests.chaos.schedule import FILLED, Schedule
from tests.chaos.users import Users
from tests.stack.harness import Up, processes_of, wait_until

DISK_BYTES = 1 << 30
PATIENCE_S = 300.0
"""After the last fault, the longest time in which nothing in the queue may change before the run gives up."""
_AT_MOST_S = 1800.0
_READY_S = 120.0
_RESTART_S = 60.0


@dataclass(frozen=True)
class ChaosOutcome:
    """The result of one seed."""

    violations: tuple[Violation, ...]
    workloads: int
    task_runs: int
    faults: Counter[str]
    requests: Counter[str]
    preempted: int
    """Number of task runs that were preempted and saved."""
    observed: Observed


@contextlib.contextmanager
def disks(folder: Path) -> Iterator[Path]:
    """Mounts small file systems in the folder of a stack, so that they can be filled; without root, only makes it."""
    folder.mkdir()
    with contextlib.ExitStack() as mounts:
        for part in FILLED.values() if os.geteuid() == 0 else ():
            mounts.enter_context(_disk(folder / part))
        yield folder


@contextlib.contextmanager
def _disk(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    options = f"size={DISK_BYTES},mode=755"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "mizzen-chaos", str(folder)], check=True)
    try:
        yield
    finally:
        for flags in ([], ["-l"]):
            if subprocess.run(["umount", *flags, str(folder)], capture_output=True).returncode == 0:
                break
            time.sleep(1.0)


class _Agenda:
    """Actions with a start time each, which `run` executes one after the other on the calling thread."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def add(self, at_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._due, (at_s, next(self._numbers), act))

    def run(self, began_s: float) -> None:
        while self._due:
            at_s, _, act = heapq.heappop(self._due)
            time.sleep(max(0.0, began_s + at_s - time.monotonic()))
            act()


def run_seed(seed: int, schedule: Schedule, folder: Path, say: Callable[[str], None]) -> ChaosOutcome:
    """Runs one schedule on a new stack in `folder`, and keeps the journals, logs and events there."""
    journals, scratch = folder / "journals", folder / "scratch"
    folder.mkdir(parents=True, exist_ok=True)
    for path in (journals, scratch):
        path.mkdir()
    journals.chmod(0o1777)  # Tasks may run as other users.
    seen = Observed()
    with disks(folder / "stack") as place:
        up = Up(place)
        try:
            up.start()
            users = Users(up, seed, journals, seen)
            users.make_tenants()
            faults = _act(up, scratch, seen, users, schedule, say)
            say("faults are over: waiting for all workloads to end")
            users.submit_large()
            users.close_requests()
            users.wait_for_ends(PATIENCE_S, _AT_MOST_S)
            seen.withheld = users.withheld_machines(_READY_S)
            users.save_events(scratch / "events.txt")
            users.close()
            _stop(up, seen)
        finally:
            up.close()
            (scratch / "up.log").write_bytes((up.folder / "up.log").read_bytes())
            _keep_logs(up, scratch)
    seen.runs = read_journals(journals)
    preempted = sum(run.preempted for run in seen.runs)
    return ChaosOutcome(
        tuple(judge(seen)),
        len(seen.phases),
        len(seen.runs),
        Counter(faults.done),
        Counter(users.asked),
        preempted,
        seen,
    )


def _act(up: Up, scratch: Path, seen: Observed, users: Users, schedule: Schedule, say: Callable[[str], None]) -> Faults:
    """Executes the whole schedule, with separate threads for the requests, the faults and the end of each fault.

    With one thread there would be deadlocks: a restart can need space on a full disk, or a process that is stopped,
    and the end of that fault would wait for the restart.
    """
    restarting = threading.Lock()

    def restart() -> None:
        give_up_s = time.monotonic() + _RESTART_S
        with restarting:
            while True:
                was_full, filled = faults.is_full(), faults.filled
                try:
                    return up.start(machines=False)
                except (Exception, SystemExit) as error:  # SystemExit: the stack has ended.
                    # A stack that cannot start on a full disk may end with an error.
                    if not was_full and faults.filled == filled:
                        seen.stack_failures.append(f"the stack did not start again: {error}")
                    if time.monotonic() > give_up_s:
                        raise
                    time.sleep(1.0)

    faults = Faults(up, scratch, seen, restart)
    with ThreadPoolExecutor(max_workers=2 + len(schedule.faults)) as threads:
        ends: list[Future[None]] = []
        agenda, requests = _Agenda(), _Agenda()
        for fault in schedule.faults:

            def begin(fault=fault) -> None:  # type: ignore[no-untyped-def]
                if up.process is not None and up.process.poll() is not None:
                    seen.stack_failures.append(f"the stack exited with {up.process.returncode} before {fault.kind}")
                    restart()
                say(f"{fault.at_s:6.1f} s  {fault.kind}" + (f" for {fault.lasts_s:.0f} s" if fault.lasts_s else ""))
                end = faults.begin(fault)
                if end is not None:
                    ends.append(threads.submit(_later, fault.lasts_s, end))

            agenda.add(fault.at_s, begin)
        for submission in schedule.submissions:
            requests.add(submission.at_s, lambda submission=submission: users.submit(submission))  # type: ignore[misc]
        for request in schedule.requests:
            requests.add(request.at_s, lambda request=request: users.ask(request))  # type: ignore[misc]
        began_s = time.monotonic()
        asking = threads.submit(requests.run, began_s)
        agenda.run(began_s)
        for running in (asking, *ends):
            running.result()
    return faults


def _later(delay_s: float, act: Callable[[], None]) -> None:
    time.sleep(delay_s)
    act()


def _stop(up: Up, seen: Observed) -> None:
    assert up.process is not None
    if up.process.poll() is None:
        up.process.send_signal(signal.SIGINT)
        try:
            if code := up.process.wait(90.0):
                seen.stack_failures.append(f"the exit code after Ctrl-C is {code}, should be 0")
        except subprocess.TimeoutExpired:
            seen.stack_failures.append("the stack did not exit within 90 s after Ctrl-C")
    else:
        seen.stack_failures.append(f"the stack exited by itself with code {up.process.returncode}")
    try:
        wait_until(lambda: not processes_of(up.data), "no process is left", 15.0)
    except AssertionError:
        seen.left_behind = [f"{pid}: {command}" for pid, command in processes_of(up.data).items()]


def _keep_logs(up: Up, scratch: Path) -> None:
    logs = up.data / "run" / "log"
    for path in sorted(logs.glob("*")) if logs.is_dir() else ():
        with contextlib.suppress(OSError):
            (scratch / path.name).write_bytes(path.read_bytes()[-5_000_000:])
