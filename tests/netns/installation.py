"""An installation of several machines: Postgres, Temporal, a worker and the API in `core`, an agent on each machine.

Postgres and Temporal are started separately, as services that exist before mizzen is installed. Each process of mizzen
is started with its own command.
"""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO, Any, Self

from agent.state import StateFolder
from infra.bootstrap import OPERATOR_KEY_FILE
from infra.config.services import TemporalSettings
from infra.stack import temporal
from infra.stack.postgres import EmbeddedPostgres
from tests.agent.harness import zygotes
from tests.netns.namespaces import Network
from tests.stack.harness import ROOT, wait_until

EXAMPLE = ROOT / "examples" / "digits"
MACHINES = ("a", "b")
REGION, CLUSTER, TABLE = "east", "c", "digits"
DATABASE_PORT, TEMPORAL_PORT, UI_PORT, API_PORT = 5433, 7233, 8233, 8080
_STOP_S = 30.0

CONFIG = """
data_dir: {data_dir}
lifecycle: {{heartbeat_timeout_s: 4, node_lost_after_s: 3, collect_interval_s: 1}}
scheduler: {{scan_interval_s: 5, min_runtime_s: 1, bid_timeout_s: 15}}
"""


def machine(name: str) -> str:
    """Returns the id of a machine."""
    return f"{REGION}/{CLUSTER}/{name}"


class Inside:
    """A client of one helper process (`tests.netns.inside`), which executes requests in a namespace."""

    def __init__(self, command: list[str], log: IO[bytes]) -> None:
        self._process = subprocess.Popen(
            [*command, sys.executable, "-m", "tests.netns.inside"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )

    def __call__(self, deed: str, *arguments: Any, **named: Any) -> Any:
        """Executes the request `deed` and returns its result.

        Raises:
            RuntimeError: the request failed, or the helper process has ended.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([deed, arguments, named]) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline() or '{"error": "the helper process has ended"}')
        if "error" in answer:
            raise RuntimeError(f"{deed}: {answer['error']}")
        return answer["value"]

    @property
    def pid(self) -> int:
        """The process's pid."""
        return self._process.pid

    def close(self) -> None:
        """Kills the process."""
        with self._process as process:
            process.kill()


class Installation:
    """An installation whose files are in `folder` and whose processes run in the namespaces of `network`."""

    def __init__(self, folder: Path, network: Network) -> None:
        self.network = network
        self._folder = folder
        self._logs = folder / "log"
        self._logs.mkdir()
        self.bucket = folder / "bucket"
        self._data = folder / "data"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._helpers: dict[str, Inside] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Kills all remaining processes."""
        for helper in self._helpers.values():
            helper.close()
        for process in self._processes.values():
            process.kill()
            process.wait()

    # ------------------------------------------------------------------------------------------------------ starting

    def start(self) -> None:
        """Starts every part with its own command, and waits until both machines are ready."""
        postgres = EmbeddedPostgres(self._folder / "postgres", DATABASE_PORT)
        postgres.initialise()
        self._spawn("core", "postgres", postgres.command())
        # The services of the Temporal dev server connect to each other on loopback only. The server therefore listens
        # on loopback, and a gate forwards its port to the network.
        settings = TemporalSettings()
        state = self._folder / "temporal.db"
        server = temporal.command(temporal.find_binary(settings), state, settings, TEMPORAL_PORT)
        self._spawn("core", "temporal", server)
        address = self.network.address("core")
        inside = [sys.executable, "-m", "tests.netns.inside"]
        self._spawn("core", "gate", [*inside, "gate", address, str(TEMPORAL_PORT)])
        for name in MACHINES:
            self._spawn_agent(name, f"{address}:{TEMPORAL_PORT}")
        self.ask("core", "postgres_ready", str(postgres.folder), DATABASE_PORT)
        config = self._folder / "config.yaml"
        config.write_text(CONFIG.format(data_dir=self._data))
        server = [sys.executable, "-m", "server"]
        existing = ["--config", str(config), "--database", postgres.url, "--temporal", f"127.0.0.1:{TEMPORAL_PORT}"]
        init = [*server, "init", *existing, "--region", f"{REGION}={self.bucket.as_uri()}"]
        with (self._logs / "init.log").open("wb") as log:
            subprocess.run([*self.network.enter("core"), *init], cwd=ROOT, check=True, stderr=log)
        roles = ["--role", "control", "--role", "region", "--region", REGION]
        self._spawn("core", "worker", [*server, "worker", *roles, *existing])
        self._spawn("core", "api", [*server, "api", "--host", "127.0.0.1", "--port", str(API_PORT), *existing])
        key = (self._data / OPERATOR_KEY_FILE).read_text().strip()
        self.ask("core", "client", f"http://127.0.0.1:{API_PORT}", key)
        wait_until(lambda: all(self.state_of(name) == "ready" for name in MACHINES), "both machines are ready")

    def _spawn_agent(self, name: str, address: str) -> None:
        where = ["--region", REGION, "--cluster", CLUSTER, "--name", name, "--address", self.network.address(name)]
        size = ["--gpus", "1", "--gpu-type", "a100", "--cpus", "4", "--memory", "1GiB"]
        bucket = ["--bucket", self.bucket.as_uri(), "--state-dir", str(self._state_dir(name))]
        command = [sys.executable, "-m", "server", "agent", "--temporal", address, *where, *size, *bucket]
        self._spawn(name, f"agent-{name}", command)

    def _spawn(self, namespace: str, name: str, command: list[str]) -> None:
        with (self._logs / f"{name}.log").open("wb") as log:
            self._processes[name] = subprocess.Popen(
                [*self.network.enter(namespace), *command],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    # ------------------------------------------------------------------------------------------------------- looking

    def ask(self, namespace: str, deed: str, *arguments: Any, **named: Any) -> Any:
        """Executes a request of `tests.netns.inside` in a namespace."""
        if namespace not in self._helpers:
            with (self._logs / f"inside-{namespace}.log").open("wb") as log:
                self._helpers[namespace] = Inside(self.network.enter(namespace), log)
        return self._helpers[namespace](deed, *arguments, **named)

    def api(self, method: str, *arguments: Any, **named: Any) -> Any:
        """Calls a method of the REST client inside `core`."""
        return self.ask("core", "api", method, *arguments, **named)

    def state_of(self, name: str) -> str:
        """Returns a machine's state."""
        return str(self.api("machine", machine(name))["state"])

    def _state_dir(self, name: str) -> Path:
        return self._folder / f"machine-{name}"

    def state_folder(self, name: str) -> StateFolder:
        """Returns the state folder of a machine's agent."""
        return StateFolder(self._state_dir(name))

    def tasks(self, name: str, workload: str, attempt: int) -> set[int]:
        """Returns the pids of an attempt's tasks on a machine, with all their child processes."""
        mark = f"MIZZEN_RUN_ID={workload}.{attempt}.".encode()
        return {pid for pid in self.network.processes(name) if mark in _environment(pid)}

    def leftover(self, name: str) -> set[int]:
        """Returns the pids of all processes on a machine except the agent, its zygotes and the helper process."""
        helper = {self._helpers[name].pid} if name in self._helpers else set()
        agent = self._processes[f"agent-{name}"].pid
        return self.network.processes(name) - helper - {agent} - zygotes(agent)

    def tail(self) -> str:
        """Returns the last lines of every part's log."""
        parts = [(p.stem, p.read_text(errors="replace").splitlines()[-8:]) for p in sorted(self._logs.iterdir())]
        return "\n".join(f"{name}: {line}" for name, lines in parts for line in lines)

    # ------------------------------------------------------------------------------------------------------ stopping

    def stop(self) -> dict[str, int]:
        """Stops every part, last started first; returns the exit codes."""
        codes = {}
        for name, process in reversed(self._processes.items()):
            process.send_signal(signal.SIGINT if name == "postgres" else signal.SIGTERM)
            codes[name] = process.wait(_STOP_S)
        for helper in self._helpers.values():
            helper.close()
        self._helpers.clear()
        return codes


def _environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""
