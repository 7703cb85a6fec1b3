"""The lane of a runner: its shim starts the elements of an array, one after the other, as tasks in its sandbox.

In the run's folder, beside the files of `agent.tasks`:

    chunk.json           the elements to run, written by the agent; an empty list ends the lane
    cancelled.json       the indexes of elements to stop or not to start; `*` stands for all
    journal              a line of JSON for each start, and for each end, of an element
    base/                what the setup and the document's files have left in `work`, if anything
    elements/INDEX.ATTEMPT/     the output of an element while it runs, and until it is shipped; it is removed if empty

The agent sends SIGUSR1 after it has written a file. The lane outlives the agent, as every shim does: the next agent
reads the journal. The journal is not synced, because a machine that crashes loses its leases. Each element gets a new
process, the files of `base` in `work`, and empty temporary folders; processes that it leaves are killed. While the disk
is full, the lane waits. Like `agent.shim`, this uses only the standard library.
"""

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Collection
from typing import Any

from agent.cgroups import memory_kills, memory_use, remove_cgroup
from agent.records import publish, write_durably
from agent.sandbox import FOLDERS, Sandbox, remove_tree
from agent.shim import (
    EXIT_FILE,
    PID_FILE,
    WATCHED,
    Task,
    become_task,
    boot_time_s,
    open_outputs,
    process_stat,
    stop_deadline_s,
    write_exit,
)
from agent.task_setup import begun_at_s

CHUNK, CANCELLED, JOURNAL, ELEMENTS = "chunk.json", "cancelled.json", "journal", "elements"
ALL = "*"
_BASE = "base"
_LIVE_S = 1.0
"""Run time after which the output of an element is shipped while the element still runs, in seconds."""
_IDLE_S = 60.0
_FULL_S = 0.5
"""Time between two tries to write to a full disk."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
_SIGNALS = {*WATCHED, signal.SIGUSR1}


class _OutOfTimeError(Exception):
    """The lane had to end before the disk had space for its records."""


class ElementLane:
    """The elements that run in one run's folder."""

    def __init__(self, folder: str, launch: dict[str, Any], sandbox: Sandbox | None) -> None:
        self._folder = folder
        self._launch = launch
        self._sandbox = sandbox
        self._proc = "/proc" if sandbox is None else sandbox.proc
        self._identity: dict[str, Any] = {}
        self._stop_at_s: float | None = None
        """Deadline of a stop, in seconds on CLOCK_BOOTTIME; None: the lane was not asked to stop."""
        self._script: str | None = None
        self._seen = set[tuple[int, int]]()
        """The elements that were started or cancelled: none is started twice."""
        self._temporary = [] if sandbox is None else [f"{sandbox.folder}/{name}" for name in FOLDERS]
        self._mounts = {
            f"{parent}/{name}"
            for folder in self._temporary
            for parent, folders, files in os.walk(folder)
            for name in (*folders, *files)
        }
        """Mount points of bubblewrap in the temporary folders, which must not be removed."""

    def run(self, body: dict[str, Any], started: int) -> None:
        """Runs the setup, and then elements until the agent or a stop ends the lane. Closes the descriptor `started`.

        `body` becomes the record of the run's processes.
        """
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        own = int(os.readlink("/proc/self"))
        stat = process_stat(own)
        self._identity = {"pid": own, "start": stat[2] if stat is not None else 0}
        write_durably(f"{self._folder}/{PID_FILE}", {**body, "shim": self._identity, "task": self._identity})
        self._identity = {**body, "shim": self._identity, "task": self._identity}
        os.close(started)
        ended = self._set_up() if self._launch["setup"] is not None else None
        if ended is None:
            with contextlib.suppress(_OutOfTimeError):
                self._insist(self._keep_base)
                self._follow()
            ended = {"exit_code": 0, "signal": None}
            if self._stop_at_s is not None:
                ended = {"exit_code": None, "signal": int(signal.SIGTERM), "noticed": True}
        for path in {*self._launch["limits"], *filter(None, [self._launch["cgroup"]])}:
            remove_cgroup(path)
        write_exit(self._folder, {"noticed": False, **ended, "ended_at_s": time.time()})
        if self._sandbox is not None:
            self._sandbox.release()

    def _set_up(self) -> dict[str, Any] | None:
        """Runs the setup; returns how it failed, or None."""
        launch = self._launch | {"argv": ["/bin/true"]}
        self._launch["setup"] = None
        task = self._begin(launch, launch["output"])
        self._await(task, None, None)
        code = self._code(task)
        if code == 0 and begun_at_s(launch["begun"]) is not None:
            return None
        signals = {"exit_code": code if code >= 0 else None, "signal": -code if code < 0 else None}
        return signals | {"in_setup": True, "noticed": task.was_noticed}

    def _keep_base(self) -> None:
        """Copies the files that every element gets in its working directory."""
        with contextlib.suppress(FileNotFoundError):
            if os.listdir(self._launch["cwd"]):
                remove_tree(f"{self._folder}/{_BASE}")
                _copy(self._launch["cwd"], f"{self._folder}/{_BASE}")

    def _insist(self, write: Callable[[], None]) -> None:
        """Calls `write`, and repeats it while the disk is full.

        Raises:
            _OutOfTimeError: the lane must have ended.
        """
        while True:
            try:
                return write()
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                if self._stop_at_s is not None and boot_time_s() >= self._stop_at_s:
                    raise _OutOfTimeError from error
                self._note(signal.sigtimedwait(_SIGNALS, _FULL_S))

    def _record(self, **entry: Any) -> None:
        """Adds a line to the journal."""
        line = f"\n{json.dumps(entry)}\n"  # The first line break ends a partial line of an earlier try.

        def append() -> None:
            with open(f"{self._folder}/{JOURNAL}", "a") as journal:
                journal.write(line)

        self._insist(append)

    def _follow(self) -> None:
        """Runs the elements of each chunk that the agent writes."""
        while self._stop_at_s is None:
            chunk = _read(f"{self._folder}/{CHUNK}")
            if chunk is not None and not chunk["elements"]:
                return
            for element in chunk["elements"] if chunk is not None else ():
                if self._stop_at_s is not None:
                    return
                if (element["index"], element["attempt"]) not in self._seen:
                    self._seen.add((element["index"], element["attempt"]))
                    self._run_one(element)
                    self._note(signal.sigtimedwait(_SIGNALS, 0))
            if self._stop_at_s is None and _read(f"{self._folder}/{CHUNK}") == chunk:
                self._note(signal.sigtimedwait(_SIGNALS, _IDLE_S))

    def _note(self, seen: Any) -> None:
        if seen is not None and seen.si_signo == signal.SIGTERM:
            deadline_s = stop_deadline_s(self._folder, float(self._launch["grace_s"]))
            self._stop_at_s = min(deadline_s, self._stop_at_s or deadline_s)

    # -------------------------------------------------------------------------------------------------------- elements

    def _run_one(self, element: dict[str, Any]) -> None:
        key = {"index": element["index"], "attempt": element["attempt"]}
        if self._is_cancelled(element["index"]):
            self._record(**key, noticed=True, ended_s=time.time())
            return
        own = f"{self._folder}/{ELEMENTS}/{key['index']}.{key['attempt']}"
        self._insist(lambda: self._prepare(element, own))
        env = {**self._launch["env"], **element["env"]}
        launch = self._launch | {"env": {name: value for name, value in env.items() if value is not None}}
        launch["argv"] = element["argv"] or launch["argv"]
        kills, began_s = memory_kills(launch["limits"]), time.time()
        self._record(**key, began_s=began_s)
        task = self._begin(launch, f"{own}/output.log")
        timed_out = self._await(task, element["index"], own)
        code = self._code(task)
        end: dict[str, Any] = {"exit_code": code if code >= 0 else None, "signal": -code if code < 0 else None}
        end |= {"ended_s": time.time(), "noticed": task.was_noticed and not timed_out, "timed_out": timed_out}
        if code != 0 and (memory := memory_use(launch["limits"], kills)) is not None:
            end["memory_limit_bytes"], end["memory_peak_bytes"] = memory
        if os.path.getsize(f"{own}/output.log"):
            body = {"exit_code": end["exit_code"], "signal": end["signal"], "ended_at_s": end["ended_s"]}
            self._insist(lambda: publish(f"{own}/{EXIT_FILE}", body))
        else:
            shutil.rmtree(own, ignore_errors=True)
        self._record(**key, began_s=began_s, **end)

    def _prepare(self, element: dict[str, Any], own: str) -> None:
        """Prepares the files of an element: its folder for the output, the working directory, and the script."""
        self._clean()
        os.makedirs(own, 0o700, exist_ok=True)
        os.close(os.open(f"{own}/output.log", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
        if element["script"] not in (None, self._script):
            self._script = None
            with open(self._launch["argv"][-1], "r+b") as file:  # In place: the sandbox has mounted it.
                file.truncate()
                file.write(element["script"].encode(errors="replace"))
            self._script = element["script"]

    def _begin(self, launch: dict[str, Any], path: str) -> Task:
        outputs = open_outputs({"output": path})
        (gate, opener), (told, telling), shim = os.pipe(), os.pipe(), os.getpid()
        os.write(opener, b"x")
        pid = os.fork()
        if pid == 0:
            become_task(launch, shim, outputs, (gate, telling), self._sandbox)
        for descriptor in (gate, opener, told, telling, *outputs):
            os.close(descriptor)
        return Task(self._folder, launch, pid, self._proc)

    def _await(self, task: Task, index: int | None, own: str | None) -> bool:
        """Waits for the end of a task's first process, and kills leftovers. Returns whether its time limit was reached.

        If a stop or the cancellation of the element arrives, sends the notice. `own` is the element's folder.
        """
        now_s = boot_time_s()
        limit_s = self._launch["lane"]["max_runtime_s"] if index is not None else None
        live_s = now_s + _LIVE_S if own is not None else None
        ends_s = None if limit_s is None else now_s + limit_s
        timed_out = False
        while (task.reap() and task.status is None) or (task.deadline_s is not None and task.alive()):
            now_s = boot_time_s()
            if task.deadline_s is not None and now_s >= task.deadline_s:
                break
            if task.deadline_s is None:
                timed_out = ends_s is not None and now_s >= ends_s
                notice_s = self._notice_at_s()
                if timed_out or now_s >= notice_s or (index is not None and self._is_cancelled(index)):
                    grace_s = now_s + float(self._launch["grace_s"])
                    task.deadline_s = min(grace_s, self._stop_at_s or grace_s)
                    task.pass_on()
                wakes = [notice_s, *filter(None, [ends_s, live_s])]
                pause_s = min(_IDLE_S, min(wakes) - now_s)
            else:
                task.pass_on()
                pause_s = 0.25
            if live_s is not None and own is not None and now_s >= live_s:
                with contextlib.suppress(OSError):  # The output is shipped when the element has ended.
                    publish(f"{own}/{PID_FILE}", self._identity)
                live_s = None
            self._note(signal.sigtimedwait(_SIGNALS, max(0.0, pause_s)))
        task.kill()
        task.reap()
        return timed_out

    def _notice_at_s(self) -> float:
        """Returns when the running element gets the notice of a stop, in seconds on CLOCK_BOOTTIME."""
        if self._stop_at_s is None:
            return float("inf")
        if self._launch["lane"]["interrupt"] == "now":
            return 0.0
        return self._stop_at_s - float(self._launch["grace_s"]) / 2

    @staticmethod
    def _code(task: Task) -> int:
        status = os.waitpid(task.pid, 0)[1] if task.status is None else task.status
        return os.waitstatus_to_exitcode(status if task.given is None else task.given.status(status, task.ended))

    def _is_cancelled(self, index: int) -> bool:
        cancelled = _read(f"{self._folder}/{CANCELLED}") or []
        return index in cancelled or ALL in cancelled

    def _clean(self) -> None:
        """Empties the working directory and the temporary folders, and copies the base into the former."""
        empty(self._launch["cwd"])
        if os.path.exists(f"{self._folder}/{_BASE}"):
            _copy(f"{self._folder}/{_BASE}/.", self._launch["cwd"])
        if self._sandbox is not None:
            for folder in self._temporary:
                empty(folder, self._mounts)
            empty(f"{self._sandbox.proc}/../dev/shm")


def empty(folder: str, keep: Collection[str] = ()) -> None:
    """Empties a folder as far as possible. The files and folders in `keep` stay, but their content is removed."""
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(folder)):
            if entry.path in keep:
                empty(entry.path, keep)
            elif entry.is_dir(follow_symlinks=False):
                remove_tree(entry.path)
            else:
                os.unlink(entry.path)


def _copy(source: str, target: str) -> None:
    """Copies a folder with all attributes.

    Raises:
        OSError: with the number ENOSPC, if the disk is full.
    """
    done = subprocess.run(["cp", "-a", source, target], stderr=subprocess.PIPE, env={**os.environ, "LC_ALL": "C"})
    if done.returncode:
        is_full = any(os.strerror(number).encode() in done.stderr for number in _FULL)
        raise OSError(errno.ENOSPC if is_full else errno.EIO, done.stderr.decode(errors="replace")[-1000:], target)


def _read(path: str) -> Any:
    try:
        with open(path, "rb") as file:
            return json.load(file)
    except FileNotFoundError:
        return None
