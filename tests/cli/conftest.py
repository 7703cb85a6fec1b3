"""Fixtures for the tests of the command and the client, with a real API."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.db.session import open_engine
from mizzen_client import Client
from mizzen_client.cli.app import run
from tests.cli.service import DOCUMENT, Capture, Cutter, Service, Submit, populate, serving, settings_for
from tests.databases import Databases


@pytest.fixture(autouse=True)
def _own_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides the user's saved contexts and environment variables from the tests."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("MIZZEN_API", "MIZZEN_API_KEY", "MIZZEN_CONTEXT", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def service(databases: Databases, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Yields one API for all tests; each test creates its own workloads."""
    url = databases.take()
    folder = tmp_path_factory.mktemp("north")
    engine = open_engine(url)
    settings = settings_for(url, tmp_path_factory.mktemp("data"))
    keys = populate(engine, folder)
    with serving(settings) as port:
        yield Service(settings, engine, folder, port, keys)
    engine.dispose()


@pytest.fixture
def as_vision(service: Service, monkeypatch: pytest.MonkeyPatch) -> Service:
    """Sets the environment variables for a user of the tenant vision."""
    monkeypatch.setenv("MIZZEN_API", service.url)
    monkeypatch.setenv("MIZZEN_API_KEY", service.keys["vision"])
    return service


@pytest.fixture
def as_operator(service: Service, monkeypatch: pytest.MonkeyPatch) -> Service:
    """Sets the environment variables for an operator."""
    monkeypatch.setenv("MIZZEN_API", service.url)
    monkeypatch.setenv("MIZZEN_API_KEY", service.keys["operator"])
    return service


@pytest.fixture
def client(service: Service) -> Iterator[Client]:
    """Yields a client of the tenant vision."""
    with Client(service.url, service.keys["vision"]) as client:
        yield client


@pytest.fixture
def cutter(service: Service) -> Iterator[Cutter]:
    """Yields a proxy to the API that can cut connections."""
    cutter = Cutter(service.port)
    yield cutter
    cutter.close()


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Returns a function that writes the default document with changes to a file and returns its path."""

    def write(file: str = "train.yaml", /, **changes: Any) -> str:
        (tmp_path / file).write_text(yaml.safe_dump({**DOCUMENT, **changes}))
        return str(tmp_path / file)

    return write


@pytest.fixture
def submit(write: Callable[..., str], capsys: Capture) -> Submit:
    """Returns a function that submits the default document with changes and returns the workload's id."""

    def submit(**changes: Any) -> str:
        capsys.readouterr()
        assert run(["submit", write(**changes)]) == 0
        return capsys.readouterr().out.removesuffix("\n")

    return submit
