"""Fixtures for all test folders: Postgres and its databases."""

import asyncio
import gc
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import psycopg
import pytest
from sqlalchemy import Engine
from temporalio.worker._workflow import _WorkflowWorker

from infra.config.services import TemporalSettings
from infra.db.migrate import upgrade
from infra.db.session import close_engine, open_engine
from infra.stack.ports import free_port
from infra.stack.postgres import EmbeddedPostgres
from infra.stack.temporal import command, find_binary
from infra.temporal_client import connect
from tests.databases import Databases
from tests.running import (
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_report_header,
    pytest_runtest_logreport,
    pytest_runtest_teardown,
    pytest_sessionfinish,
    pytest_timeout_cancel_timer,
    pytest_timeout_set_timer,
    pytest_xdist_make_scheduler,
)

__all__ = [
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_report_header",
    "pytest_runtest_logreport",
    "pytest_runtest_teardown",
    "pytest_sessionfinish",
    "pytest_timeout_cancel_timer",
    "pytest_timeout_set_timer",
    "pytest_xdist_make_scheduler",
]

# A shell without job control ignores these signals in background processes, and child processes inherit this.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup` ignores it.
signal.signal(signal.SIGQUIT, signal.SIG_DFL)

# The default deadline of 200 ms per example fails now and then on a busy machine.
hypothesis.settings.register_profile("mizzen", hypothesis.settings(), deadline=None)
hypothesis.settings.load_profile("mizzen")

# Imported modules and collected tests live until the end. Garbage collection over them takes a fifth of the time, so it
# is off during collection; afterwards these objects are exempt from it.
gc.disable()


def pytest_collection_finish() -> None:
    """Enables garbage collection again, for objects that are created from now on."""
    gc.freeze()
    gc.enable()
    gc.set_threshold(50_000, 20, 20)


_ACTIVATION_S = 20


@pytest.fixture(scope="session", autouse=True)
def patient_workers() -> Iterator[None]:
    """Lets Temporal's workers wait 20 s instead of 2 s before they report that a workflow is deadlocked.

    The first activation of a workflow in the sandbox imports its modules, which can take longer than 2 s on a busy
    machine. temporalio has no setting for this time: `debug_mode` has no limit, but runs workflows on the event loop.
    """
    initialise = _WorkflowWorker.__init__

    def patiently(worker: Any, *arguments: Any, **named: Any) -> None:
        initialise(worker, *arguments, **named)
        assert worker._deadlock_timeout_seconds == 2, "temporalio has changed; adapt this fixture"
        worker._deadlock_timeout_seconds = _ACTIVATION_S

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_WorkflowWorker, "__init__", patiently)
        yield


@pytest.fixture(scope="session")
def postgres_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a database on an embedded Postgres that runs for the whole session.

    The server does not wait for the disk: if its processes are killed, the operating system still has all writes.
    """
    server = EmbeddedPostgres(tmp_path_factory.mktemp("postgres"), free_port())
    server.initialise()
    command = [*server.command(), "-c", "fsync=off", "-c", "full_page_writes=off"]
    command += [
        "-c",
        "autovacuum=off",
    ]  # Autovacuum workers belong to the superuser, so they would prevent that a database is dropped.
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        server.wait_ready(process)
        with psycopg.connect(server.superuser_url, autocommit=True) as connection:
            connection.execute("alter role mizzen createdb")  # Tests create databases; mizzen itself does not.
        yield server.url
    finally:
        process.send_signal(2)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture(scope="session")
def template_database(postgres_url: str) -> str:
    """Name of a migrated, empty database, which is copied in a few milliseconds."""
    name = "template_mizzen"
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(f"create database {name}")
    engine = open_engine(postgres_url.rsplit("/", 1)[0] + f"/{name}")
    upgrade(engine)
    engine.dispose()
    return name


@pytest.fixture(scope="session")
def databases(postgres_url: str, template_database: str) -> Iterator[Databases]:
    """Migrated, empty databases."""
    made = Databases(postgres_url, template_database)
    yield made
    made.close()


@pytest.fixture
def database_url(databases: Databases) -> Iterator[str]:
    """The URL of a migrated, empty database."""
    with databases.taken() as url:
        yield url


@pytest.fixture
def database(database_url: str) -> Iterator[Engine]:
    """An engine for a migrated, empty database."""
    engine = open_engine(database_url)
    yield engine
    close_engine(engine)


@pytest.fixture(scope="session")
def temporal_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a Temporal dev server that runs with the command of the embedded stack, for the whole session."""
    settings, port = TemporalSettings(), free_port()
    state = tmp_path_factory.mktemp("temporal") / "temporal.db"
    process = subprocess.Popen(
        command(find_binary(settings), state, settings, port), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )

    async def answers(address: str) -> None:
        while True:
            assert process.poll() is None, "the dev server ended"
            try:
                await connect(TemporalSettings(address=address))
                return
            except RuntimeError:
                await asyncio.sleep(0.05)

    address = f"127.0.0.1:{port}"
    try:
        asyncio.run(asyncio.wait_for(answers(address), 60))
        yield address
    finally:
        process.terminate()
        process.wait()


@pytest.fixture(scope="session")
def checkout() -> Path:
    """Root folder of the project."""
    return Path(__file__).resolve().parent.parent
