"""Runs `mizzen up` in a process with its own data folder and free ports, and finds processes that it leaves behind."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from agent.fleet import power_off
from domain.machine_code import folder_of
from infra.config.services import TemporalSettings
from infra.config.settings import load_settings
from infra.stack.fleet import DEFAULT_FLEET
from infra.stack.ports import free_port
from mizzen_client import Client
from server.agents import machine_state_dir

ROOT = Path(__file__).resolve().parent.parent.parent
JOB = Path(__file__).with_name("job.py")

_MACHINES = f'{{name: m, count: 2, gpus: 4, gpu_type: a100, cpus: 16, memory: 16GiB, owner: "{os.getuid()}"}}'
_BUILDING = f'[{{name: m, gpus: 2, gpu_type: l4, cpus: 4, memory: 4GiB, owner: "{os.getuid()}"}}]'
FLEET = f"""
version: 1
regions:
  - name: east
    clusters:
      - name: a
        machines: [{_MACHINES}]
      - name: physics
        machines: {_BUILDING}
      - name: chemistry
        machines: {_BUILDING}
  - name: west
    clusters:
      - name: a
        machines: [{_MACHINES}]
"""

CONFIG = """
scheduler: {{scan_interval_s: 5, min_runtime_s: 1, bid_timeout_s: 15}}
lifecycle: {{heartbeat_timeout_s: 5, node_lost_after_s: {lost_s}, collect_interval_s: 1, lent_launch_s: 15}}
# Tasks use files in the folder of the test, which no other user can access, and which may be below /tmp.
tasks: {{isolation: none}}
trust_tenants: true
temporal: {{keep_closed_s: 100000}}
"""


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = 90.0) -> Any:
    """Calls `condition` until its result is true, and returns that result; an exception counts as a false result.

    Raises:
        AssertionError: the result was not true within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    error: Exception | None = None
    while time.monotonic() < deadline:
        try:
            if found := condition():
                return found
        except Exception as raised:
            error = raised
        time.sleep(0.1)
    raise AssertionError(f"this did not become true within {timeout_s:.0f} s: {what}; last error: {error!r}")


def processes_of(folder: Path) -> dict[int, str]:
    """Returns the command lines of processes whose command line or environment contains `folder`, by pid."""
    needle, out = str(folder).encode(), {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            command = (entry / "cmdline").read_bytes()
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            if state != "Z" and (needle in command or needle in (entry / "environ").read_bytes()):
                out[int(entry.name)] = command.replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
    return out


def owner_says(up: "Up", machine: str, *arguments: str) -> dict[str, Any]:
    """Runs a command of the owner of a machine; returns the status that it prints.

    Raises:
        CalledProcessError: the command failed.
    """
    socket = machine_state_dir(up.data, machine) / "owner.sock"
    command = [str(Path(sys.executable).parent / "mizzen"), *arguments, "--socket", str(socket), "-o", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    status: dict[str, Any] = json.loads(done.stdout)
    return status


class Up:
    """A stack: one `mizzen up` process at a time, on one data folder."""

    def __init__(
        self, folder: Path, fleet: str | None = FLEET, lost_s: int = 15, settings: str = "", **existing: str
    ) -> None:
        """Writes the fleet file and the settings, and starts nothing.

        Args:
            folder: gets the data folder, the settings and the log.
            fleet: the fleet file as YAML; None stands for the default fleet.
            lost_s: the time after which a machine that does not answer is lost.
            settings: additional settings, as YAML.
            existing: values of the flags `--database` and `--temporal`, if these services already exist.
        """
        self.folder = folder
        folder.mkdir(exist_ok=True)
        fleet = DEFAULT_FLEET.model_dump_json() if fleet is None else fleet
        regions = yaml.safe_load(fleet)["regions"]
        self.machines = sum(m.get("count", 1) for r in regions for c in r["clusters"] for m in c["machines"])
        self.existing = existing
        self.data = folder / "data"
        self.port, self.sets_port = free_port(), True
        (folder / "fleet.yaml").write_text(fleet)
        (folder / "config.yaml").write_text(CONFIG.format(lost_s=lost_s) + settings)
        self.bin, self.cwd, self.environment = Path(sys.executable).parent, ROOT, dict[str, str]()
        self.process: subprocess.Popen[str] | None = None
        self._client: Client | None = None

    def command(self) -> list[str]:
        """Returns the command line of `mizzen up`."""
        out = [str(self.bin / "mizzen"), "up", "--data-dir", str(self.data)]
        out += ["--fleet", str(self.folder / "fleet.yaml"), "--config", str(self.folder / "config.yaml")]
        out += ["--port", str(self.port)] if self.sets_port else []
        for name, value in self.existing.items():
            out += [f"--{name}", value]
        return out

    def start(self, machines: bool = True, timeout_s: float = 90.0) -> None:
        """Starts the stack and waits until it is up; with `machines`, also until its machines are ready.

        Raises:
            AssertionError: it ends or is not up in time. In fixtures, pytest handles no `SystemExit`: the next
                parameters of the fixture would fail, too.
        """
        log = self.folder / "up.log"
        with log.open("a") as file:
            offset = file.tell()
            self.process = subprocess.Popen(
                self.command(),
                cwd=self.cwd,
                env={**os.environ, **self.environment},
                stdout=file,
                stderr=file,
                text=True,
                start_new_session=True,
            )
        process = self.process

        def up() -> bool:
            said = log.read_text()[offset:]
            if process.poll() is not None:
                raise SystemExit(f"`mizzen up` ended with exit code {process.returncode}: {said}")
            return "mizzen is up" in said

        try:
            wait_until(up, "mizzen is up", timeout_s)
        except SystemExit as error:  # `wait_until` does not repeat after it.
            raise AssertionError(str(error)) from None
        if machines:
            self.await_machines()

    def await_machines(self) -> None:
        """Waits until the machines of the fleet are ready."""
        wait_until(lambda: len(self.ready_machines()) >= self.machines, "all machines are ready")

    def ready_machines(self) -> list[str]:
        """Returns the machines of the installation that are ready."""
        return [m["id"] for m in self.client().machines() if m["state"] == "ready"]

    def client(self) -> Client:
        """Returns a client with the operator's key."""
        if self._client is None:
            key = (self.data / "operator.key").read_text().strip()
            self._client = Client(f"http://127.0.0.1:{self.port}", key)
        return self._client

    @property
    def temporal(self) -> TemporalSettings:
        """How to connect to the stack's Temporal."""
        return load_settings(self.data / "run" / "settings.yaml").temporal

    def takes_work(self, machine: str) -> bool:
        """Returns whether a machine is ready and not cordoned."""
        row = next(one for one in self.client().machines() if one["id"] == machine)
        return row["state"] == "ready" and row["cordon"] is None

    def kill(self, words: str) -> None:
        """Kills the processes of the stack whose command lines contain `words`.

        Raises:
            AssertionError: there is none.
        """
        found = [pid for pid, command in processes_of(self.data).items() if words in command]
        assert found, f"no process of the stack has {words!r} in its command line"
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def submit(
        self,
        name: str,
        steps: int,
        step_s: float,
        tasks: int = 1,
        key: str | None = None,
        gate: Path | None = None,
        gpu: str = "a100",
        **document: Any,
    ) -> str:
        """Submits a counting job of the tenant `t`, which ends only when `gate` exists; returns its id.

        `document` contains more fields of the document.
        """
        run = f'PYTHONPATH="{ROOT / "sdk"}" exec "$MIZZEN_PYTHON" "{JOB}" {steps} {step_s}'
        run += f' "{gate}"' if gate is not None else ""
        document = {
            **document,
            "version": 1,
            "name": name,
            "tenant": "t",
            "checkpoint": {"interval": "1s", "grace": "5s"},
            "jobs": [
                {
                    "name": "count",
                    "tasks": tasks,
                    "resources": {"accelerators": f"{gpu}:1", "cpus": 0.1, "memory": "64MiB"},
                    "run": run,
                }
            ],
        }
        return str(self.client().submit(document, idempotency_key=key)["id"])

    def phase(self, workload: str) -> str:
        """Returns a workload's phase."""
        return str(self.client().workload(workload)["phase"])

    def machines_of(self, workload: str) -> list[str]:
        """Returns the machines of a workload's newest attempt."""
        held = self.client().allocations(workload)
        newest = max(one["attempt"] for one in held)
        return [one["machine"] for one in held if one["attempt"] == newest]

    def saved_step(self, workload: str) -> int | None:
        """Returns the step of a workload's newest checkpoint, or None. A task that has saved also handles SIGTERM."""
        progress = self.client().workload(workload).get("progress") or {}
        step: int | None = progress.get("checkpoint_step")
        return step

    def ended(self, workload: str) -> bool:
        """Returns whether the workload has succeeded.

        Raises:
            SystemExit: the workload failed or was cancelled.
        """
        row = self.client().workload(workload)
        if row["phase"] in ("failed", "cancelled"):
            raise SystemExit(f"{row['name']} {row['phase']}: {row['reason']}")
        return row["phase"] == "succeeded"

    def interrupt(self, number: int = signal.SIGINT, timeout_s: float = 60.0) -> int:
        """Sends Ctrl-C, or another signal; returns the exit code.

        Raises:
            AssertionError: the stack does not end within `timeout_s`; names its last messages.
        """
        assert self.process is not None
        self.process.send_signal(number)
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            logs = [self.folder / "up.log", *sorted((self.data / "run" / "log").glob("*"))]
            said = "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in logs)
            raise AssertionError(f"the stack did not end within {timeout_s:.0f} s after the signal\n{said}") from None

    def close(self) -> None:
        """Kills all remaining processes, and removes the cgroups of tasks."""
        if self._client is not None:
            self._client.close()
        for pid in [*processes_of(self.data), *([self.process.pid] if self.process else [])]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if self.process is not None:
            self.process.wait()
        for machine in (self.data / "machines").glob("*"):
            power_off(machine)


BARE_UID = 2_345_678
"""A user that is a bare number, without an entry in passwd and without USER and HOME, as in many containers."""
# Python and the test's folder may be below folders that only root can enter: the process gets views of them with only
# the paths that it needs.
_BECOME = """
import json, os, subprocess, sys, tempfile
from pathlib import Path
told = json.loads(sys.argv[1])
held, closed = {}, []
for path in sorted(told["paths"]):
    above = [folder for folder in list(map(str, Path(path).parents))[-2::-1] if not os.stat(folder).st_mode & 1]
    if above:
        closed += [above[0]] * (above[0] not in closed)
        held[path] = tempfile.mkdtemp(dir="/run")
        subprocess.run(["mount", "--bind", path, held[path]], check=True)
for folder in closed:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", folder], check=True)
for path, place in held.items():
    os.makedirs(path)
    subprocess.run(["mount", "--move", place, path], check=True)
    os.rmdir(place)
os.setgroups([]); os.setgid(told["uid"]); os.setuid(told["uid"])
os.execve(told["argv"][0], told["argv"], told["env"])
"""


class BareUp(Up):
    """A stack that `BARE_UID` runs on any free ports. Only root can start it."""

    def __init__(self, folder: Path, fleet: str | None = FLEET, lost_s: int = 15, settings: str = "") -> None:
        super().__init__(folder, fleet, lost_s, settings)
        self.cwd = folder
        self.sets_port = False

    def command(self) -> list[str]:
        """Returns the command line that becomes the user and then `mizzen up`."""
        told = {
            "uid": BARE_UID,
            "paths": [str(ROOT), sys.prefix, sys.base_prefix, str(self.folder)],
            "argv": super().command(),
            "env": {"PATH": "/usr/bin:/bin", "XDG_CACHE_HOME": str(self.folder / "cache")},
        }
        private = ["unshare", "--mount", "--propagation", "slave"]
        return [*private, sys.executable, "-I", "-c", _BECOME, json.dumps(told)]

    def start(self, machines: bool = True, timeout_s: float = 90.0) -> None:
        """Gives the user the folder, starts the stack and reads the ports that it took."""
        for package in ("gms", "rms"):  # So that the loops are not compiled again.
            folder = Path(folder_of(str(ROOT / package)) or "")
            shutil.copytree(folder, self.folder / "cache" / "mizzen" / package / folder.name)
        for path in (self.folder, *self.folder.rglob("*")):
            os.chown(path, BARE_UID, BARE_UID, follow_symlinks=False)
        super().start(machines=False, timeout_s=timeout_s)
        self.port = json.loads((self.data / "run" / "ports.json").read_text())["api.port (--port)"]
        if machines:
            self.await_machines()
