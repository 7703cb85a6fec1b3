"""The installation of the scenario: `mizzen up` with a simulated cloud, and a balancer.

The balancer is started again whenever it ends, as by systemd.
"""

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from capacity.providers.trace.cloud import Cloud
from capacity.providers.trace.settings import TraceProviderSettings
from tests.stack.harness import ROOT, Up

FLEET = """
version: 1
regions:
  - {name: west, clusters: []}
"""
CLOUD: dict[str, Any] = {
    "zones": {
        "za": {"region": "west", "most": 3},
        "zb": {"region": "west", "most": 3},
        "zc": {"region": "west", "most": 3},
        "zd": {"region": "west", "most": 8, "price_factor": 3, "kind": "on_demand"},
    },
    "machine_types": {"small": {"gpus": 1, "gpu_type": "a100", "cpus": 1, "memory": "512MiB", "usd_per_h": 1}},
    "start_median_s": 2,
    "start_sigma": 0.1,
    "notice_s": 0,
}
"""Spot machines are taken away without notice, which is the worst case."""


def settings(cloud: dict[str, Any]) -> str:
    """Returns the installation's settings as YAML, with a simulated cloud."""
    return yaml.safe_dump(
        {
            "capacity": {"interval_s": 0.5, "refused_pause_s": 3, "drain_s": 20, "lost_after_s": 10},
            "services": {"retry_s": 10},
            "providers": {"sim": {"kind": "trace", **cloud}},
        }
    )


class Balancer:
    """A balancer that is started again whenever it ends, on a listening socket that stays open meanwhile.

    This is what systemd does with a socket unit and `Restart=always`.
    """

    def __init__(self, folder: Path, api: str, key: str, services: tuple[str, ...]) -> None:
        self._folder = folder
        self._environ = {**os.environ, "MIZZEN_API": api, "MIZZEN_API_KEY": key, "PYTHONPATH": f"{ROOT}:{ROOT}/sdk"}
        self._sockets = [self._listen() for _ in services]
        self._services = services
        self.ports = {name: one.getsockname()[1] for name, one in zip(services, self._sockets, strict=True)}
        self._stopping = threading.Event()
        self.process: subprocess.Popen[bytes] | None = None
        self.starts = 0
        self._thread = threading.Thread(target=self._keep, daemon=True)

    @staticmethod
    def _listen() -> socket.socket:
        one = socket.create_server(("127.0.0.1", 0), backlog=4096)
        one.set_inheritable(True)
        return one

    def start(self) -> None:
        """Starts the balancer."""
        self._thread.start()

    def _keep(self) -> None:
        while not self._stopping.is_set():
            self.starts += 1
            self.process = self._begin()
            self.process.wait()
            self._stopping.wait(0.1)

    def _begin(self) -> "subprocess.Popen[bytes]":
        offered = [f"--service={name}=127.0.0.1:{port}" for name, port in self.ports.items()]
        numbers = [one.fileno() for one in self._sockets]
        # The protocol of systemd: descriptors from 3 on, and the process id of the receiver.
        moved = " ".join(f"{3 + at}<&{number}" for at, number in enumerate(numbers))
        run = f'export LISTEN_PID=$$; exec "$@" {moved}'
        environ = {
            **self._environ, "LISTEN_FDS": str(len(numbers)), "LISTEN_FDNAMES": ":".join(self._services),
        }  # fmt: skip
        command = [sys.executable, "-m", "server", "balance", "--data", str(self._folder / "balance"), *offered]
        with (self._folder / "balance.log").open("ab") as log:
            return subprocess.Popen(
                ["bash", "-c", run, "balance", *command],
                cwd=ROOT, env=environ, stdout=log, stderr=log, pass_fds=numbers, start_new_session=True,
            )  # fmt: skip

    def haproxy(self) -> int:
        """Returns the pid of the first service's HAProxy."""
        assert self.process is not None
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return min(map(int, children))

    def kill(self) -> None:
        """Kills the balancer. Its HAProxy ends with it."""
        assert self.process is not None
        self.process.kill()

    def close(self) -> None:
        """Stops the balancer."""
        self._stopping.set()
        if self.process is not None:
            self.process.terminate()
            self._thread.join(40)
        for one in self._sockets:
            one.close()


class Installation:
    """The stack, its cloud and its processes."""

    def __init__(self, folder: Path, notice_s: float) -> None:
        self.folder = folder
        self._settings = {**CLOUD, "notice_s": notice_s}
        self.up = Up(folder, FLEET, lost_s=5, settings=settings(self._settings))
        self._cloud: Cloud | None = None

    @property
    def cloud(self) -> Cloud:
        """The simulated cloud, once the stack has been started."""
        if self._cloud is None:
            self._cloud = Cloud(
                TraceProviderSettings.model_validate(self._settings), self.up.data / "providers" / "sim"
            )
        return self._cloud

    def take_zone(self, zone: str) -> int:
        """Takes all machines of a zone away together; returns their number."""
        there = [one for one in self.cloud.there() if one.instance.zone == zone]
        for one in there:
            self.cloud.take(one.instance.native_id)
        return len(there)


@contextlib.contextmanager
def installation(folder: Path, notice_s: float = 0.0) -> Iterator[Installation]:
    """Starts the stack, and stops it at the end. The cloud gives `notice_s` seconds of notice."""
    site = Installation(folder, notice_s)
    try:
        site.up.start(machines=False)
        yield site
    finally:
        site.up.close()
