"""Ports that a server may leave and find again."""

import socket

from infra.stack import ports


def test_a_free_port_is_given_to_nobody_else() -> None:
    """No outgoing connection's port, none that somebody listens on, and none twice."""
    given = ports._candidates()
    with socket.create_server(("127.0.0.1", 0)) as server:
        found = [ports.free_port() for _ in range(200)]
        assert len(set(found)) == 200 and all(port in given for port in found)
        connections = [socket.create_connection(server.getsockname()) for _ in range(50)]
        assert not {each.getsockname()[1] for each in connections} & set(given)
        for each in connections:
            each.close()


def test_a_taken_port_is_passed_over() -> None:
    """The next one is given where the one whose turn it is has a listener."""
    candidates = ports._candidates()
    follows = candidates[(candidates.index(ports.free_port()) + 1) % len(candidates)]
    try:
        taken = socket.create_server(("127.0.0.1", follows))
    except OSError:  # somebody has it already: what the test wants
        taken = socket.socket()
    with taken:
        assert ports.free_port() != follows
