"""Fixtures for all test folders (Postgres and its databases), and the order in which the test files run."""

import faulthandler
import gc
import os
import signal
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import psycopg
import pytest
from sqlalchemy import Engine
from xdist.scheduler import LoadFileScheduling

from infra.db.migrate import upgrade
from infra.db.schema import SCHEMA
from infra.db.session import open_engine
from infra.stack.ports import free_port
from infra.stack.postgres import EmbeddedPostgres

# A shell without job control ignores these signals in background processes, and child processes inherit this.
signal.signal(signal.SIGINT, signal.default_int_handler)
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


_STACKS = ("tests/stack/", "tests/chaos/test_chaos.py")


class Stacks(LoadFileScheduling):
    """Runs the tests of one file on one worker, and all tests of whole stacks on one worker.

    Two stacks at a time are too much for two cores.
    """

    def _split_scope(self, nodeid: str) -> str:
        return "tests/stack" if nodeid.startswith(_STACKS) else super()._split_scope(nodeid)

    def schedule(self) -> None:
        """Assigns tests. A worker that replaces a crashed one runs its last test only once it is told that no other
        follows, which xdist does in a second call.
        """
        replaced = self.collection is not None
        super().schedule()
        if replaced:
            super().schedule()


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Stacks:
    return Stacks(config, log)


_TEARDOWN_S = 120
_STDERR = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    """Keeps a descriptor of the terminal: pytest redirects that of stderr while a test runs."""
    with config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        config.stash[_STDERR] = os.dup(2)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Ends a worker whose teardown hangs, with the tracebacks of its threads: after a test that failed, the limit of
    pytest-timeout no longer applies.
    """
    faulthandler.dump_traceback_later(_TEARDOWN_S, exit=True, file=item.config.stash[_STDERR])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


_LONG = (
    "tests/netns/test_netns.py",
    "tests/bench/test_kill_loop.py",
    "tests/activities/test_placement_runs.py",
    "tests/activities/test_scheduler_state.py",
    "tests/sdk/test_sdk_kill.py",
    "tests/agent/test_fleet.py",
    "tests/bench/test_annealing.py",
    "tests/simulation/test_command.py",
    "tests/experiments/",
    "tests/sdk/",
    "tests/objects/test_copy_kills.py",
    "tests/simulation/test_reservations.py",
    "tests/tetris/test_command.py",
    "tests/api/test_generated.py",
)


def _turn(item: pytest.Item) -> int:
    starts = (_STACKS, *_LONG)
    return next((turn for turn, start in enumerate(starts) if item.nodeid.startswith(start)), len(starts))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Moves the stack tests to the front, then the other long files, those that mostly wait first.

    Stack tests mostly wait while the other workers compute. A long file that starts late would leave a core idle at the
    end.
    """
    items.sort(key=_turn)


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


DELETE_ROWS = "; ".join(
    f'delete from "{table.name}"' for table in (SCHEMA.tables["allocation"], *reversed(SCHEMA.sorted_tables))
)
"""Statements that delete all rows of a migrated database; they take a fifth of the time of creating one."""


def empty(database_url: str) -> None:
    """Resets a migrated database: no rows, sequences at their start, no other connections."""
    with psycopg.connect(database_url) as connection:
        connection.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where datname = current_database() and pid <> pg_backend_pid()"
        )
        connection.execute(DELETE_ROWS)  # type: ignore[call-overload]
        connection.execute("select setval(seqrelid, seqstart, false) from pg_sequence")


@pytest.fixture
def database_url(postgres_url: str, template_database: str) -> Iterator[str]:
    """The URL of a new, migrated, empty database."""
    name = f"t_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(f"create database {name} template {template_database}")
    yield postgres_url.rsplit("/", 1)[0] + f"/{name}"
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(f"drop database {name} with (force)")


@pytest.fixture
def database(database_url: str) -> Iterator[Engine]:
    """An engine for a new, migrated, empty database."""
    engine = open_engine(database_url)
    yield engine
    engine.dispose()


@pytest.fixture(scope="session")
def checkout() -> Path:
    """Root folder of the project."""
    return Path(__file__).resolve().parent.parent
