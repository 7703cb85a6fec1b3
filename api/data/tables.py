"""Tables and their replicas."""

from collections import defaultdict
from datetime import datetime
from functools import partial

from fastapi import APIRouter, Response
from pydantic import Field
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from api.auth import Operator, Viewer
from api.bodies import Body, JsonOnly, Name
from api.fleet.storage import STORAGE_ERRORS, storage_unavailable
from api.openapi import refusals
from api.problems import Kind, Problem, invalid, not_found
from api.state import State, StateOf
from api.views import View, write_audit
from domain.ids import table_prefix
from infra.db import events, outbox
from infra.db.models import Region, Replica, Table, Workload

router = APIRouter(prefix="/v1/tables", tags=["data"], dependencies=[JsonOnly])


class TableBody(Body):
    """A table whose objects are in its home region's bucket already, under `tables/<name>/`."""

    name: Name = Field(examples=["digits"])
    home_region: Name = Field(examples=["north"])


class ReplicaBody(Body):
    """Where a replica is wanted."""

    region: Name


class ReplicaView(View):
    """A table's copy in a region."""

    region: str
    state: str = Field(description="copying or ready")
    source_region: str | None
    done_bytes: int
    total_bytes: int
    requested_by: str | None = Field(description="The workload for which it is made on demand")
    created_at: datetime
    ready_at: datetime | None


class TableView(View):
    """An input table."""

    name: str
    size_bytes: int
    home_region: str
    created_at: datetime
    replicas: list[ReplicaView]


class TableList(View):
    """Tables by name."""

    items: list[TableView]


class ReplicaList(View):
    """Replicas by region."""

    items: list[ReplicaView]


@router.get("", summary="List tables")
def list_tables(state: StateOf, _: Viewer) -> TableList:
    """All tables with their replicas."""
    with state.transaction() as session:
        replicas: dict[str, list[Replica]] = defaultdict(list)
        for replica in session.scalars(select(Replica).order_by(Replica.data_table, Replica.region)):
            replicas[replica.data_table].append(replica)
        rows = session.scalars(select(Table).order_by(Table.name))
        return TableList(items=[_view(row, replicas[row.name]) for row in rows])


@router.get("/{name}", summary="A table", responses=refusals(404))
def get_table(name: str, state: StateOf, _: Viewer) -> TableView:
    """One table with its replicas."""
    with state.transaction() as session:
        row = _find(session, name)
        return _view(row, _replicas(session, name))


@router.post("", status_code=201, summary="Register a table", responses=refusals(409))
def create_table(body: TableBody, response: Response, state: StateOf, caller: Operator) -> TableView:
    """Registers the objects under `tables/<name>/` in the home region's bucket as a table with its first replica."""
    with state.transaction() as session:
        if session.get(Table, body.name) is not None:
            raise Problem(Kind.CONFLICT, f"there is a table {body.name} already")
        region = session.get(Region, body.home_region)
        if region is None:
            raise invalid("home_region", "there is no such region", body.home_region)
    # Not in a transaction: it asks another system.
    size_bytes = _measure(state, region, body.name)
    with state.transaction() as session:
        row = Table(name=body.name, size_bytes=size_bytes, home_region=region.name)
        session.add(row)
        session.flush()
        session.add(
            Replica(data_table=row.name, region=region.name, state="ready", done_bytes=size_bytes, ready_at=func.now())
        )
        session.flush()
        events.record(session, "table.registered", region=region.name, detail={"table": row.name, "bytes": size_bytes})
        write_audit(session, caller, "table.create", row.name, home_region=region.name, size_bytes=size_bytes)
        outbox.wake_scheduler(session)
        session.refresh(row)
        response.headers["Location"] = f"/v1/tables/{row.name}"
        return _view(row, _replicas(session, row.name))


def _measure(state: State, region: Region, table: str) -> int:
    """Bytes of the table's objects.

    Raises:
        Problem: there is none, or the bucket cannot be read.
    """
    prefix = table_prefix(table)
    try:
        sizes = [info.size_bytes for info in state.store(region.bucket_url).list(prefix)]
    except STORAGE_ERRORS as error:
        raise storage_unavailable(error) from None
    if not sizes:
        raise invalid("name", f"the bucket of region {region.name} has no objects under {prefix}; put them there first")
    return sum(sizes)


@router.delete("/{name}", status_code=204, summary="Forget a table", responses=refusals(404, 409))
def delete_table(name: str, state: StateOf, caller: Operator) -> Response:
    """Forgets a table. Its objects stay in the buckets. Refused while a workload that reads it has not ended."""
    with state.transaction() as session:
        row = _find(session, name, lock=True)
        reads_it = Workload.spec["tables"].contains([name])
        readers = session.scalars(
            select(Workload.id).where(Workload.finished_at.is_(None), reads_it).order_by(Workload.id).limit(3)
        ).all()
        if readers:
            raise Problem(Kind.CONFLICT, f"table {name} is read by workloads that have not ended")
        session.delete(row)
        events.record(session, "table.deleted", region=row.home_region, detail={"table": name})
        write_audit(session, caller, "table.delete", name)
    return Response(status_code=204)


@router.get("/{name}/replicas", summary="A table's replicas", responses=refusals(404))
def list_replicas(name: str, state: StateOf, _: Viewer) -> ReplicaList:
    """Where the table is, or is being copied to."""
    with state.transaction() as session:
        row = _find(session, name)
        view = partial(_replica, row)
        return ReplicaList(items=[view(replica) for replica in _replicas(session, name)])


@router.post("/{name}/replicas", status_code=202, summary="Copy a table to a region", responses=refusals(404, 409))
def create_replica(name: str, body: ReplicaBody, state: StateOf, caller: Operator) -> ReplicaView:
    """Starts a copy. Where there is a replica, or one is on its way, it stays as it is."""
    with state.transaction() as session:
        row = _find(session, name, lock=True)
        if session.get(Region, body.region) is None:
            raise invalid("region", "there is no such region", body.region)
        replica = session.get(Replica, (name, body.region))
        if replica is None:
            ready = [r.region for r in _replicas(session, name) if r.state == "ready"]
            if not ready:
                raise Problem(Kind.CONFLICT, f"table {name} has no complete replica to copy from")
            source = row.home_region if row.home_region in ready else ready[0]
            replica = Replica(data_table=name, region=body.region, state="copying", source_region=source)
            session.add(replica)
            session.flush()
            session.refresh(replica)
            said = {"table": name, "source": source, "by": caller.id}
            events.record(session, "replica.copying", region=body.region, detail=said)
            write_audit(session, caller, "replica.create", f"{name}/{body.region}", source_region=source)
            outbox.replicate(session, name, source, body.region)
        return _replica(row, replica)


def _find(session: Session, name: str, *, lock: bool = False) -> Table:
    row = session.get(Table, name, with_for_update=lock)
    if row is None:
        raise not_found("table", name)
    return row


def _replicas(session: Session, name: str) -> list[Replica]:
    return list(session.scalars(select(Replica).where(Replica.data_table == name).order_by(Replica.region)))


def _replica(table: Table, row: Replica) -> ReplicaView:
    return ReplicaView(
        region=row.region, state=row.state, source_region=row.source_region, done_bytes=row.done_bytes,
        total_bytes=table.size_bytes, requested_by=row.requested_by, created_at=row.created_at, ready_at=row.ready_at,
    )  # fmt: skip


def _view(row: Table, replicas: list[Replica]) -> TableView:
    return TableView(
        name=row.name, size_bytes=row.size_bytes, home_region=row.home_region, created_at=row.created_at,
        replicas=[_replica(row, replica) for replica in replicas],
    )  # fmt: skip
