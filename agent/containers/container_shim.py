"""The shim of a task in a container: has the engine make it, copies its output, and records its exit status.

The container is no child of the shim, and outlives it. In FOLDER the shim writes the records of `agent.shim`, but
`pid.json` has the engine's socket and the container's name instead of a task's pid. It is written before the container
starts, so the rule holds that a task with that file is never started again. Uses the standard library only.

On SIGTERM the processes of the container get the notice by the rules of `agent.termination`, if this process may signal
them; else the first one gets it from the engine. The container ends with the process that it has started, whatever
others run in it.
"""

import contextlib
import fcntl
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.client import CONFLICT
from typing import Any

from agent import shim
from agent.cgroups import engine_parent, kill_cgroup, remove_cgroup, remove_engine_parent
from agent.containers.engine import Container, ContainerEngine, ContainerState, EngineError, open_engine
from agent.containers.memory_kills import ContainerMemory
from agent.records import write_durably
from agent.sandbox import claim, let_go
from agent.task_setup import CANNOT_RUN
from agent.termination import TaskNotice, read_processes

_AGAIN_S = 0.5
"""Pause before a request to an engine that did not answer is repeated."""
_POLL_S = 0.25
_OUTPUT_S = 10.0
"""How long the shim reads further output after the end of the container."""
_FIRST = "first"
"""File in `private` with the name of the container whose shared memory the others use."""


class NotCreated(Exception):
    """The container engine could not create the container. The message has the reason."""


def supervise_container(folder: str, launch: dict[str, Any], started: int) -> None:
    """Runs the container of `launch` to its end and records its exit status. See `agent.shim.supervise`.

    Raises:
        NotCreated: the engine could not create the container.
    """
    engine = open_engine(launch["container"]["socket"])
    private = launch["container"]["private"]
    container = Container.from_json(launch["container"]["spec"])
    lock = claim(private)
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, shim.WATCHED)
        for ignored in (signal.SIGINT, signal.SIGHUP):
            signal.signal(ignored, signal.SIG_IGN)
        task = _Task(folder, launch, engine, container)
        launch.pop("container")  # Do not keep secrets in memory.
        try:
            exited = task.run(private, started)
        finally:
            task.remove()
        shim.write_exit(folder, exited)
    finally:
        let_go(private, lock)


class _Task:
    """A container, as its shim tracks it."""

    def __init__(self, folder: str, launch: dict[str, Any], engine: ContainerEngine, container: Container) -> None:
        self._folder = folder
        self._launch = launch
        self._engine = engine
        self._container = container
        self._name = container.name
        self._socket = launch["container"]["socket"]
        self._is_shared = launch["container"]["shared"]
        self._pid = 0
        """Pid of the container's first process, the engine's; 0: it is not known, or must not be used."""
        self._deadline_s: float | None = None
        self._notice: TaskNotice | None = None
        self._was_noticed = False
        self._killed = False
        self._state: ContainerState | None = None
        self._ended = threading.Event()
        self._memory: ContainerMemory | None = None

    def run(self, private: str, started: int) -> dict[str, Any]:
        """Runs the container to its end and returns its exit record. Closes `started` once the task is recorded.

        Raises:
            NotCreated: the engine could not create the container.
        """
        outputs = shim.open_outputs(self._launch)
        with _sharing(private, self._engine, self._name, is_shared=self._is_shared) as shares_with:
            try:
                self._create(replace(self._container, shares_with=shares_with))
                pieces = self._engine.output(self._name)
            except EngineError as error:
                raise NotCreated(f"the container engine: {error}") from None
            self._record(started)
            try:
                self._engine.start(self._name)
            except EngineError as error:
                os.write(outputs[1], f"mizzen: the container cannot be started: {error}\n".encode())
                return self._exited(CANNOT_RUN)
        if self._launch["cgroup"] is not None and self._container.memory_bytes:
            self._memory = ContainerMemory(self._launch["cgroup"])
        copying = threading.Thread(target=self._copy, args=(pieces, outputs), daemon=True)
        copying.start()
        threading.Thread(target=self._await, daemon=True).start()
        with contextlib.suppress(EngineError):
            state = self._engine.state(self._name)
            self._pid = 0 if state is None else state.pid
        self._until_the_end()
        copying.join(_OUTPUT_S)
        if self._state is None:
            return self._exited(None)
        if self._state.error and not self._state.out_of_memory:
            os.write(outputs[1], f"mizzen: the container engine: {self._state.error}\n".encode())
        return self._exited(self._state.exit_code)

    def remove(self) -> None:
        """Removes the container and its cgroups. The agent does it later if the engine does not answer."""
        with contextlib.suppress(EngineError):
            self._engine.remove(self._name)
        if (path := self._launch["cgroup"]) is not None:
            parent = engine_parent(path)
            remove_cgroup(path)
            if parent is not None:
                remove_engine_parent(parent)

    def _create(self, container: Container) -> None:
        try:
            self._engine.create(container)
        except EngineError as error:
            if error.status != CONFLICT:
                raise
            self._engine.remove(self._name)  # Of a shim that was killed before it recorded the task.
            self._engine.create(container)

    def _record(self, started: int) -> None:
        own = shim.process_stat(os.getpid())
        body: dict[str, Any] = {
            "boot_id": shim.boot_id(),
            "started_at_s": time.time(),
            "cgroup": self._launch["cgroup"],
        }
        body["shim"] = {"pid": os.getpid(), "start": 0 if own is None else own[2]}
        body["task"] = {"pid": 0, "start": 0}
        body["container"] = {"socket": self._socket, "name": self._name}
        write_durably(f"{self._folder}/{shim.PID_FILE}", body)
        os.close(started)

    def _exited(self, code: int | None) -> dict[str, Any]:
        """Returns the exit record. Engines report the end by a signal as 128 and its number, like shells."""
        by = code - 128 if code is not None and code - 128 in set(signal.valid_signals()) else None
        body: dict[str, Any] = {"exit_code": code if by is None else None, "signal": by, "ended_at_s": time.time()}
        body["noticed"] = self._was_noticed
        if self._state is not None and code != 0 and not self._killed and self._was_out_of_memory(by):
            body["memory_limit_bytes"] = body["memory_peak_bytes"] = self._container.memory_bytes
        return body

    def _was_out_of_memory(self, by: int | None) -> bool:
        """Whether the task ended at its memory limit. `by`: the signal that ended it."""
        assert self._state is not None
        if self._state.out_of_memory or by != signal.SIGKILL or self._memory is None:
            return self._state.out_of_memory
        return self._memory.was_killed()

    def _await(self) -> None:
        """Waits for the end of the container, also over a restart of the engine."""
        while True:
            with contextlib.suppress(EngineError):
                self._engine.wait(self._name)
                self._state = self._engine.state(self._name)
                if self._state is None or not self._state.running:
                    break
            time.sleep(_AGAIN_S)
        self._ended.set()
        os.kill(os.getpid(), signal.SIGCHLD)  # Wakes the main thread.

    def _copy(self, pieces: Iterator[tuple[bool, bytes]], outputs: tuple[int, int]) -> None:
        """Copies the output to its files, also over a restart of the engine. If the disk is full, output is lost."""
        while True:
            for is_error, piece in pieces:
                with contextlib.suppress(OSError):
                    os.write(outputs[is_error], piece)
            if self._ended.wait(_AGAIN_S):
                return
            with contextlib.suppress(EngineError):
                pieces = self._engine.output(self._name)

    def _until_the_end(self) -> None:
        while not self._ended.is_set():
            timeout_s = 3600.0
            if self._deadline_s is not None:
                if shim.boot_time_s() >= self._deadline_s:
                    self._kill()
                    if not self._ended.wait(_POLL_S) and self._is_gone():
                        return  # The engine does not answer, so nothing knows the exit status.
                    continue
                self._pass_on()
                timeout_s = min(_POLL_S, max(0.0, self._deadline_s - shim.boot_time_s()))
            seen = signal.sigtimedwait(shim.WATCHED, timeout_s)
            if seen is not None and seen.si_signo == signal.SIGTERM and not self._ended.is_set():
                deadline_s = shim.stop_deadline_s(self._folder, self._launch["grace_s"])
                self._deadline_s = deadline_s if self._deadline_s is None else min(deadline_s, self._deadline_s)

    def _kill(self) -> None:
        self._killed = True
        if self._launch["cgroup"] is not None:
            kill_cgroup(self._launch["cgroup"])
        with contextlib.suppress(EngineError):
            self._engine.signal(self._name, signal.SIGKILL)

    def _is_gone(self) -> bool:
        return self._pid > 0 and shim.process_stat(self._pid) is None and self._unreachable()

    def _unreachable(self) -> bool:
        try:
            self._engine.state(self._name)
        except EngineError:
            return True
        return False

    def _pass_on(self) -> None:
        """Gives the notice to the processes that are due to get it."""
        if self._pid == 0 or os.geteuid() != 0:
            if not self._was_noticed:
                with contextlib.suppress(EngineError):
                    self._engine.signal(self._name, signal.SIGTERM)
                    self._was_noticed = True
            return
        table = shim.process_table()
        living = read_processes(shim.descendants({self._pid}, table))
        if self._notice is None:
            children = sorted((one.start, pid) for pid, one in living.items() if one.parent == self._pid)
            if not children:
                return  # The engine's first process has not started the task's yet, or it has ended.
            self._notice = TaskNotice(children[0][1], shim.boot_time_s())
        assert self._deadline_s is not None
        for pid in self._notice.due(living, shim.boot_time_s(), self._deadline_s):
            for number in (signal.SIGTERM, signal.SIGCONT):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
        self._was_noticed = self._notice.noticed


@contextlib.contextmanager
def _sharing(private: str, engine: ContainerEngine, name: str, *, is_shared: bool) -> Iterator[str | None]:
    """Gives the name of the container whose shared memory this one uses; None: it has its own.

    It is that of the attempt's container that started first, if that one still runs. One container starts at a time.
    """
    if not is_shared:
        yield None
        return
    with open(f"{private}/{_FIRST}", "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        first = file.read()
        state = None
        with contextlib.suppress(EngineError):
            state = engine.state(first) if first else None
        if state is not None and state.running:
            yield first
            return
        yield None
        file.truncate(0)
        file.write(name)
