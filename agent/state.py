"""A machine's state folder: what an agent must still know after its own restart.

    agent.lock, agent.json      held and written by the running agent
    key                         the X25519 private key (mode 0600)
    key.previous                the one before, where it was rotated
    incarnation                 this boot of the machine; gone after `agent.fleet.power_off`
    powered-off                 marker: the machine is off and its agent must not be started
    stopped/WORKLOAD            the last attempt of a workload that was told to stop: it and older ones are refused
    outcomes/WORKLOAD.ATTEMPT.json     how an attempt's tasks ended whose folder was tidied away (`agent.outcomes`)
    runs/WORKLOAD.ATTEMPT/      one attempt: launch.json, bucket.json, ports.json
    runs/WORKLOAD.ATTEMPT/JOB.TASK/    one task (`agent.tasks.RunFolder`)

JSON files are replaced in one step and synced.
"""

import contextlib
import fcntl
import json
import logging
import os
import re
import secrets
import shutil
import stat
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from agent import records, sealed, shim, tasks
from agent.processes import Identity
from agent.tasks import RunFolder, State
from domain.launch import LaunchDescription
from infra.errors import ConfigurationError

_WORKLOAD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
POWERED_OFF = "powered-off"
_log = logging.getLogger(__name__)


class AttemptFolder:
    """What one machine knows of one attempt."""

    def __init__(self, path: Path, workload_id: str, attempt: int) -> None:
        self.path = path
        self.workload_id = workload_id
        self.attempt = attempt

    @property
    def key(self) -> str:
        """`workload.attempt`, as `Hello.runs` and `Attend.stop` have it."""
        return f"{self.workload_id}.{self.attempt}"

    def launch(self) -> LaunchDescription | None:
        """The launch description, once it was fetched."""
        try:
            return LaunchDescription.model_validate_json((self.path / "launch.json").read_bytes())
        except FileNotFoundError:
            return None

    def bucket_url(self) -> str | None:
        """The bucket that it came from, and that logs go to."""
        body = read_json(self.path / "bucket.json")
        return None if body is None else str(body["url"])

    def save_launch(self, document: bytes, bucket_url: str) -> None:
        """Keep the launch description (JSON) and where it came from."""
        make_folder(self.path)
        records.write_durably(str(self.path / "bucket.json"), {"url": bucket_url})
        records.write_durably(str(self.path / "launch.json"), document)

    def ports(self) -> dict[str, int]:
        """Job to the port that is reserved for its rendezvous."""
        return read_json(self.path / "ports.json") or {}

    def save_ports(self, ports: dict[str, int]) -> None:
        """Keep the reservation."""
        make_folder(self.path)
        records.write_durably(str(self.path / "ports.json"), ports)

    def run(self, job: str, task: int) -> RunFolder:
        """The folder of one of its tasks, which may not be there yet."""
        return RunFolder(self.path / f"{job}.{task}", self.workload_id, self.attempt, job, task)

    def runs(self) -> list[RunFolder]:
        """The tasks that have a folder, by job and index."""
        found = []
        with contextlib.suppress(FileNotFoundError), os.scandir(self.path) as entries:
            for entry in entries:
                job, _, task = entry.name.rpartition(".")
                if job and task.isdigit() and entry.is_dir():
                    found.append(self.run(job, int(task)))
        return sorted(found, key=lambda run: (run.job, run.task))

    def age_s(self) -> float:
        """Seconds since a file was last put into it, or into one of its tasks' folders."""
        return time.time() - max(path.stat().st_mtime for path in (self.path, *(run.path for run in self.runs())))

    def remove(self) -> None:
        """Delete all of it."""
        shutil.rmtree(self.path, ignore_errors=True)


class StateFolder:
    """The state folder of one machine. Made with what it needs."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._lock: int | None = None
        self._fence = threading.Lock()
        self._fenced: dict[str, int] = {}
        """Attempts that are refused although the disk is too full to say so."""
        self._ended: set[str] = set()
        """Attempts of which all tasks are known to have ended: they stay so, and there may be many."""
        for name in ("", "runs", "stopped", "outcomes"):
            make_folder(self.path / name)

    def acquire(self, patience_s: float = 15.0) -> None:
        """Become the one agent of this folder, and record who that is.

        Raises:
            ConfigurationError: another agent still runs on it after `patience_s`.
        """
        self._lock = os.open(self.path / "agent.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        give_up_s = time.monotonic() + patience_s
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > give_up_s:
                    other = self.agent()
                    raise ConfigurationError(
                        f"state_dir {self.path}: another agent{f' (pid {other.pid})' if other else ''} runs on it"
                    ) from None
                time.sleep(0.1)
        me = Identity.of(os.getpid())
        body = {"pid": me.pid, "start": me.start, "boot_id": me.boot_id}
        try:
            records.write_durably(str(self.path / "agent.json"), body)
        except OSError as error:  # A full disk: who the agent is matters less than that there is one.
            _log.warning("%s: %s", self.path / "agent.json", error)

    def release(self) -> None:
        """Let another agent have the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def agent(self) -> Identity | None:
        """The agent that last ran on it."""
        body = read_json(self.path / "agent.json")
        return None if body is None else Identity.from_json(body, str(body["boot_id"]))

    def private_keys(self) -> list[bytes]:
        """The machine's private key, made if there is none, and then the one before it, if it was rotated."""
        previous = self.path / "key.previous"
        return [self.private_key(), *([previous.read_bytes()] if previous.exists() else [])]

    def rotate_key(self) -> None:
        """Have a new key from now on. The one before is kept, so that the machine can prove that it is the same."""
        path = self.path / "key"
        if path.exists():
            path.replace(self.path / "key.previous")
        self.private_key()

    def private_key(self) -> bytes:
        """The machine's private key; made if there is none."""
        path = self.path / "key"
        if not path.exists():
            temporary = path.with_name(f"key.{os.getpid()}.tmp")
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(sealed.new_key())
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(path)
        return path.read_bytes()

    def incarnation(self) -> str:
        """The boot of the machine, `BOOT.CHANCE`: kept over restarts of the agent; new after a boot or `power_off`."""
        path = self.path / "incarnation"
        body = read_json(path)
        boot = shim.boot_id()
        if body is None or body["boot_id"] != boot:
            body = {"boot_id": boot, "chance": secrets.token_hex(4)}
            records.write_durably(str(path), body)
        return f"{body['boot_id']}.{body['chance']}"

    def stopped_attempt(self, workload_id: str) -> int:
        """The last attempt that was told to stop; 0: none."""
        return max(self._recorded_stop(workload_id), self._fenced.get(workload_id, 0))

    def _recorded_stop(self, workload_id: str) -> int:
        body = read_json(self.path / "stopped" / check_workload(workload_id))
        return 0 if body is None else int(body["attempt"])

    def stop_attempts(self, workload_id: str, attempt: int) -> None:
        """Refuse `attempt` and older ones from now on. Durable, and never taken back.

        Raises:
            OSError: it could not be written; this agent refuses them all the same.
        """
        with self._fence:
            if attempt > self._recorded_stop(workload_id):
                self._fenced[workload_id] = max(attempt, self._fenced.get(workload_id, 0))
                records.write_reserved(str(self.path / "stopped" / workload_id), {"attempt": attempt})
                del self._fenced[workload_id]

    def forget_stopped(self, keep_s: float) -> None:
        """Forget stops that were recorded more than `keep_s` seconds ago, unless something of the workload is here."""
        here = {attempt.workload_id for attempt in self.attempts()}
        with self._fence:
            for path in (self.path / "stopped").iterdir():
                workload_id = path.name.partition(".")[0]
                if workload_id not in here and time.time() - path.stat().st_mtime > keep_s:
                    path.unlink(missing_ok=True)

    def reserve_stop(self, workload_id: str) -> None:
        """Reserve the disk space in which `stop_attempts` refuses a workload's attempts."""
        records.reserve(str(self.path / "stopped" / check_workload(workload_id)))

    def attempt(self, workload_id: str, attempt: int) -> AttemptFolder:
        """The folder of an attempt, which may not be there yet."""
        return AttemptFolder(self.path / "runs" / f"{check_workload(workload_id)}.{attempt}", workload_id, attempt)

    def is_over(self, attempt: AttemptFolder) -> bool:
        """Whether nothing of an attempt runs, or will run any more: it was stopped, or all its tasks have ended."""
        if attempt.key in self._ended:
            return True
        states = [tasks.look(run) for run in attempt.runs()]
        if states and all(state is State.ENDED for state in states):
            self._ended.add(attempt.key)
            return True
        # Not for good: a start that had begun before the stop may still be under way.
        if self.stopped_attempt(attempt.workload_id) >= attempt.attempt:
            return State.RUNNING not in states and State.LOST not in states
        return False

    def remove(self, attempt: AttemptFolder) -> None:
        """Delete all that is here of an attempt."""
        attempt.remove()
        self._ended.discard(attempt.key)

    def is_started(self, attempt: AttemptFolder) -> bool:
        """Whether any of its tasks was ever started, or was stopped before."""
        return any(tasks.look(run) is not State.ABSENT for run in attempt.runs())

    def running(self) -> list[str]:
        """`workload.attempt` of every attempt of which something runs."""
        return [a.key for a in self.attempts() if any(tasks.look(run) is State.RUNNING for run in a.runs())]

    def attempts(self) -> list[AttemptFolder]:
        """The attempts that have a folder, by workload and number."""
        return self._attempts(os.listdir(self.path / "runs"))  # noqa: PTH208 - only names are needed

    def unfinished(self) -> list[AttemptFolder]:
        """Those of which something runs, or may run yet. Cheap, however many have ended."""
        names = os.listdir(self.path / "runs")  # noqa: PTH208
        return [a for a in self._attempts(name for name in names if name not in self._ended) if not self.is_over(a)]

    def _attempts(self, names: Iterable[str]) -> list[AttemptFolder]:
        found = []
        for name in names:
            workload_id, _, number = name.rpartition(".")
            if number.isdigit() and _WORKLOAD.fullmatch(workload_id):
                found.append(self.attempt(workload_id, int(number)))
        return sorted(found, key=lambda a: (a.workload_id, a.attempt))


def make_folder(path: Path) -> None:
    """Make a folder that others cannot list, and enter only where tasks may run as other users: under a root agent.

    One that is there gets the same mode.
    """
    mode = 0o711 if os.geteuid() == 0 else 0o700
    path.mkdir(mode=mode, parents=True, exist_ok=True)
    if stat.S_IMODE(path.stat().st_mode) != mode:
        path.chmod(mode)


def check_workload(workload_id: str) -> str:
    """`workload_id`, if it can name a folder.

    Raises:
        ValueError: it cannot.
    """
    if not _WORKLOAD.fullmatch(workload_id):
        raise ValueError(f"workload id {workload_id!r}: must be letters, digits, hyphens and underscores")
    return workload_id


def read_json(path: Path) -> Any:
    """The JSON in a file; None: there is no file."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
