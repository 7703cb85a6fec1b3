"""A machine's state folder: the state that an agent keeps over restarts.

    agent.lock, agent.json      lock and identity of the running agent
    key                         X25519 private key (mode 0600)
    key.previous                previous private key, if the key was rotated
    incarnation                 id of this boot of the machine; deleted by `agent.fleet.power_off`
    powered-off                 marker: the machine is off and its agent must not be started
    config.json                 the agent's configuration, without its secrets (`agent.lending.emergency_reclaim`)
    word.json                   the owner's commands while the agent did not answer (`agent.lending.owner_request`)
    lending.json, owner.sock    what the owner of the machine lends, and the owner's socket (`agent.lending`)
    stopped/WORKLOAD            number of the workload's last stopped attempt; it and older attempts are refused
    outcomes/WORKLOAD.ATTEMPT.json     outcome of an attempt whose folder was removed (`agent.outcomes`)
    memory/WORKLOAD/            the workload's memory server (`agent.memory_servers`)
    runs/WORKLOAD.ATTEMPT/      one attempt: launch.json, bucket.json, ports.json, private/ (`agent.sandbox`)
    runs/WORKLOAD.ATTEMPT/JOB.TASK/    one task (`agent.tasks.RunFolder`)

JSON files are written atomically and synced.
"""

import contextlib
import fcntl
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from agent import records, sandbox, sealed, shim, tasks
from agent.lane import ELEMENTS
from agent.processes import ProcessIdentity
from agent.record_files import damage, read_json, read_sound
from agent.tasks import RunFolder, TaskState
from domain.ids import array_of, element_id
from domain.launch import LaunchDescription
from infra.errors import ConfigurationError

_WORKLOAD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
POWERED_OFF = "powered-off"
CONFIG = "config.json"
_log = logging.getLogger(__name__)


class AttemptFolder:
    """The folder of one attempt on one machine."""

    def __init__(self, path: Path, workload_id: str, attempt: int) -> None:
        self.path = path
        self.workload_id = workload_id
        self.attempt = attempt

    @property
    def key(self) -> str:
        """The attempt's key `workload.attempt`, as in `Hello.runs` and `Attend.stop`."""
        return f"{self.workload_id}.{self.attempt}"

    def launch(self) -> LaunchDescription | None:
        """Returns the launch description, or None if it was not fetched yet.

        Raises:
            DamagedRecord: it cannot be read.
        """
        path = self.path / "launch.json"
        try:
            return LaunchDescription.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise damage(path, error) from None

    def bucket_url(self) -> str | None:
        """Returns the URL of the bucket that the launch description came from and that logs are shipped to."""
        body = read_json(self.path / "bucket.json")
        return None if body is None else str(body["url"])

    def save_launch(self, document: bytes, bucket_url: str) -> None:
        """Stores the launch description (JSON) and the URL of its bucket."""
        make_folder(self.path)
        records.write_durably(str(self.path / "bucket.json"), {"url": bucket_url})
        records.write_durably(str(self.path / "launch.json"), document)

    def ports(self) -> dict[str, int]:
        """Returns the reserved rendezvous port of each job."""
        return read_sound(self.path / "ports.json") or {}

    def save_ports(self, ports: dict[str, int]) -> None:
        """Stores the reserved rendezvous port of each job."""
        make_folder(self.path)
        records.write_durably(str(self.path / "ports.json"), ports)

    def run(self, job: str, task: int) -> RunFolder:
        """Returns the folder of one task of the attempt, which may not exist yet."""
        return RunFolder(self.path / f"{job}.{task}", self.workload_id, self.attempt, job, task)

    @property
    def private(self) -> Path:
        """The folder of the attempt's sandbox, with its `/tmp` and `/var/tmp` (`agent.sandbox`)."""
        return self.path / "private"

    def runs(self) -> list[RunFolder]:
        """Returns the folders of tasks that exist, sorted by job and task index."""
        found = []
        with contextlib.suppress(FileNotFoundError), os.scandir(self.path) as entries:
            for entry in entries:
                job, _, task = entry.name.rpartition(".")
                if job and task.isdigit() and entry.is_dir():
                    found.append(self.run(job, int(task)))
        return sorted(found, key=lambda run: (run.job, run.task))

    def elements(self) -> list[RunFolder]:
        """Returns the elements of an array with output on this machine that run, or whose output is not shipped yet."""
        found = []
        for run in self.runs():
            for path in sorted((run.path / ELEMENTS).glob("*.*")):
                index, _, attempt = path.name.rpartition(".")
                element = element_id(array_of(self.workload_id), int(index))
                found.append(RunFolder(path, element, int(attempt), run.job, run.task))
        return found

    def age_s(self) -> float:
        """Returns the seconds since a file was last added to this folder or to the folder of one of its tasks."""
        return time.time() - max(path.stat().st_mtime for path in (self.path, *(run.path for run in self.runs())))

    def remove(self) -> None:
        """Deletes the folder."""
        sandbox.clear(str(self.private))
        sandbox.remove_tree(self.path)


class StateFolder:
    """The state folder of one machine. The constructor creates the folder and its subfolders if they are missing."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.images = self.path / "images"
        """Records of the images that the agent has fetched (`agent.containers.image_cleanup`)."""
        self._lock: int | None = None
        self._folder: int | None = None
        self._fence = threading.Lock()
        self._fenced: dict[str, int] = {}
        """Last stopped attempt of each workload whose record could not be written yet, for example on a full disk."""
        self._ended: set[str] = set()
        """Cache of the attempts whose tasks have all ended. There may be many, and ended tasks never run again."""
        for name in ("", "runs", "stopped", "outcomes"):
            make_folder(self.path / name)

    def acquire(self, patience_s: float = 15.0) -> None:
        """Takes the folder's lock for this agent and stores the agent's identity.

        Raises:
            ConfigurationError: another agent still holds the lock after `patience_s` seconds.
        """
        self._folder = os.open(self.path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
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
                        f"state_dir {self.path}: is in use by another agent{f' (pid {other.pid})' if other else ''}"
                    ) from None
                time.sleep(0.1)
        me = ProcessIdentity.of(os.getpid())
        body = {"pid": me.pid, "start": me.start, "boot_id": me.boot_id}
        try:
            records.write_durably(str(self.path / "agent.json"), body)
        except OSError as error:  # For example a full disk. The agent can run without this record.
            _log.warning("%s: cannot be written: %s", self.path / "agent.json", error)

    def is_there(self) -> bool:
        """Whether the folder still is the one whose lock this agent holds. False if it was deleted or replaced."""
        if self._lock is None:
            return True
        try:
            return os.path.samestat(os.fstat(self._lock), (self.path / "agent.lock").stat())
        except OSError:
            return False

    def place(self) -> Path:
        """Returns the current path, without links, of the folder that this agent has acquired.

        It may have been moved. If it was deleted, this is the path that it had, and that its files have in `/proc`.
        """
        if self._folder is None:
            return self.path
        return Path(str(Path(f"/proc/self/fd/{self._folder}").readlink()).removesuffix(" (deleted)"))

    def release(self) -> None:
        """Releases the folder's lock so that another agent can take it."""
        for descriptor in (self._lock, self._folder):
            if descriptor is not None:
                os.close(descriptor)
        self._lock = self._folder = None

    def agent(self) -> ProcessIdentity | None:
        """Returns the identity of the agent that last acquired the folder, or None if there was none."""
        body = read_sound(self.path / "agent.json")
        return None if not body else ProcessIdentity.from_json(body, str(body["boot_id"]))

    def private_keys(self) -> list[bytes]:
        """Returns the machine's private key, then the previous key if the key was rotated. Creates a missing key."""
        previous = self.path / "key.previous"
        return [self.private_key(), *([previous.read_bytes()] if previous.exists() else [])]

    def rotate_key(self) -> None:
        """Replaces the private key by a new one. Keeps the previous key so that the machine can prove its identity."""
        path = self.path / "key"
        if path.exists():
            path.replace(self.path / "key.previous")
        self.private_key()

    def private_key(self) -> bytes:
        """Returns the machine's private key. Creates it if it is missing."""
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
        """Returns the id of this boot, `BOOT_ID.RANDOM`.

        The id survives restarts of the agent. It changes with each boot of the machine and with `power_off`.
        """
        path = self.path / "incarnation"
        body = read_sound(path)
        boot = shim.boot_id()
        if not body or body["boot_id"] != boot:
            body = {"boot_id": boot, "chance": secrets.token_hex(4)}
            records.write_durably(str(path), body)
        return f"{body['boot_id']}.{body['chance']}"

    def stopped_attempt(self, workload_id: str) -> int:
        """Returns the number of the workload's last stopped attempt, or 0 if none was stopped."""
        return max(self._recorded_stop(workload_id), self._fenced.get(workload_id, 0))

    def _recorded_stop(self, workload_id: str) -> int:
        body = read_sound(self.path / "stopped" / check_workload(workload_id))
        if body is None:
            return 0
        if not body:  # Only the newest attempt here can be one that was not stopped.
            return max((one.attempt - 1 for one in self.attempts() if one.workload_id == workload_id), default=0)
        return int(body["attempt"])

    def stop_attempts(self, workload_id: str, attempt: int) -> None:
        """Refuses `attempt` and all older attempts of the workload from now on. Durable; cannot be undone.

        Raises:
            OSError: the record could not be written. This agent process still refuses the attempts.
        """
        with self._fence:
            if attempt > self._recorded_stop(workload_id):
                self._fenced[workload_id] = max(attempt, self._fenced.get(workload_id, 0))
                records.write_reserved(str(self.path / "stopped" / workload_id), {"attempt": attempt})
                del self._fenced[workload_id]

    def forget_stopped(self, keep_s: float) -> None:
        """Deletes records of stops older than `keep_s` seconds, except those of workloads that have a folder here."""
        here = {attempt.workload_id for attempt in self.attempts()}
        with self._fence:
            for path in (self.path / "stopped").iterdir():
                workload_id = path.name.partition(".")[0]
                if workload_id not in here and time.time() - path.stat().st_mtime > keep_s:
                    path.unlink(missing_ok=True)

    def reserve_stop(self, workload_id: str) -> None:
        """Reserves the disk space for the record that `stop_attempts` writes."""
        records.reserve(str(self.path / "stopped" / check_workload(workload_id)))

    def attempt(self, workload_id: str, attempt: int) -> AttemptFolder:
        """Returns the folder of an attempt, which may not exist yet."""
        return AttemptFolder(self.path / "runs" / f"{check_workload(workload_id)}.{attempt}", workload_id, attempt)

    def is_over(self, attempt: AttemptFolder) -> bool:
        """Whether no task of the attempt runs or will run: all its tasks have ended, or the attempt was stopped."""
        if attempt.key in self._ended:
            return True
        states = [tasks.inspect(run) for run in attempt.runs()]
        if states and all(state is TaskState.ENDED for state in states):
            self._ended.add(attempt.key)
            return True
        # Not cached: a start that began before the stop may still be in progress.
        if self.stopped_attempt(attempt.workload_id) >= attempt.attempt:
            return TaskState.RUNNING not in states and TaskState.LOST not in states
        return False

    def remove(self, attempt: AttemptFolder) -> None:
        """Deletes the folder of an attempt."""
        attempt.remove()
        self._ended.discard(attempt.key)

    def clear_private(self) -> None:
        """Removes the temporary folders of attempts without a shim, which killed shims have left."""
        for attempt in self.attempts():
            sandbox.clear(str(attempt.private))

    def is_started(self, attempt: AttemptFolder) -> bool:
        """Whether any task of the attempt was started, or was stopped before its start."""
        return any(tasks.inspect(run) is not TaskState.ABSENT for run in attempt.runs())

    def running(self) -> list[str]:
        """Returns the keys (`workload.attempt`) of the attempts with a running task."""
        return [a.key for a in self.attempts() if any(tasks.inspect(run) is TaskState.RUNNING for run in a.runs())]

    def attempts(self) -> list[AttemptFolder]:
        """Returns the attempts that have a folder, sorted by workload and number."""
        return self._attempts(os.listdir(self.path / "runs"))  # noqa: PTH208 - only names are needed

    def unfinished(self, but: AttemptFolder | None = None) -> list[AttemptFolder]:
        """Returns the attempts, except `but`, with tasks that run or may still start.

        Their port reservations are valid. Attempts that are known to have ended are skipped without reading folders.
        """
        names = os.listdir(self.path / "runs")  # noqa: PTH208
        found = self._attempts(name for name in names if name not in self._ended)
        return [a for a in found if (but is None or a.key != but.key) and not self.is_over(a)]

    def _attempts(self, names: Iterable[str]) -> list[AttemptFolder]:
        found = []
        for name in names:
            workload_id, _, number = name.rpartition(".")
            if number.isdigit() and _WORKLOAD.fullmatch(workload_id):
                found.append(self.attempt(workload_id, int(number)))
        return sorted(found, key=lambda a: (a.workload_id, a.attempt))


def make_folder(path: Path) -> None:
    """Makes a folder that other users cannot list. The mode of an existing folder is not changed.

    Under an agent that runs as root, whose tasks may run as other users, other users can enter the folder (mode 0711).
    Otherwise they cannot (mode 0700).
    """
    mode = 0o711 if os.geteuid() == 0 else 0o700
    path.mkdir(mode=mode, parents=True, exist_ok=True)


def check_workload(workload_id: str) -> str:
    """Returns `workload_id` if it is valid as the name of a folder.

    Raises:
        ValueError: `workload_id` contains other characters than letters, digits, hyphens and underscores.
    """
    if not _WORKLOAD.fullmatch(workload_id):
        raise ValueError(f"workload id {workload_id!r}: must be letters, digits, hyphens and underscores")
    return workload_id
