"""The kill-switch: new connections to the closed ports are refused, everything else continues."""

import socket
import subprocess
import threading

import pytest

from agent.network.edge import Edge
from tests.netns.namespaces import Network
from tests.network.conftest import PORTS, other, state

# The method `thread` would end the whole test run and leave the namespaces behind.
pytestmark = pytest.mark.timeout(180, method="signal")

OPEN_PORT = 8000
CONNECT = """
import socket, sys
for port in sys.argv[2:]:
    with socket.socket(socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET) as probe:
        probe.settimeout(0.5)
        print(int(probe.connect_ex((sys.argv[1], int(port))) == 0), end="")
"""
OPTIONS = """
# A SYN over IPv6 behind a destination-options header, from the link-layer up.
import socket, struct, sys
source, target, port = sys.argv[1:]
with socket.socket(socket.AF_INET6, socket.SOCK_RAW, 60) as raw:
    raw.bind((source, 0))
    ends = socket.inet_pton(socket.AF_INET6, source) + socket.inet_pton(socket.AF_INET6, target)
    def tcp(checksum):
        return struct.pack(">HHIIBBHHH", 40000, int(port), 1, 0, 0x50, 0x02, 65535, checksum, 0)
    words = struct.unpack(">30H", ends + struct.pack(">IxxxB", 20, 6) + tcp(0))
    total = sum(words)
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    raw.sendto(bytes((6, 0, 1, 4, 0, 0, 0, 0)) + tcp(~total & 0xFFFF), (target, 0))
"""


def _serve(port: int) -> socket.socket:
    return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)


def _connects(network: Network) -> str:
    """Returns for the first and last closed port and an open port whether a connection succeeds, as `1` or `0`."""
    return other(network, CONNECT, network.address("a"), *(str(p) for p in (PORTS[0], PORTS[-1], OPEN_PORT)))


def test_new_connections_to_the_closed_ports_are_refused_until_off(network: Network) -> None:
    edge = Edge("eth0", PORTS)
    listeners = [_serve(port) for port in (PORTS[0], PORTS[-1], OPEN_PORT)]
    assert not edge.kill_switch.is_on
    assert _connects(network) == "111"
    edge.kill_switch.on()
    assert edge.kill_switch.is_on
    assert edge.kill_switch.in_kernel
    assert _connects(network) == "001"
    assert edge.kill_switch.dropped >= 2
    edge.kill_switch.off()
    assert _connects(network) == "111"
    edge.close()
    for listener in listeners:
        listener.close()


def test_a_connection_that_exists_completes_its_transfer(network: Network) -> None:
    edge = Edge("eth0", PORTS)
    size = 4 << 20
    with _serve(PORTS[0]) as listener:
        code = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as transfer:
    assert transfer.recv(1) == b"+"
    transfer.sendall(bytes(int(sys.argv[3])))
"""
        received: list[int] = []

        def receive() -> None:
            connection, _ = listener.accept()
            with connection:
                edge.kill_switch.on()
                connection.sendall(b"+")
                count = 0
                while data := connection.recv(1 << 16):
                    count += len(data)
                received.append(count)

        receiver = threading.Thread(target=receive)
        receiver.start()
        other(network, code, network.address("a"), str(PORTS[0]), str(size))
        receiver.join(30)
    assert received == [size]
    assert _connects(network) == "000"
    edge.close()


def test_ipv6_and_its_extension_headers_do_not_bypass_it(network: Network) -> None:
    for name, address in (("a", "fd00::1"), ("b", "fd00::2")):
        command = ["ip", "addr", "add", f"{address}/64", "dev", "eth0", "nodad"]
        subprocess.run([*network.enter(name), *command], check=True)
    edge = Edge("eth0", PORTS)
    with _serve(PORTS[0]):
        assert other(network, CONNECT, "fd00::1", str(PORTS[0])) == "1"
        edge.kill_switch.on()
        assert other(network, CONNECT, "fd00::1", str(PORTS[0])) == "0"
        before = edge.kill_switch.dropped
        other(network, OPTIONS, "fd00::2", "fd00::1", str(PORTS[0]))
        assert edge.kill_switch.dropped > before
    edge.close()


def test_the_interface_is_as_before_after_detaching(network: Network) -> None:
    before = state()
    edge = Edge("eth0", PORTS)
    edge.kill_switch.on()
    edge.close()
    edge.close()
    with _serve(PORTS[0]):
        assert _connects(network)[0] == "1"
    assert state() == before


def test_ports_and_interfaces_that_do_not_exist(network: Network) -> None:
    with pytest.raises(ValueError, match="port 70000: must be within 1 to 65535"):
        Edge("eth0", [70000])
    with pytest.raises(OSError, match="interface none0"):
        Edge("none0", PORTS)
