"""Memory servers of workloads (`mizzen.memory`), which hold checkpoints for longer than a task or an attempt.

A machine sets memory aside for them (`AgentConfig.checkpoint_memory_bytes`), which the scheduler gives to no task. The
first process of a workload that asks for a server gets one. It is a process of its own, with the user of the workload's
tasks, in cgroups of its own, and continues while the agent is away. In the machine's state folder:

    memory/WORKLOAD/start.sock     asks the agent for the server; the agent listens
    memory/WORKLOAD/server.sock    the server
    memory/WORKLOAD/server.lock    held and written by the server: its pid
    memory/WORKLOAD/server.json    its limit, cgroups, and a digest of the token of the run

Tasks see the folder of their workload only. The server ends with the workload (`StopNode.ends`), else
`AgentConfig.keep_memory_s` after its last attempt on this machine, or when another workload needs the memory, or the
owner takes the machine.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mizzen
from agent import records
from agent.cgroups import TaskLimits, limit, remove_cgroup
from agent.config import AgentConfig
from agent.launch import Owner
from agent.ports import NoFreePort, Ports
from agent.processes import ProcessIdentity, kill_until_gone
from agent.record_files import read_sound
from agent.state import StateFolder, check_workload
from domain.launch import LaunchDescription
from mizzen.memory import wire
from mizzen.memory.server import short_path

FOLDER = "memory"
_START, _SERVER, _LOCK, _RECORD = "start.sock", "server.sock", "server.lock", "server.json"
_LEAST_BYTES = 1 << 20
_OWN_BYTES, _OWN_THREADS, _OWN_CPUS_MILLI = 64 << 20, 512, 1000
"""What the process of a server needs besides the memory that it holds."""
_START_S, _ASKED_S = 20.0, 10.0
_MOST_ASKED_BYTES = 4096
_CODE = f"""
import sys
sys.path[:0] = {[str(Path(__file__).parents[1]), str(Path(str(mizzen.__file__)).parents[1])]!r}
from agent.memory_servers import main
main()
"""
_log = logging.getLogger(__name__)


class NoMemory(Exception):
    """The machine has no memory for the server. The message says why."""


@dataclass(frozen=True)
class _Held:
    """The server of a workload."""

    folder: Path

    @property
    def record(self) -> dict[str, Any]:
        return read_sound(self.folder / _RECORD) or {}

    def pid(self) -> int | None:
        """Returns the pid of the server, which holds a lock as long as it runs; None: it does not run."""
        try:
            lock = os.open(self.folder / _LOCK, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return None
        except BlockingIOError:
            text = os.pread(lock, 32, 0).strip()
            return int(text) if text.isdigit() else None
        finally:
            os.close(lock)

    def kill(self) -> None:
        """Kills the server and removes its cgroups, but keeps the folder, which tasks of the workload may see."""
        if (pid := self.pid()) is not None:
            with contextlib.suppress(ProcessLookupError):
                identity = ProcessIdentity.of(pid)
                if self.pid() == pid:
                    identity.send(signal.SIGKILL)
                kill_until_gone(lambda: {pid} if identity.alive() else set())
        for path in self.record.get("cgroups", ()):
            remove_cgroup(path)

    def end(self) -> None:
        """Kills the server and removes its folder."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


def end_servers(state: StateFolder) -> None:
    """Ends all memory servers of a machine."""
    with contextlib.suppress(FileNotFoundError):
        for folder in (state.path / FOLDER).iterdir():
            _Held(folder).end()


class MemoryServers:
    """The memory servers of one machine. The methods without `async` block."""

    def __init__(self, config: AgentConfig, state: StateFolder, ports: Ports) -> None:
        self._config, self._state, self._ports = config, state, ports
        self._path = state.path / FOLDER
        self._changing = threading.Lock()
        self._listening: dict[str, asyncio.Task[None]] = {}

    def folder_of(self, workload_id: str) -> Path | None:
        """Returns the folder with the sockets of a workload; None: the machine sets no memory aside."""
        if not self._config.checkpoint_memory_bytes:
            return None
        return self._path / check_workload(workload_id)

    def share_bytes(self, launch: LaunchDescription) -> int:
        """Returns the memory of a workload's server: in proportion to the memory that its tasks request here."""
        own = sum(place.memory_bytes for place in launch.on_machine(self._config.machine))
        return int(self._config.checkpoint_memory_bytes * min(1.0, own / self._config.task_memory_bytes))

    async def listen(self, launch: LaunchDescription, owner: Owner | None) -> None:
        """Listens for requests of the workload's tasks from now on. Idempotent."""
        folder = self.folder_of(launch.workload_id)
        if folder is None:
            return
        await asyncio.to_thread(_make, folder, owner)
        known = self._listening.get(launch.workload_id)
        if known is not None and not known.done() and (folder / _START).exists():
            return
        users = {0, os.geteuid(), *(() if owner is None else (owner.uid,))}
        link = await asyncio.to_thread(_bound, folder, owner)

        async def answer() -> None:
            while True:
                asked, _ = await asyncio.get_running_loop().sock_accept(link)
                await asyncio.to_thread(self._answer, asked, users, launch, owner)

        if known is not None:
            known.cancel()
        self._listening[launch.workload_id] = asyncio.create_task(answer())
        self._listening[launch.workload_id].add_done_callback(lambda _: link.close())

    def _answer(self, link: socket.socket, users: set[int], launch: LaunchDescription, owner: Owner | None) -> None:
        with contextlib.suppress(OSError, ValueError), link:
            link.settimeout(_ASKED_S)
            user = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
            if user in users:
                told = wire.receive(link, _MOST_ASKED_BYTES)
                wire.send(link, self._started(launch, owner, told))

    def _started(self, launch: LaunchDescription, owner: Owner | None, told: Mapping[str, Any]) -> dict[str, Any]:
        try:
            self.start(launch, owner, told)
        except NoMemory as error:
            return {"error": str(error)}
        except (OSError, ValueError, TypeError, KeyError, NoFreePort, subprocess.SubprocessError) as error:
            _log.warning("the memory server of %s cannot be started: %s", launch.workload_id, error)
            return {"error": f"the memory server cannot be started: {error}"}
        return {}

    def start(self, launch: LaunchDescription, owner: Owner | None, told: Mapping[str, Any]) -> None:
        """Starts the server of a workload, unless it runs. `told` is a request of a task (`mizzen.memory.connection`).

        Raises:
            NoMemory: the machine has no memory for it.
            OSError, ValueError, SubprocessError, NoFreePort: it cannot be started.
        """
        token = bytes.fromhex(told["token"])
        digest = hashlib.sha256(b"mizzen memory server " + token).hexdigest()
        workload_id = launch.workload_id
        folder = self.folder_of(workload_id)
        assert folder is not None
        with self._changing:
            held = _Held(folder)
            if held.pid() is not None:
                if held.record.get("token") == digest:
                    return
                held.kill()  # The token of the run has changed, because its checkpoints have another root now.
            share = self.share_bytes(launch)
            size = min(share, self._free_bytes(share, workload_id))
            if told.get("limit_bytes") is not None:
                size = min(size, int(told["limit_bytes"]))
            if size < _LEAST_BYTES:
                raise NoMemory(f"{self._config.machine} has no memory for checkpoints of {workload_id} left")
            peers = told.get("host") is not None
            given = {
                "token": token.hex(),
                "limit_bytes": size,
                "idle_s": float(told["idle_s"]),
                "host": _own_address(self._config.address) if peers else None,
                "port": self._ports.unreserved(workload_id) if peers else 0,
                "folder": str(folder),
                "user": None if owner is None else (owner.uid, owner.gid),
                "cgroups": self._cgroups(workload_id, size),
            }
            # Before the start: whatever happens then, the memory is accounted for and the cgroups are removed.
            about = {"limit_bytes": size, "token": digest, "cgroups": given["cgroups"]}
            records.write_durably(str(folder / _RECORD), about)
            ended = subprocess.run(
                [sys.executable, "-I", "-c", _CODE], input=json.dumps(given), text=True, capture_output=True, cwd="/",
                env={}, timeout=_START_S, check=False,
            )  # fmt: skip
            if ended.returncode or held.pid() is None:
                said = (ended.stderr.strip().splitlines() or [f"status {ended.returncode}"])[-1]
                raise ChildProcessError(said)

    def _free_bytes(self, wanted: int, workload_id: str) -> int:
        """Returns the memory that no other server holds; ends servers of workloads without tasks here, if needed."""
        others = [_Held(path) for path in self._path.iterdir() if path.name != workload_id]
        running = {one: int(one.record.get("limit_bytes", 0)) for one in others if one.pid() is not None}
        active = {attempt.workload_id for attempt in self._state.unfinished()}
        unused = [one for one in running if one.folder.name not in active]
        unused.sort(key=lambda one: one.folder.stat().st_mtime)
        while (free := self._config.checkpoint_memory_bytes - sum(running.values())) < wanted and unused:
            _log.info("the memory server of %s ends: another workload needs its memory", unused[0].folder.name)
            unused[0].kill()
            del running[unused.pop(0)]
        return free

    def _cgroups(self, workload_id: str, size: int) -> list[str]:
        if not self._config.cgroup:
            return []
        # Emulated machines of one computer have their cgroups in the same folder.
        machine = hashlib.sha256(self._config.machine.encode()).hexdigest()[:12]
        return limit(f"{workload_id}.memory.{machine}", TaskLimits(size + _OWN_BYTES, _OWN_THREADS, _OWN_CPUS_MILLI))[0]

    def end(self, workload_id: str) -> None:
        """Ends the server of a workload that has ended, if it has one."""
        folder = self.folder_of(workload_id)
        if folder is not None and folder.exists():
            with self._changing:
                _Held(folder).end()

    def end_all(self) -> None:
        """Ends all servers: the owner has taken the machine."""
        with self._changing:
            end_servers(self._state)

    def tidy(self) -> None:
        """Ends the servers of workloads whose last attempt here ended longer than `keep_memory_s` ago."""
        if not self._path.is_dir():
            return
        attempts = self._state.attempts()
        kept = {one.workload_id for one in attempts if not self._state.is_over(one)}
        kept |= {one.workload_id for one in attempts if one.age_s() <= self._config.keep_memory_s}
        for folder in self._path.iterdir():
            if folder.name not in kept:
                with self._changing:
                    _Held(folder).end()

    def close(self) -> None:
        """Stops listening. The servers continue."""
        for listening in self._listening.values():
            listening.cancel()
        self._listening.clear()


def _make(folder: Path, owner: Owner | None) -> None:
    """Makes the folder of a workload, which only the user of its tasks can enter."""
    for path in (folder.parent, folder):
        path.mkdir(mode=0o711, exist_ok=True)
    folder.chmod(0o710)
    if owner is not None:
        os.chown(folder, -1, owner.gid)


def _bound(folder: Path, owner: Owner | None) -> socket.socket:
    (folder / _START).unlink(missing_ok=True)
    link = socket.socket(socket.AF_UNIX)
    try:
        with short_path(folder / _START) as path:
            link.bind(path)
        if owner is not None:
            os.chown(folder / _START, owner.uid, owner.gid)
        link.listen(16)
        link.setblocking(False)
    except BaseException:
        link.close()
        raise
    return link


def _own_address(address: str) -> str:
    """Returns the machine's address if it can be bound here, else an empty string: all addresses."""
    try:
        socket.create_server((address, 0)).close()
    except OSError:
        return ""
    return address


def main() -> None:
    """Serve as standard input says, in a child, until the server is idle or its socket is removed."""
    from agent.cgroups import join
    from mizzen.memory.server import serve

    told = json.load(sys.stdin)
    join(told["cgroups"])
    server = serve(told, detach=True)
    if server is not None:
        server.wait()
