"""Allocation of ports that a server can close and reopen."""

import socket
from pathlib import Path

import pytest

from infra.errors import StackError
from infra.stack import ports


def test_a_free_port_is_given_to_nobody_else() -> None:
    """A free port is returned only once, has no listener, and is outside the range of outgoing connections."""
    given = ports._candidates()
    with socket.create_server(("127.0.0.1", 0)) as server:
        found = [ports.free_port() for _ in range(200)]
        assert len(set(found)) == 200 and all(port in given for port in found)
        connections = [socket.create_connection(server.getsockname()) for _ in range(50)]
        assert not {each.getsockname()[1] for each in connections} & set(given)
        for each in connections:
            each.close()


def test_a_taken_port_is_passed_over() -> None:
    """A port that has a listener is skipped, and the next one is returned."""
    candidates = ports._candidates()
    follows = candidates[(candidates.index(ports.free_port()) + 1) % len(candidates)]
    try:
        taken = socket.create_server(("127.0.0.1", follows))
    except OSError:  # Another process already listens on it, as the test needs.
        taken = socket.socket()
    with taken:
        assert ports.free_port() != follows


def test_a_port_of_a_stack_is_replaced_if_it_is_in_use_and_not_set(tmp_path: Path) -> None:
    """A free port near it is used, and again at the next start, also if the usual one is free by then."""
    file, usual = tmp_path / "ports.json", ports.free_port()
    with socket.create_server(("127.0.0.1", usual)):
        first = ports.StackPorts(file)
        given = first.take("api.port (--port)", "127.0.0.1", usual, is_set=False)
        assert usual < given < usual + 100 and f"{usual} is in use" in first.replaced[0]
        assert first.take("database_port", "127.0.0.1", usual, is_set=False) not in (usual, given)
        first.store()
        with pytest.raises(StackError, match=rf"^api.port \(--port\): port {usual} on 127.0.0.1 is in use"):
            first.take("api.port (--port)", "127.0.0.1", usual, is_set=True)
    second = ports.StackPorts(file)
    assert second.take("api.port (--port)", "127.0.0.1", usual, is_set=False) == given
    assert "as at the last start" in second.replaced[0]
    with socket.create_server(("127.0.0.1", given)):
        assert ports.StackPorts(file).take("api.port (--port)", "127.0.0.1", usual, is_set=False) == usual
    for damaged in ("damaged", "[1]", '{"api.port (--port)": 70000}', '{"api.port (--port)": null}'):
        file.write_text(damaged)
        assert ports.StackPorts(file).take("api.port (--port)", "127.0.0.1", usual, is_set=False) == usual


@pytest.mark.parametrize(
    ("host", "port", "is_set"), [("192.0.2.1", 8080, False), ("127.0.0.1", 70_000, True)], ids=["address", "port"]
)
def test_an_address_that_cannot_be_used_is_named(tmp_path: Path, host: str, port: int, is_set: bool) -> None:
    """No other port is tried for an address that this machine does not have, and the reason is in the message."""
    with pytest.raises(StackError, match=rf"^api.port: port {port} on {host} cannot be used \("):
        ports.StackPorts(tmp_path / "ports.json").take("api.port", host, port, is_set=is_set)
