"""console: what an open page costs the API and Postgres, when nothing happens and with 100 events a second.

The API runs in a process of its own. The page is followed as a browser does: it listens to the stream of changes, and
fetches its changing part, with the ETag of the last one, after each message. The cost of a page is the CPU time of the
API and of Postgres with the page, less that without: events cost something without any page, too.
"""

import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import yaml
from sqlalchemy import Engine

from bench.balance import cpu_s
from infra import children
from infra.config.settings import Settings
from infra.db import events
from infra.db.session import transaction
from infra.stack.ports import free_port

SPAN_S = 60.0
"""Pages that nothing changes fetch their part every 30 s, and costs are read once a minute."""
EVENTS_PER_S = 100
_SETTLES_S = 5.0
_ROUNDS = 20


def shares(engine: Engine, settings: Settings, key: str, paths: Sequence[str], workload: str) -> dict[str, float]:
    """Returns what an open page costs, in percent of a core, while nothing happens (`idle`) and not (`busy`), by page.

    Args:
        engine: the database.
        settings: of the API.
        key: an operator's API key.
        paths: the pages, below `/console`.
        workload: whose events are written.
    """
    found: dict[str, float] = {}
    with _api(settings) as (url, api), _Writer(engine, workload) as writer:
        for name, is_busy in (("idle", False), ("busy", True)):
            writer.is_writing = is_busy
            without = found[f"{name} without a page"] = _percent(api, engine)
            for path in paths:
                with _Page(url, key, path) as page:
                    found[f"{name} {path}"] = _percent(api, engine) - without
                found[f"{name} {path} fetches"] = page.fetches
    return found


def shared(engine: Engine, settings: Settings, key: str, path: str, people: int) -> tuple[float, float]:
    """Returns the CPU time of the API and of Postgres, in seconds, for a change with one open page and with many.

    All people have the same page open. Of the tabs of each, the one that is shown asks for its part; the others wait
    until they are shown.
    """
    with _api(settings) as (url, api), ThreadPoolExecutor(people) as threads:
        clients = [httpx.Client(base_url=url, timeout=60) for _ in range(people)]
        for client in clients:
            assert client.post("/console/login", data={"key": key}).status_code == 303

        def ask(client: httpx.Client) -> None:
            client.get(f"/console{path}", headers={"HX-Request": "true"}).raise_for_status()

        def measured(count: int) -> float:
            before_s = _cpu_s(api, engine)
            for _ in range(_ROUNDS):
                list(threads.map(ask, clients[:count]))
            return (_cpu_s(api, engine) - before_s) / _ROUNDS

        measured(people)  # Connections and prepared statements.
        return measured(1), measured(people)


def _percent(api: int, engine: Engine) -> float:
    """Returns the CPU time of the API and of Postgres in the span, in percent of the span."""
    time.sleep(_SETTLES_S)
    before_s, began_s = _cpu_s(api, engine), time.monotonic()
    time.sleep(SPAN_S)
    return 100 * (_cpu_s(api, engine) - before_s) / (time.monotonic() - began_s)


def _cpu_s(api: int, engine: Engine) -> float:
    with engine.connect() as connection:
        backend = connection.exec_driver_sql("select pg_backend_pid()").scalar_one()
    server = Path(f"/proc/{backend}/stat").read_text().rpartition(")")[2].split()[1]
    return cpu_s(api) + cpu_s(int(server))


@contextmanager
def _api(settings: Settings) -> Iterator[tuple[str, int]]:
    """Runs the API; yields its URL and its pid."""
    with tempfile.TemporaryDirectory() as folder:
        file, port = Path(folder) / "api.yaml", free_port()
        body = settings.model_dump(mode="json", exclude_unset=True)
        file.write_text(yaml.safe_dump({**body, "api": {"port": port}}))
        command = children.python("-m", "server", "api", "--config", str(file))
        url = f"http://127.0.0.1:{port}"
        with subprocess.Popen(command, env=children.environment(), stderr=subprocess.DEVNULL) as process:
            try:
                while True:
                    try:
                        httpx.get(f"{url}/readyz", timeout=30)
                        break
                    except httpx.ConnectError:
                        if process.poll() is not None:
                            raise
                        time.sleep(0.1)
                yield url, process.pid
            finally:
                process.terminate()


class _Writer(threading.Thread):
    """Writes `EVENTS_PER_S` events of a workload in a second, each in a transaction of its own, while `is_writing`."""

    def __init__(self, engine: Engine, workload: str) -> None:
        super().__init__(daemon=True)
        self._engine = engine
        self._workload = workload
        self.is_writing = False
        self._ended = threading.Event()

    def __enter__(self) -> "_Writer":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join()

    def run(self) -> None:
        """See `threading.Thread`."""
        next_s = time.monotonic()
        while not self._ended.wait(max(0.0, next_s - time.monotonic())):
            next_s = max(next_s, time.monotonic() - 1.0) + 1 / EVENTS_PER_S
            if self.is_writing:
                with transaction(self._engine) as session:
                    events.record(session, "workload.progress", workload=self._workload, detail={"step": 1})


class _Page(threading.Thread):
    """An open page."""

    def __init__(self, url: str, key: str, path: str) -> None:
        super().__init__(daemon=True)
        self._client = httpx.Client(base_url=url, timeout=60)
        self._client.post("/console/login", data={"key": key})
        self._path = f"/console{path}".rstrip("/")
        self.fetches = 0
        self._ended = False

    def __enter__(self) -> "_Page":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True

    def run(self) -> None:
        """See `threading.Thread`."""
        etag = self._client.get(self._path).headers.get("etag", "")
        with self._client.stream("GET", "/console/changes") as stream:
            for line in stream.iter_lines():
                if self._ended:
                    return
                if line == "event: changed":
                    headers = {"HX-Request": "true", "If-None-Match": etag}
                    etag = self._client.get(self._path, headers=headers).headers.get("etag", etag)
                    self.fetches += 1
