"""Allocation of ports that a server can close and reopen."""

import socket

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
