"""Fixtures of the API tests."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import yaml

from api.serve import Server, config_of, listen
from tests.api.world import ApiWorld, make_world
from tests.databases import Databases


@pytest.fixture
def world(database_url: str, tmp_path: Path) -> Iterator[ApiWorld]:
    """Yields a new installation."""
    with make_world(database_url, tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def shared_world(databases: Databases, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiWorld]:
    """Yields an installation that the tests of a module share, for tests that do not depend on its state."""
    with databases.taken() as url, make_world(url, tmp_path_factory.mktemp("world")) as made:
        yield made


@contextmanager
def api_process(world: ApiWorld, folder: Path, checkout: Path) -> Iterator[str]:
    """Runs the API of a world in a separate process on a free loopback port; yields its URL."""
    with listen("127.0.0.1", 0) as probe:
        port = probe.getsockname()[1]
    settings = world.settings.model_dump(mode="json", exclude_unset=True)
    file = folder / "api.yaml"
    file.write_text(yaml.safe_dump({**settings, "api": {**settings.get("api", {}), "port": port}}))
    command = [sys.executable, "-m", "server", "api", "--config", str(file)]
    process = subprocess.Popen(command, cwd=checkout, env={**os.environ, "PYTHONPATH": str(checkout)})
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            try:
                assert httpx.get(f"{url}/readyz", timeout=30).status_code == 200
                break
            except httpx.ConnectError:
                assert process.poll() is None
                time.sleep(0.05)
        yield url
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def serve() -> Iterator[Callable[[ApiWorld], str]]:
    """Returns a function that serves a world with uvicorn on a free loopback port and returns its URL."""
    running: list[tuple[Server, threading.Thread]] = []

    def start(world: ApiWorld) -> str:
        listener = listen("127.0.0.1", 0)
        port = listener.getsockname()[1]
        server = Server(config_of(world.app, world.settings))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        running.append((server, thread))
        return f"http://127.0.0.1:{port}"

    yield start
    for server, thread in running:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()
