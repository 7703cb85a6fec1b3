"""A data folder or a database of another version is refused by every process, and is not changed."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import Engine, text

from infra.db.migrate import current, upgrade
from infra.db.session import close_engine, open_engine, refuse_server, transaction
from infra.errors import ConfigurationError
from infra.keys import load_master_key
from infra.stack.ports import free_port
from infra.stack.postgres import EmbeddedPostgres
from tests.databases import Databases
from tests.depth import few
from tests.proxies.gateway.site import certificate
from tests.stack.harness import processes_of

ROOT = Path(__file__).resolve().parent.parent.parent
OLD = "0043"
"""The newest revision before 0.2.0."""
CATALOGUE = text("select oid, xmin::text, relname from pg_class where oid >= 16384 order by oid")


@contextmanager
def _started(server: EmbeddedPostgres) -> Iterator[Engine]:
    process = subprocess.Popen(server.command(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        server.wait_ready(process)
        engine = open_engine(server.url)
        yield engine
        engine.dispose()
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(20)


def _age(engine: Engine) -> list[object]:
    """Gives a database the revision of an old version and a table; returns its tables and indexes."""
    with engine.begin() as connection:
        connection.execute(text("update alembic_version set version_num = :old"), {"old": OLD})
        connection.execute(text("create table kept as select 7 as value"))
    return _state(engine)


def _state(engine: Engine) -> list[object]:
    assert current(engine) == OLD
    with transaction(engine) as session:
        assert session.execute(text("select value from kept")).scalar_one() == 7
        return list(session.execute(CATALOGUE).all())


@pytest.mark.timeout(300)
def test_up_refuses_the_data_folder_of_an_old_version(tmp_path: Path) -> None:
    """`mizzen up` fails with a message that names the folder and the remedies; it keeps all data."""
    folder = tmp_path / "data"
    server = EmbeddedPostgres(folder / "postgres")
    server.initialise()
    with _started(server) as engine:
        upgrade(engine)
        before = _age(engine)
    command = [sys.executable, "-m", "server", "up", "--data-dir", str(folder), "--port", str(free_port())]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 2, done.stderr
    error = done.stderr.strip().splitlines()[-1]
    assert str(folder) in error and f"revision {OLD}" in error
    assert "Nothing was deleted" in error and "--data-dir" in error and "move this one away" in error
    assert processes_of(folder) == {}
    with _started(server) as engine:
        assert _state(engine) == before


@pytest.mark.parametrize(
    "arguments",
    few(
        [
            ["up"],
            ["api", "--port", "1"],
            ["init"],
            ["worker", "--role", "control"],
            ["gateway", "--listen", "127.0.0.1:0"],
        ],
        2,
    ),
    ids=lambda arguments: arguments[0],
)
def test_roles_refuse_the_database_of_an_old_version(database: Engine, arguments: list[str], tmp_path: Path) -> None:
    """Every process that uses the database ends with an error that names its revision and says what to do."""
    before = _age(database)
    config = tmp_path / "config.yaml"
    url = database.url.set(drivername="postgresql").render_as_string(hide_password=False)
    config.write_text(f"data_dir: {tmp_path / 'data'}\ndatabase: {url}\ntemporal: {{address: '127.0.0.1:1'}}\n")
    command = [sys.executable, "-m", "server", *arguments, "--config", str(config)]
    if arguments[0] == "gateway":
        given = certificate(tmp_path)
        command += ["--tls-cert", str(given.chain), "--tls-key", str(given.key)]
        (tmp_path / "data").mkdir()
        load_master_key(tmp_path / "data" / "master.key", create=True)
    if arguments[0] == "up":
        command += ["--port", str(free_port())]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 2, done.stderr
    error = done.stderr.strip().splitlines()[-1]
    assert f"revision {OLD}" in error and "left unchanged" in error and "empty database" in error
    assert _state(database) == before


def test_a_database_of_another_encoding_is_refused(databases: Databases) -> None:
    """The error says how to create one that suits."""
    url = databases.create("template0 encoding 'SQL_ASCII' locale 'C'")
    engine = open_engine(url)
    try:
        with pytest.raises(ConfigurationError, match="encoding is SQL_ASCII; must be UTF8"):
            upgrade(engine)
    finally:
        close_engine(engine)
        databases.drop(url)


def test_an_old_server_is_refused() -> None:
    """The oldest supported version is in `docs/operating.md`, too."""
    with pytest.raises(ConfigurationError, match="Postgres 14; must be 15 or newer"):
        refuse_server(140012, "UTF8")
    refuse_server(150000, "UTF8")
