"""Runs machines for moto's instances: starts their user data as EC2 would, and kills terminated ones."""

import base64
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from agent.fleet import power_off
from tests.capacity.ec2 import Ec2

_PORTS = 10
_FIRST_PORT = 31000


class MotoHost:
    """Runs and kills machines in a thread, each with its own folder."""

    def __init__(self, region: Ec2, folder: Path) -> None:
        self._region, self._folder = region, folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.started = 0

    def start(self) -> None:
        """Starts to run machines."""
        self._thread.start()

    def close(self) -> None:
        """Kills all machines."""
        self._stopped.set()
        self._thread.join()
        for native_id in list(self._running):
            self._end(native_id)

    def _run(self) -> None:
        while not self._stopped.wait(0.2):
            live = {one["InstanceId"] for one in self._region.live()}
            for native_id in live - self._running.keys():
                self._begin(native_id)
            for native_id in self._running.keys() - live:
                self._end(native_id)

    def _begin(self, native_id: str) -> None:
        sent = self._region.client.describe_instance_attribute(InstanceId=native_id, Attribute="userData")
        folder = self._folder / native_id
        folder.mkdir(parents=True)
        script = folder / "user-data"
        script.write_bytes(base64.b64decode(sent["UserData"]["Value"]))
        first = _FIRST_PORT + self.started * _PORTS
        self.started += 1
        environ = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PORTS": f"{first}-{first + _PORTS - 1}",
        }
        with (folder / "console").open("wb") as console:
            self._running[native_id] = subprocess.Popen(
                ["sh", str(script)], cwd=folder, env=environ, stdout=console, stderr=console, start_new_session=True
            )

    def _end(self, native_id: str) -> None:
        process = self._running.pop(native_id)
        state = self._folder / native_id / "mizzen-agent"
        if state.is_dir():
            power_off(state)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
