"""A separate network for tests: namespaces on one bridge, without any effect on the machine's own network."""

import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence

from infra.stack.supervisor import dies_with_parent

SUBNET = "10.231.7"
"""Private addresses (RFC 1918) that exist only within the namespaces."""
_PATIENCE_S = 20.0


def why_not() -> str | None:
    """Returns the reason why namespaces cannot be created on this host, or None if they can."""
    if os.geteuid() != 0:
        return "only root can create network namespaces: run the tests as root"
    if shutil.which("ip") is None:
        return "the command `ip` is not on the PATH: install the package iproute2"
    try:
        Network(["a"]).remove()
    except subprocess.CalledProcessError as error:
        return f"`{' '.join(error.cmd)}`: {error.stderr.strip()}"
    return None


class Network:
    """A namespace `core` with a bridge, and a namespace for each machine, whose `eth0` is connected to the bridge.

    No route leads out of this network.
    """

    def __init__(self, machines: Sequence[str]) -> None:
        self._prefix = f"mz-{secrets.token_hex(3)}"
        self._machines = tuple(machines)
        try:
            self._make()
        except BaseException:
            self.remove()
            raise

    def _make(self) -> None:
        for name in ("core", *self._machines):
            _ip("netns", "add", self.namespace(name))
            _ip("-n", self.namespace(name), "link", "set", "lo", "up")
        core = self.namespace("core")
        _ip("-n", core, "link", "add", "lan", "type", "bridge")
        _ip("-n", core, "addr", "add", f"{self.address('core')}/24", "dev", "lan")
        _ip("-n", core, "link", "set", "lan", "up")
        for name in self._machines:
            there = self.namespace(name)
            # `eth0` is created directly in its namespace, so that it never appears in the namespace of the host.
            peer = ("peer", "name", "eth0", "netns", there)
            _ip("-n", core, "link", "add", f"port-{name}", "type", "veth", *peer)
            _ip("-n", core, "link", "set", f"port-{name}", "master", "lan", "up")
            _ip("-n", there, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
            _ip("-n", there, "link", "set", "eth0", "up")

    def namespace(self, name: str) -> str:
        """Returns the name of the namespace of `core` or of a machine."""
        return f"{self._prefix}-{name}"

    def address(self, name: str) -> str:
        """Returns the address of `core` or of a machine."""
        return f"{SUBNET}.{1 + ('core', *self._machines).index(name)}"

    def enter(self, name: str) -> list[str]:
        """Returns the prefix with which a command runs in a namespace; the command is killed when this process ends."""
        return ["ip", "netns", "exec", self.namespace(name), *dies_with_parent("KILL")]

    def cut(self, name: str) -> None:
        """Disconnects a machine at the bridge: packets in both directions are lost."""
        _ip("-n", self.namespace("core"), "link", "set", f"port-{name}", "down")

    def join(self, name: str) -> None:
        """Connects a machine to the bridge again."""
        _ip("-n", self.namespace("core"), "link", "set", f"port-{name}", "up")

    def listening(self, name: str) -> set[tuple[str, int]]:
        """Returns address and port of every listening TCP socket in a namespace."""
        done = subprocess.run(
            [*self.enter(name), "ss", "-Hltn"], capture_output=True, text=True, check=True, timeout=_PATIENCE_S
        )
        ends = [line.split()[3].rpartition(":") for line in done.stdout.splitlines()]
        return {(address.strip("[]"), int(port)) for address, _, port in ends}

    def processes(self, name: str) -> set[int]:
        """Returns the pids of all processes in a namespace."""
        return {int(pid) for pid in _ip("netns", "pids", self.namespace(name)).split()}

    def remove(self) -> None:
        """Kills the remaining processes in the namespaces, and deletes the namespaces."""
        present = {line.split()[0] for line in _ip("netns", "list").splitlines() if line}
        for name in ("core", *self._machines):
            if self.namespace(name) not in present:
                continue
            give_up_s = time.monotonic() + _PATIENCE_S
            while (left := self.processes(name)) and time.monotonic() < give_up_s:
                for pid in left:
                    try:
                        os.kill(pid, signal.SIGKILL)
                    except ProcessLookupError:
                        continue
                time.sleep(0.05)
            _ip("netns", "del", self.namespace(name))


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True, timeout=_PATIENCE_S)
    return done.stdout
