"""A small installation for the API tests: two regions with buckets, four machines, two tenants, keys of every role."""

import hashlib
import io
import re
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import yaml
from fastapi import FastAPI
from sqlalchemy import Engine, func, update
from sqlalchemy.orm import Session

from api.app import create_app
from api.documents.schema import EXAMPLE
from domain.phases import TERMINAL_PHASES, Phase
from domain.reasons import Reason, ReasonCode
from domain.spec import JobSpec, ResourceSpec, WorkloadSpec
from infra.archives import inspect_archive
from infra.config.settings import Settings
from infra.db import events
from infra.db.capacity import InstanceRow
from infra.db.models import Allocation, Attempt, Cluster, Machine, Region, Workload
from infra.db.session import open_engine, transaction
from infra.db.tables import Partition, Replica, Table
from infra.db.tenants import ApiKey, Archive, Secret, Tenant
from infra.keys import encrypt_secret, hash_api_key, load_master_key
from mizzen.objects import ObjectStore, open_store

GIB = 1 << 30
INSTANCE = "in-0000000000000001"
KEYS = {
    "operator": ("operator", None),
    "auditor": ("viewer", None),
    "vision": ("submitter", "vision"),
    "vision-viewer": ("viewer", "vision"),
    "speech": ("submitter", "speech"),
    "machine": ("machine", None),
    "balancer": ("balancer", None),
    "vision-balancer": ("balancer", "vision"),
    "speech-balancer": ("balancer", "speech"),
}
"""Role and tenant of each API key, by name. The machine's key is one of north/alpha/m1."""
MACHINES = {
    "north/alpha/m1": ("a100", 8, 64_000, 256 * GIB),
    "north/alpha/m2": ("a100", 8, 64_000, 256 * GIB),
    "south/beta/m1": ("v100", 4, 16_000, 64 * GIB),
    "south/beta/c1": (None, 0, 8_000, 32 * GIB),
}


@cache
def openapi_document() -> dict[str, Any]:
    """Returns the OpenAPI document. It is computed once, because every test worker needs it to collect its tests."""
    return create_app(Settings(database="postgresql://nobody@127.0.0.1:1/nothing")).openapi()


@cache
def _operations() -> list[tuple[str, re.Pattern[str], set[str]]]:
    """Returns method, path and statuses of each documented operation, paths with fewer parameters first."""
    paths = sorted(openapi_document()["paths"].items(), key=lambda item: item[0].count("{"))
    return [
        (method.upper(), re.compile(re.sub(r"{[^}]+}", "[^/]+", path)), set(operation["responses"]))
        for path, operations in paths
        for method, operation in operations.items()
    ]


async def _is_documented(response: httpx.Response) -> None:
    method, path = response.request.method, response.request.url.path
    for known, pattern, statuses in _operations():
        if known == method and pattern.fullmatch(path):
            assert str(response.status_code) in statuses, f"{method} {path}: status {response.status_code}"
            return


def archive_of(files: Mapping[str, str]) -> bytes:
    """Returns a tar.gz archive with these files."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(text.encode())
            tar.addfile(info, io.BytesIO(text.encode()))
    return out.getvalue()


ARCHIVE = archive_of({"train.py": "print('hello')\n"})
ARCHIVE_SHA256 = hashlib.sha256(ARCHIVE).hexdigest()
FOLDERS = archive_of({"src/a.py": "1"})
FOLDERS_SHA256 = hashlib.sha256(FOLDERS).hexdigest()


def document(**changes: Any) -> dict[str, Any]:
    """Returns the valid example document with some keys changed; None removes a key."""
    body = {**EXAMPLE, **changes}
    return {key: value for key, value in body.items() if value is not None}


def as_yaml(body: object) -> bytes:
    """Returns the document as YAML."""
    return str(yaml.safe_dump(body, sort_keys=False)).encode()


@dataclass
class ApiWorld:
    """An installation and its API."""

    engine: Engine
    settings: Settings
    app: FastAPI
    raw_keys: dict[str, str]
    buckets: dict[str, ObjectStore]
    counter: int = field(default=0)

    def headers(self, key: str | None) -> dict[str, str]:
        """Returns the Authorization header of a key of `KEYS`; None: no header."""
        return {} if key is None else {"Authorization": f"Bearer {self.raw_keys[key]}"}

    def client(self, key: str | None = "operator") -> httpx.AsyncClient:
        """Returns a client that calls the application in this process, without a network.

        It fails if a response has a status that the OpenAPI document does not name for the operation.
        """
        transport, hooks = httpx.ASGITransport(self.app), {"response": [_is_documented]}
        return httpx.AsyncClient(
            transport=transport, base_url="http://api", headers=self.headers(key), event_hooks=hooks
        )

    def session(self) -> Any:
        """Returns a session in one transaction."""
        return transaction(self.engine)

    def add_workload(self, phase: Phase = Phase.PENDING, **columns: Any) -> str:
        """Adds a workload in a phase; returns its id."""
        self.counter += 1
        tenant = columns.pop("tenant", "vision")
        name = columns.pop("name", f"w{self.counter}")
        tables = columns.pop("tables", ())
        tasks = columns.pop("tasks", 2)
        columns.setdefault("id", f"wl-{self.counter:016d}")
        resources = ResourceSpec(gpus=1, gpu_types=("a100",))
        job = JobSpec(name="trainer", role="trainer", tasks=tasks, resources=resources, argv=("true",))
        spec = WorkloadSpec(name=name, tenant=tenant, jobs=(job,), tables=tables)
        if phase in TERMINAL_PHASES:
            columns.setdefault("finished_at", func.now())
        with self.session() as session:
            session.add(
                Workload(tenant=tenant, name=name, spec=spec.model_dump(mode="json"), phase=phase.value, **columns)
            )
        return str(columns["id"])

    def add_instance(self, id_: str = INSTANCE, phase: str = "ready", **columns: Any) -> None:
        """Adds an instance that was requested an hour ago for the pool `burst` of region north."""
        an_hour_ago = func.now() - timedelta(hours=1)
        with self.session() as session:
            session.add(
                InstanceRow(
                    **{
                        "id": id_, "region": "north", "pool": "burst", "cluster": "burst-za-spot", "provider": "sim",
                        "zone": "za", "kind": "spot", "machine_type": "small", "gpus": 4, "gpu_type": "a100",
                        "cpus_milli": 16_000, "memory_bytes": 64 * GIB, "usd_per_h": 4.0, "phase": phase,
                        "requested_at": an_hour_ago, "launched_at": an_hour_ago, "started_at": an_hour_ago,
                        "gone_at": func.now() if phase == "gone" else None, **columns,
                    }
                )
            )  # fmt: skip

    def end_instance(self, id_: str = INSTANCE) -> None:
        """Sets an instance to the phase `gone`."""
        with self.session() as session:
            row = session.get_one(InstanceRow, id_)
            row.phase, row.gone_at = "gone", row.requested_at

    def add_attempt(self, workload: str, attempt: int, machine: str, slots: int, **columns: Any) -> None:
        """Adds the newest attempt of a workload, which holds `slots` (a bit mask) of one machine."""
        released_at = columns.pop("released_at", None)
        gpu_type = MACHINES[machine][0]
        region = machine.partition("/")[0]
        placed = {"job": "trainer", "gpu_type": gpu_type, "machines": [(machine, slots.bit_count())]}
        plan = {"jobs": [placed]}
        held = {"cpus_milli": 2000, "memory_bytes": GIB} if slots else {"cpus_milli": 0, "memory_bytes": 0}
        with self.session() as session:
            session.add(
                Attempt(
                    workload=workload, attempt=attempt, region=region, plan=plan, released_at=released_at,
                    gpu_types={gpu_type: slots.bit_count()} if gpu_type else {}, cpus_milli=held["cpus_milli"],
                    **columns,
                )
            )  # fmt: skip
            session.flush()
            session.add(
                Allocation(
                    workload=workload, attempt=attempt, machine=machine, slots=slots, awaited=0, awaited_cpus_milli=0,
                    awaited_memory_bytes=0, held_at=func.now(), **held,
                )
            )  # fmt: skip
            session.flush()
            if released_at is not None:
                session.execute(
                    update(Allocation)
                    .where(Allocation.workload == workload, Allocation.attempt == attempt)
                    .values(released_at=released_at)
                )
            region_now = region if released_at is None else None
            session.execute(update(Workload).where(Workload.id == workload).values(attempt=attempt, region=region_now))

    def set_phase(self, workload: str, phase: Phase, *, reason: Reason | None = None) -> None:
        """Sets a workload's phase and records the event, as the control plane does."""
        with self.session() as session:
            row = session.get_one(Workload, workload)
            row.phase = phase.value
            row.reason = reason.to_json() if reason else None
            if phase in TERMINAL_PHASES:
                row.finished_at = func.now()
            events.record(session, f"workload.{phase.value}", tenant=row.tenant, workload=workload, reason=reason)


def _fill(session: Session, settings: Settings, buckets: Mapping[str, str], keys: Mapping[str, str]) -> None:
    session.add_all([Tenant(name="vision", level=3, quota_gpus={"a100": 8}, quota_cpus_milli=64_000)])
    session.add_all([Tenant(name="speech", level=5, quota_gpus={"v100": 4})])
    session.add_all([Region(name=name, bucket_url=url, storage_bytes=1000) for name, url in buckets.items()])
    session.flush()
    session.add_all([Cluster(region="north", name="alpha"), Cluster(region="south", name="beta")])
    session.flush()
    for name, (gpu_type, gpus, cpus, memory) in MACHINES.items():
        region, cluster, _ = name.split("/")
        session.add(
            Machine(
                id=name, region=region, cluster=cluster, rack="r1", gpu_type=gpu_type, gpus=gpus, cpus_milli=cpus,
                memory_bytes=memory, free_cpus_milli=cpus, free_memory_bytes=memory, state="ready", incarnation="i",
                public_key="", address="127.0.0.1",
            )
        )  # fmt: skip
    for name, key in keys.items():
        role, tenant = KEYS[name]
        machine = "north/alpha/m1" if role == "machine" else None
        sha256 = hash_api_key(key)
        session.add(ApiKey(id=f"key-{name}", sha256=sha256, role=role, tenant=tenant, machine=machine, label=name))
    box = encrypt_secret(load_master_key(settings.master_key_path, create=True), "hf_secret")
    session.add(Secret(tenant="vision", name="hf-token", box=box))
    for sha256, body in ((ARCHIVE_SHA256, ARCHIVE), (FOLDERS_SHA256, FOLDERS)):
        paths = inspect_archive(io.BytesIO(body), max_bytes=1000, max_members=10).dump()
        session.add(Archive(tenant="vision", sha256=sha256, body=body, paths=paths))
    session.add(Table(name="digits", home_region="north"))
    session.flush()
    session.add(Partition(data_table="digits", name="all", location="tables/digits/", size_bytes=5))
    session.flush()
    session.add(Replica(data_table="digits", region="north", state="ready", done_bytes=5, ready_at=func.now()))


@contextmanager
def make_world(
    database_url: str, folder: Path, create: Callable[[Settings], FastAPI] = create_app, **settings: Any
) -> Iterator[ApiWorld]:
    """Creates an installation on a new, migrated database. `create` creates its application."""
    given = Settings.model_validate({"database": database_url, "data_dir": folder, **settings})
    urls = {name: (folder / "buckets" / name).as_uri() for name in ("north", "south")}
    keys = {name: f"mzn_key-{name}_{'x' * 20}{number}" for number, name in enumerate(KEYS)}
    engine = open_engine(database_url)
    with transaction(engine) as session:
        _fill(session, given, urls, keys)
    buckets = {name: open_store(url) for name, url in urls.items()}
    buckets["north"].put("tables/digits/a.bin", b"12345")
    app = create(given)
    yield ApiWorld(engine=engine, settings=given, app=app, raw_keys=keys, buckets=buckets)
    state = app.state.mizzen
    while any(one.pool.checkedout() for one in (state.engine, state.authentication_engine)):
        time.sleep(0.01)  # Requests whose client has gone, and audit entries of refused ones, still use a connection.
    app.state.mizzen.dispose()
    engine.dispose()


def awarded(region: str = "north") -> Reason:
    """Returns the reason of an award."""
    return Reason(ReasonCode.AWARDED, {"region": region, "machines": 1, "victims": 0})
