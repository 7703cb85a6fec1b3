"""The embedded Temporal's database after damage, or after its server was killed while creating it."""

import asyncio
import contextlib
import os
import shutil
import signal
import sqlite3
import subprocess
import time
from pathlib import Path

import pytest

from infra.config.services import TemporalSettings
from infra.errors import StackError
from infra.stack import probes, temporal
from infra.stack.ports import free_port
from infra.stack.supervisor import Child, Supervisor
from infra.stack.temporal import discard_unfinished
from tests.depth import few


def _settings() -> TemporalSettings:
    return TemporalSettings(address=f"127.0.0.1:{free_port()}")


def _command(state: Path, settings: TemporalSettings) -> list[str]:
    assert settings.address is not None
    port = int(settings.address.partition(":")[2])
    return temporal.command(temporal.find_binary(settings), state, settings, port)


def _namespaces(state: Path) -> list[str]:
    try:
        with sqlite3.connect(f"{state.as_uri()}?mode=ro", uri=True) as connection:
            return sorted(str(row[0]) for row in connection.execute("select name from namespaces"))
    except sqlite3.OperationalError:
        return []


def _written_bytes(state: Path) -> int:
    """Returns the size of the database and its write-ahead log; -1 if there is none.

    Opening the database would disturb the server, so only the file sizes are read.
    """
    sizes = []
    for path in (state, state.with_name(f"{state.name}-wal")):
        with contextlib.suppress(FileNotFoundError):
            sizes.append(path.stat().st_size)
    return sum(sizes) if sizes else -1


def _leave_unfinished(state: Path, written_bytes: int) -> None:
    """Creates the unfinished database of a server that was killed early; retries if a kill comes too late."""
    for _ in range(20):
        _kill_at(state, written_bytes)
        if not _namespaces(state):
            return
        for path in state.parent.glob("temporal.db*"):
            path.unlink()
    raise AssertionError("the server finished its database before every kill")


def _kill_at(state: Path, written_bytes: int) -> None:
    """Starts a server and kills it as soon as its database has the given size."""
    process = subprocess.Popen(_command(state, _settings()), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        give_up_s = time.monotonic() + 60
        while _written_bytes(state) < written_bytes:
            assert time.monotonic() < give_up_s, "the server did not create its database in time"
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.parametrize("written_bytes", few([400_000, 0, 100_000], 1))
async def test_a_server_that_was_killed_at_its_first_start_starts_again(tmp_path: Path, written_bytes: int) -> None:
    """An unfinished database is created again; a finished one is kept, even in the state after a crash."""
    state, settings = tmp_path / "temporal.db", _settings()
    await asyncio.to_thread(_leave_unfinished, state, written_bytes)
    child = Child(
        "temporal", _command(state, settings), tmp_path / "log", ready=probes.Health(settings).ask,
        prepare=lambda: discard_unfinished(state),
    )  # fmt: skip
    supervisor = Supervisor()
    try:
        await supervisor.start(child)
        kept = state.stat().st_ino
        for number, left_out in enumerate(["", "-shm"]):
            crashed = tmp_path / str(number)
            crashed.mkdir()
            for path in tmp_path.glob("temporal.db*"):  # The files as they are after a kill or a restored backup.
                if not left_out or not path.name.endswith(left_out):
                    shutil.copy(path, crashed)
            before = {path: path.stat().st_ino for path in crashed.iterdir() if path.suffix == ".db"}
            discard_unfinished(crashed / "temporal.db")
            assert {path: path.stat().st_ino for path in crashed.iterdir() if path.suffix == ".db"} == before
    finally:
        await supervisor.stop()
    discard_unfinished(state)
    assert state.stat().st_ino == kept and "default" in _namespaces(state)


def test_a_damaged_database_is_named_and_kept(tmp_path: Path) -> None:
    """A database that cannot be read is kept, because it may be restored; the error says what to do."""
    state = tmp_path / "temporal.db"
    discard_unfinished(state)
    assert not state.exists()
    state.write_bytes(b"no database at all" * 1000)
    with pytest.raises(StackError, match=r"temporal\.db is damaged: .*move temporal\.db\* away"):
        discard_unfinished(state)
    assert state.stat().st_size == 18_000


async def test_what_is_wrong_with_it_is_told_at_the_start(tmp_path: Path) -> None:
    """The server is started with a damaged database; when it exits, the error explains the damage."""
    state = tmp_path / "temporal.db"
    state.write_bytes(b"no database at all" * 1000)
    child = Child("temporal", _command(state, _settings()), tmp_path / "log", prepare=lambda: discard_unfinished(state))

    async def never() -> bool:
        return False

    child.ready = never
    supervisor = Supervisor()
    with pytest.raises(StackError, match=r"exited with code 1 at its start\n(.*\n)*temporal: .* is damaged"):
        await supervisor.start(child)
