"""A temporary Postgres for one suite: the embedded one of `mizzen up`, with the same settings (fsync on)."""

import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

from bench.harness import InvalidBenchmark
from infra.stack.ports import free_port
from infra.stack.postgres import EmbeddedPostgres


@contextmanager
def postgres() -> Iterator[str]:
    """Starts Postgres, and yields the URL of an empty database.

    The files are below the current folder, because a folder for temporary files may be in memory.

    Raises:
        InvalidBenchmark: commits would not wait for the disk.
    """
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=Path.cwd()) as folder:
        server = EmbeddedPostgres(Path(folder), free_port())
        server.initialise()
        # In its own session, so that a Ctrl-C in the terminal does not reach it.
        process = subprocess.Popen(
            server.command(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        try:
            server.wait_ready(process)
            _check(server.url)
            yield server.url
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _check(url: str) -> None:
    with psycopg.connect(url) as connection:
        for name in ("fsync", "synchronous_commit"):
            found = connection.execute("select current_setting(%s)", (name,)).fetchone()
            if found != ("on",):
                raise InvalidBenchmark(f"{name} is {found}, must be on")
