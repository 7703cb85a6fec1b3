"""Ports that an agent reserves for jobs."""

import random
from pathlib import Path

import pytest

from agent.ports import NoFreePort, bindable, reserve
from agent.state import StateFolder


def test_ports_are_reserved_once(tmp_path: Path) -> None:
    """An attempt and job always get the same port, even after a restart; different ones get different ports."""
    rng = random.Random(6)
    given: dict[tuple[str, str], int] = {}
    for _ in range(60):
        state = StateFolder(tmp_path)  # Opened again, as by a restarted agent.
        attempt = state.attempt(f"wl-{rng.randrange(4)}", rng.randrange(1, 3))
        job = f"job{rng.randrange(3)}"
        others = [a for a in state.attempts() if a.key != attempt.key]
        port = reserve(attempt, [job], (21000, 21049), others, lambda _: True)[job]
        assert given.setdefault((attempt.key, job), port) == port
    assert len(set(given.values())) == len(given)


def test_ports_that_are_in_use_or_used_up(tmp_path: Path) -> None:
    """A port that another program listens on is skipped, and an exhausted range is an error that names it."""
    state = StateFolder(tmp_path)
    busy = {21001, 21002}
    first = reserve(state.attempt("wl-1", 1), ["a"], (21001, 21003), [], lambda port: port not in busy)
    assert first == {"a": 21003}
    with pytest.raises(NoFreePort, match="21001 to 21003"):
        reserve(
            state.attempt("wl-2", 1), ["a"], (21001, 21003), [state.attempt("wl-1", 1)], lambda port: port not in busy
        )


def test_a_listening_port_is_not_bindable() -> None:
    """`bindable` is false for a port with a listener, and does not keep the port open."""
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert not bindable(port)
    assert bindable(port) and bindable(port)
