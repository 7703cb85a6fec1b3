"""A real API on a loopback port with rows as a scheduler and agents write them, and a proxy that cuts connections."""

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from api.app import create_app
from api.serve import Server, config_of, listen
from domain.ids import log_prefix
from domain.log_segments import Segment
from domain.phases import TERMINAL_PHASES, Phase
from domain.reasons import Reason, ReasonCode
from infra.config.settings import Settings
from infra.db import events
from infra.db.models import Attempt, Cluster, Machine, Region, Workload
from infra.db.session import transaction
from infra.db.tenants import ApiKey, Tenant
from infra.keys import load_master_key, new_api_key
from mizzen.objects import open_store

Capture = pytest.CaptureFixture[str]
Submit = Callable[..., str]

DOCUMENT: dict[str, Any] = {
    "version": 1,
    "name": "digits",
    "tenant": "vision",
    "labels": {"sweep": "1"},
    "jobs": [{"name": "train", "tasks": 2, "resources": {"accelerators": "a100:1"}, "run": ["true"]}],
}


@dataclass
class Service:
    """A running API, with the keys of an operator and of submitters of two tenants."""

    settings: Settings
    engine: Engine
    folder: Path
    port: int
    keys: Mapping[str, str]

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://127.0.0.1:{self.port}"

    def place(self, workload_id: str, attempt: int = 1) -> None:
        """Writes the rows of an awarded attempt whose tasks are running."""
        with transaction(self.engine) as session:
            session.add(
                Attempt(
                    workload=workload_id, attempt=attempt, region="north", plan={"jobs": []},
                    started_at=datetime.now(UTC),
                    gpu_types={"a100": 2}, cpus_milli=2000, last_step=120, checkpoint_step=100,
                    checkpoint_at=datetime.now(UTC), checkpoint_bytes=52344, lost_s=90.0 if attempt == 1 else None,
                    cadence={
                        "interval_s": 804.98, "cost_s": 30.0, "mtbf_s": 10800.0, "step_s": 1e-6, "source": "hazard"
                    },
                    bandwidth={"at_s": time.time() - 60, "bytes_s": 20 << 20, "lower_bytes_s": 9.5 * (1 << 20)},
                    load={"state": "loaded", "error": None, "skipped": 1},
                )
            )  # fmt: skip
        self.become(workload_id, Phase.RUNNING, attempt)

    def become(self, workload_id: str, phase: Phase, attempt: int = 1, reason: Reason | None = None) -> None:
        """Sets the workload's phase as its workflow would; releases its attempt unless the phase is running."""
        with transaction(self.engine) as session:
            row = session.get_one(Workload, workload_id)
            row.phase, row.attempt = phase.value, attempt
            row.region = "north" if phase == Phase.RUNNING else None
            row.reason = reason.to_json() if reason else None
            row.finished_at = datetime.now(UTC) if phase in TERMINAL_PHASES else None
            placed = session.get(Attempt, (workload_id, attempt))
            if placed is not None and phase != Phase.RUNNING:
                placed.released_at, placed.outcome = datetime.now(UTC), row.reason
            events.record(
                session, f"workload.{phase}", tenant=row.tenant, workload=row.id, attempt=attempt, reason=reason
            )

    def write_log(
        self, workload_id: str, text: str, *, task: int = 0, attempt: int = 1, at: int = 0, end: bool = False
    ) -> int:
        """Writes a segment of a task's log that begins at byte `at`; returns the position of the next segment."""
        store = open_store(self.folder.as_uri())
        prefix = log_prefix(workload_id, attempt, "train", task)
        store.put(prefix + Segment(at, time.time_ns() // 1_000_000).name, text.encode())
        if end:
            store.put(f"{prefix}end", b"")
        return at + len(text.encode())


@contextmanager
def serving(settings: Settings, port: int = 0) -> Iterator[int]:
    """Runs the API in a thread of this process; yields its port."""
    listener = listen("127.0.0.1", port)
    server = Server(config_of(create_app(settings), settings, graceful_s=2))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()


def populate(engine: Engine, folder: Path) -> dict[str, str]:
    """Creates two tenants, a region with a machine, and API keys; returns the keys by label."""
    keys = {}
    with transaction(engine) as session:
        session.add_all(Tenant(name=name, level=3, quota_gpus={"a100": 8}) for name in ("vision", "speech"))
        session.add(Region(name="north", bucket_url=folder.as_uri()))
        session.flush()
        session.add(Cluster(region="north", name="alpha"))
        session.flush()
        session.add(
            Machine(
                id="north/alpha/m1", region="north", cluster="alpha", rack="r1", gpu_type="a100", gpus=8,
                cpus_milli=64000, memory_bytes=512 << 30, free_cpus_milli=64000, free_memory_bytes=512 << 30,
                state="ready", incarnation="1", public_key="", address="127.0.0.1",
            )
        )  # fmt: skip
        for what, role, tenant in (
            ("operator", "operator", None),
            ("vision", "submitter", "vision"),
            ("speech", "submitter", "speech"),
        ):
            id_, keys[what], digest = new_api_key()
            session.add(ApiKey(id=id_, sha256=digest, role=role, tenant=tenant, label=what))
    return keys


def settings_for(database_url: str, folder: Path) -> Settings:
    """Returns settings of an API on this database, with a new master key and without Temporal."""
    settings = Settings(data_dir=folder, database=database_url)
    load_master_key(settings.master_key_path, create=True)
    return settings


FAILED = Reason(ReasonCode.TASK_FAILED, {"task": "train/0", "status": "exit code 3"})
DONE = Reason(ReasonCode.COMPLETED, {"tasks": 2})


class Cutter:
    """A proxy to a port. If `after_bytes` is set, each connection is cut after that many bytes of the response."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.after_bytes: int | None = None
        self.cuts = 0
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://127.0.0.1:{self.port}"

    def cut_all(self) -> None:
        """Cuts all open connections."""
        for connection in self._open:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self.cuts += 1

    def close(self) -> None:
        """Closes the listener and all connections."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut_all()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
                self._open += [near, far]
                threading.Thread(target=self._pass, args=(near, far, False), daemon=True).start()
                threading.Thread(target=self._pass, args=(far, near, True), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, is_answer: bool) -> None:
        left = self.after_bytes if is_answer else None
        with suppress(OSError):
            while body := source.recv(1 if left is not None else 65536):
                if left is not None:
                    left -= len(body)
                    if left < 0:
                        self.cuts += 1
                        break
                sink.sendall(body)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


def table_rows(text: str) -> list[dict[str, str]]:
    """Parses a printed table; returns its rows as dicts by column heading."""
    head, *lines = text.splitlines()
    return [dict(zip(head.split(), line.split(), strict=False)) for line in lines]
