"""Fixtures of the API tests."""

import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psycopg
import pytest
import yaml

from api.serve import Server, config_of, listen
from tests.api.world import ApiWorld, make_world
from tests.conftest import empty


@contextmanager
def _fresh(postgres_url: str, template: str) -> Iterator[str]:
    name = f"t_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(f"create database {name} template {template}")
    yield postgres_url.rsplit("/", 1)[0] + f"/{name}"
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(f"drop database {name} with (force)")


@pytest.fixture(scope="session")
def emptied_url(postgres_url: str, template_database: str) -> Iterator[str]:
    """Yields the URL of a database that the tests share and empty before use."""
    with _fresh(postgres_url, template_database) as url:
        yield url


@pytest.fixture
def database_url(emptied_url: str) -> str:
    """Returns the URL of a migrated database without rows."""
    empty(emptied_url)
    return emptied_url


@pytest.fixture
def world(database_url: str, tmp_path: Path) -> Iterator[ApiWorld]:
    """Yields a new installation."""
    with make_world(database_url, tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def shared_world(
    postgres_url: str, template_database: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ApiWorld]:
    """Yields an installation that the tests of a module share, for tests that do not depend on its state."""
    with _fresh(postgres_url, template_database) as url, make_world(url, tmp_path_factory.mktemp("world")) as made:
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
