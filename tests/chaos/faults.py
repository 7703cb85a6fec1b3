"""Faults: processes are killed or stopped, disks are filled, and Temporal's state is lost or rolled back.

Processes are found in /proc.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psycopg

from infra.stack.postgres import EmbeddedPostgres
from tests.chaos.observed import Killed, Observed
from tests.chaos.schedule import FILLED, Fault
from tests.sql_faults import CLASSES, begin_failing, end_failing
from tests.stack.harness import Up, processes_of

End = Callable[[], None]
BLACKOUT_S = 8.0
"""If what reaches a machine is stopped for longer, it may count as lost: the heartbeat timeouts are short here."""
_REACHED_BY = ("agent", "gateway", "temporal")
_REPORTED_BY = ("agents", "worker", "postgres", "backend", *_REACHED_BY)
"""The parts without which the end of a task cannot be recorded."""
_TASK = "chaos/task.py"
_FILLER = "filler."
_DATABASE = ("temporal.db", "temporal.db-wal", "temporal.db-shm")


def now_s() -> float:
    """Returns CLOCK_BOOTTIME, which the tasks' journals use too."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Faults:
    """Injects faults into one stack, and records in `seen` the facts about them that the judge needs."""

    def __init__(self, up: Up, scratch: Path, seen: Observed, restart: Callable[[], None]) -> None:
        """`restart` restarts the stack after its supervisor was killed. `scratch` is outside of the stack's folders."""
        self._up = up
        self._scratch = scratch
        self._seen = seen
        self._restart = restart
        self._replacing = threading.Lock()
        self.filled = 0
        """The number of times that a file system was filled."""
        self.done: list[str] = []
        """Kinds of the faults that took effect."""

    def begin(self, fault: Fault) -> End | None:
        """Begins a fault.

        Returns a function that ends the fault, to be called `fault.lasts_s` later, or None if nothing must be ended.
        """
        what, _, part = fault.kind.partition("-")
        if what == "kill":
            return self._kill(part, fault)
        if what == "stop":
            return self._stop(part, fault)
        if what == "full":
            return self._fill(part, fault)
        act: dict[str, Callable[[Fault], End | None]] = {
            "zombie-worker": self._zombie_worker,
            "temporal-lost": self._temporal_lost,
            "temporal-rolled-back": self._temporal_rolled_back,
            "award-error": self._award_error,
            "supervisor-killed": self._supervisor_killed,
            "tree-killed": self._tree_killed,
        }
        return act[fault.kind](fault)

    def is_full(self) -> bool:
        """Returns whether a file system of the stack is full because of a fault."""
        return any(path for folder in FILLED.values() for path in (self._up.folder / folder).glob(f"{_FILLER}*"))

    # -------------------------------------------------------------------------------------------------- processes

    def _found(self, part: str) -> list[int]:
        processes = processes_of(self._up.data)
        if part == "backend":
            servers = [pid for pid, command in processes.items() if "/postgres -D" in command]
            return sorted(pid for server in servers for pid in _children(server))
        if part in ("task", "shim"):
            tasks = sorted(pid for pid, command in processes.items() if _TASK in command)
            # A shim is the parent of a task; its command line depends on how it was started.
            return tasks if part == "task" else sorted({_parent(pid) for pid in tasks} - {0, 1})
        agents = sorted(pid for pid, command in processes.items() if "server agents" in command)
        if part == "agents":
            return [pid for pid in agents if _parent(pid) not in agents]
        if part == "agent":  # The agent of each machine is a fork of the host process, with the same command line.
            return [pid for pid in agents if _parent(pid) in agents]
        words = {
            "worker": "server worker",
            "gateway": "server gateway",
            "api": "server api",
            "temporal": "start-dev",
            "postgres": "/postgres -D",
        }
        return sorted(pid for pid, command in processes.items() if words[part] in command)

    def _chosen(self, part: str, draw: float) -> int | None:
        found = self._found(part)
        return found[int(draw * len(found))] if found else None

    def _note(self, part: str, pid: int) -> None:
        """Records that mizzen may not learn the exit status of a task, because the task or its shim is hit."""
        if part in ("shim", "task"):
            task = pid if part == "task" else next(iter(_children(pid)), 0)
            self._seen.killed.append(Killed(now_s(), pid, _environment(task).get("MIZZEN_RUN_ID", "")))

    def _signal(self, pid: int, number: int) -> bool:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            return True
        return False

    def _kill(self, part: str, fault: Fault) -> None:
        pid = self._chosen(part, fault.draw)
        if pid is None:
            return
        self._note(part, pid)
        if self._signal(pid, signal.SIGKILL):
            self.done.append(fault.kind)
            if part in _REPORTED_BY:
                self._seen.outages.append((now_s(), now_s()))

    def _stop(self, part: str, fault: Fault) -> End | None:
        pid = self._chosen(part, fault.draw)
        if pid is None:
            return None
        self._note(part, pid)
        if not self._signal(pid, signal.SIGSTOP):
            return None
        self.done.append(fault.kind)
        began_s = now_s()

        def go_on() -> None:
            self._signal(pid, signal.SIGCONT)
            if part in _REACHED_BY and fault.lasts_s > BLACKOUT_S:
                self._seen.blackouts.append((began_s, now_s() + BLACKOUT_S))
            elif part in _REPORTED_BY:
                self._seen.outages.append((began_s, now_s()))

        return go_on

    # ------------------------------------------------------------------------------------------------------ others

    def _zombie_worker(self, fault: Fault) -> End | None:
        """Starts a second worker, freezes it in the middle of its work, and continues it later."""
        worker = self._chosen("worker", fault.draw)
        if worker is None:
            return None
        try:
            command = Path(f"/proc/{worker}/cmdline").read_bytes().split(b"\0")[:-1]
            where = Path(f"/proc/{worker}/cwd").readlink()
        except OSError:
            return None
        with (self._scratch / "zombie.log").open("ab") as log:
            process = subprocess.Popen(command, cwd=where, stdout=log, stderr=log, start_new_session=True)
        time.sleep(4.0 + 4.0 * fault.draw)
        self._signal(process.pid, signal.SIGSTOP)
        self.done.append(fault.kind)

        def go_on() -> None:
            self._signal(process.pid, signal.SIGCONT)
            time.sleep(2.0)
            process.kill()
            process.wait()

        return go_on

    def _temporal_lost(self, fault: Fault) -> None:
        self._replace_temporal(None, fault)

    def _temporal_rolled_back(self, fault: Fault) -> End | None:
        pid = self._chosen("temporal", fault.draw)
        kept = self._scratch / "temporal"
        shutil.rmtree(kept, ignore_errors=True)
        kept.mkdir()
        if pid is None or not self._signal(pid, signal.SIGSTOP):
            return None
        try:
            for name in _DATABASE:
                with contextlib.suppress(FileNotFoundError):
                    shutil.copyfile(self._up.data / name, kept / name)
        finally:
            self._signal(pid, signal.SIGCONT)
        return lambda: self._replace_temporal(kept, fault)

    def _replace_temporal(self, kept: Path | None, fault: Fault) -> None:
        # Two of these faults may overlap. Without the lock, the files of two databases could be mixed.
        with self._replacing:
            pid = self._chosen("temporal", fault.draw)
            if pid is None or not self._signal(pid, signal.SIGSTOP):
                return
            for name in _DATABASE:
                (self._up.data / name).unlink(missing_ok=True)
            try:
                for path in kept.iterdir() if kept is not None else ():
                    shutil.copyfile(path, self._up.data / path.name)
            except OSError:  # The disk is full: the database is lost instead of rolled back.
                for name in _DATABASE:
                    (self._up.data / name).unlink(missing_ok=True)
            self._signal(pid, signal.SIGKILL)
            self.done.append(fault.kind)
            self._seen.outages.append((now_s(), now_s()))

    def _fill(self, part: str, fault: Fault) -> End | None:
        """Fills one of `FILLED`, if it is a separate file system."""
        folder, began_s = self._up.folder / FILLED[part], now_s()
        if not os.path.ismount(folder):
            return None
        filler = folder / f"{_FILLER}{self.filled}"
        self.filled += 1
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            for size in (1 << 20, 1 << 12, 1):
                block = bytes(size)
                with contextlib.suppress(OSError):
                    while True:
                        file.write(block)
        self.done.append(fault.kind)

        def empty() -> None:
            filler.unlink(missing_ok=True)
            if part != "bucket":  # Exit statuses are in the others, and the databases that record the end of a task.
                self._seen.outages.append((began_s, now_s()))

        return empty

    def _award_error(self, fault: Fault) -> End:
        """Lets award transactions fail with an SQLSTATE of one class."""
        url = EmbeddedPostgres(self._up.data / "postgres").url
        states = sorted(CLASSES)
        with contextlib.suppress(psycopg.Error):  # Postgres is killed, stopped or starting.
            begin_failing(url, "attempt", states[int(fault.draw * len(states))], when="tg_op = 'INSERT'")
            self.done.append(fault.kind)

        def end() -> None:
            while True:
                try:
                    return end_failing(url, "attempt")
                except psycopg.Error:
                    time.sleep(1.0)

        return end

    def _supervisor_killed(self, fault: Fault) -> None:
        assert self._up.process is not None
        self._signal(self._up.process.pid, signal.SIGKILL)
        self._up.process.wait()
        began_s = now_s()
        self.done.append(fault.kind)
        self._restart()
        self._seen.blackouts.append((began_s, now_s() + BLACKOUT_S))

    def _tree_killed(self, fault: Fault) -> None:
        """Kills every process at the same time, including tasks and their shims, as if the machine lost power."""
        assert self._up.process is not None
        began_s = now_s()
        while processes := processes_of(self._up.data):
            for pid, command in processes.items():
                if _TASK in command:
                    self._note("task", pid)
            for pid in [self._up.process.pid, *processes]:
                self._signal(pid, signal.SIGKILL)
            time.sleep(0.05)
        self._up.process.wait()
        self.done.append(fault.kind)
        self._restart()
        self._seen.blackouts.append((began_s, now_s() + BLACKOUT_S))


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _children(parent: int) -> list[int]:
    return [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit() and _parent(int(p.name)) == parent]


def _environment(pid: int) -> dict[str, str]:
    try:
        pairs = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    return dict(p.decode(errors="replace").split("=", 1) for p in pairs if b"=" in p)
