"""The network of a machine: what is enforced where the kernel permits it, and what is done where it does not."""

import logging
import subprocess
import sys

import pytest

from agent.network.edge import MigrationFlow
from agent.network.machine import MachineNetwork, default_interface
from agent.network.shaping import LinkShare
from domain.traffic import OVERHEAD_SHARE, TrafficClass
from tests.netns.namespaces import Network
from tests.network.conftest import PORTS, ROOT, state

# The method `thread` would end the whole test run and leave the namespaces behind.
pytestmark = pytest.mark.timeout(180, method="signal")

SHARE = LinkShare(10_600_000, 5_300_000)
FLOW = MigrationFlow.of_mark("run-1", TrafficClass.PLANNED, 5)


def test_the_kernel_enforces(network: Network) -> None:
    subprocess.run(["ip", "route", "add", "default", "via", network.address("core")], check=True)
    before = state()
    with MachineNetwork(None, PORTS, SHARE) as machine:
        assert machine.why_not is None
        assert machine.kill_switch.in_kernel
        assert machine.overhead_share == OVERHEAD_SHARE
        machine.apply({FLOW: 2e6})
        assert machine.sent(FLOW).packets == 0
        machine.apply({})
        assert state() == before
        machine.apply({FLOW: 2e6})
    assert state() == before


def test_without_a_qdisc_of_its_own_the_agent_shapes_nothing_and_says_so_once(
    network: Network, caplog: pytest.LogCaptureFixture
) -> None:
    subprocess.run(["tc", "qdisc", "add", "dev", "eth0", "root", "pfifo", "limit", "100"], check=True)
    before = state()
    with caplog.at_level(logging.WARNING), MachineNetwork("eth0", PORTS, SHARE) as machine:
        machine.apply({FLOW: 2e6})
        machine.apply({FLOW: 3e6})
        assert machine.why_not is not None
        assert "pfifo" in machine.why_not
        assert machine.kill_switch.in_kernel
        assert machine.limits == {}
    assert len(caplog.records) == 1
    assert state() == before


def test_without_root_nothing_is_enforced() -> None:
    """The flag of the kill-switch still works for the agent's own checks."""
    code = """
import logging, os, sys
from agent.network.edge import MigrationFlow
from domain.traffic import TrafficClass
from agent.network.machine import MachineNetwork
from agent.network.shaping import LinkShare
if os.geteuid() == 0:
    os.setgid(65534); os.setuid(65534)
logging.basicConfig(stream=sys.stdout)
with MachineNetwork("lo", range(7000, 7010), LinkShare(2e6, 1e6)) as machine:
    assert not machine.kill_switch.in_kernel and not machine.kill_switch.is_on
    machine.kill_switch.on()
    assert machine.kill_switch.is_on
    machine.apply({MigrationFlow.of_mark("run-1", TrafficClass.PLANNED, 5): 5e5})
    machine.apply({})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.count("is not isolated") == 1


def test_an_unknown_default_route_is_an_error(network: Network) -> None:
    with pytest.raises(OSError, match="there is no default route"):
        default_interface()
    subprocess.run(["ip", "route", "add", "default", "via", network.address("core")], check=True)
    assert default_interface() == "eth0"
