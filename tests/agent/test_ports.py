"""Ports that an agent reserves for jobs."""

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from agent.ports import NoFreePort, Ports, PortTaken, bindable
from agent.state import StateFolder


def test_ports_are_reserved_once(tmp_path: Path) -> None:
    """An attempt and job always get the same port, even after a restart; different ones get different ports."""
    rng = random.Random(6)
    given: dict[tuple[str, str], int] = {}
    for _ in range(60):
        if not given or rng.random() < 0.5:
            state = StateFolder(tmp_path)  # Opened again, as by a restarted agent.
            ports = Ports(state, 21000, 21049, lambda _: True)
        attempt = state.attempt(f"wl-{rng.randrange(4)}", rng.randrange(1, 3))
        job = f"job{rng.randrange(3)}"
        port = ports.reserve(attempt, [job])[job]
        assert given.setdefault((attempt.key, job), port) == port
    assert len(set(given.values())) == len(given)


def test_ports_that_are_in_use_or_used_up(tmp_path: Path) -> None:
    """A port that another program listens on is skipped; an exhausted range is an error that names it, and what an
    attempt has reserved is free again when the attempt is over, or its folder is gone.
    """
    state = StateFolder(tmp_path)
    busy = {21001, 21002}
    ports = Ports(state, 21001, 21003, lambda port: port not in busy)
    assert ports.reserve(state.attempt("wl-1", 1), ["a"]) == {"a": 21003}
    with pytest.raises(NoFreePort, match="21001 to 21003"):
        ports.reserve(state.attempt("wl-2", 1), ["a"])
    with pytest.raises(PortTaken, match=r"reserved for wl-1\.1"):
        ports.reserve_fixed(state.attempt("wl-2", 1), 21003)
    state.stop_attempts("wl-1", 1)
    assert ports.reserve(state.attempt("wl-2", 1), ["a"]) == {"a": 21003}
    state.remove(state.attempt("wl-2", 1))
    assert ports.reserve(state.attempt("wl-3", 1), ["a"]) == {"a": 21003}


def test_concurrent_reservations_differ(tmp_path: Path) -> None:
    """Threads that reserve at once for attempts whose folders do not exist yet get different ports."""
    state = StateFolder(tmp_path)
    ports = Ports(state, 21000, 21039, lambda _: True)
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda k: ports.reserve(state.attempt(f"wl-{k}", 1), ["a"])["a"], range(40)))
    assert sorted(found) == list(range(21000, 21040))


def test_a_listening_port_is_not_bindable() -> None:
    """`bindable` is false for a port with a listener, and does not keep the port open."""
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert not bindable(port)
    assert bindable(port) and bindable(port)
