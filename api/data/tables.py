"""Endpoints for tables and their replicas."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated

from fastapi import Query, Response
from pydantic import Field
from sqlalchemy import case, func, select, true
from sqlalchemy.orm import Session

from api.auth import Operator, Viewer
from api.bodies import Body, JsonOnly, Name, TableName
from api.data.objects import keep_manifests, partitions_of, with_checksums
from api.openapi import refusals
from api.paging import Page
from api.problems import HttpProblem, ProblemType, invalid, not_found
from api.routing import Router
from api.state import StateOf
from api.views import View, write_audit
from infra.db import catalogue, events, integrity, outbox
from infra.db.models import Region, Workload
from infra.db.tables import Partition, Replica, ReplicaPartition, Table
from infra.errors import CatalogueError

_LONGEST_GRACE_S = 366 * 86400.0
router = Router(prefix="/v1/tables", tags=["data"], dependencies=[JsonOnly])


class TableBody(Body):
    """A table whose objects are already in its home region's bucket, under `tables/<name>/`."""

    name: TableName = Field(examples=["digits", "ads.clicks"])
    home_region: Name = Field(examples=["north"])


class ReplicaBody(Body):
    """The region of a new replica."""

    region: Name


class VerifyBody(Body):
    """The copies of a table to verify."""

    region: Name | None = Field(None, description="Only the copy in this region")


class VerificationView(View):
    """A requested verification.

    It is complete for a replica when the replica's `verified_at` is at or after `asked_at`, or its `wrong` is set.
    """

    asked_at: datetime
    regions: list[str] = Field(description="Regions whose copies are verified")


class ReplicaView(View):
    """A table's copy in a region."""

    region: str
    state: str = Field(description="`copying`, `ready`, or `deleting`: its objects are deleted at `delete_at`")
    whole: bool = Field(description="True: a replica of the whole table; false: of some partitions only")
    partitions: int = Field(description="Number of partitions that have been copied")
    stale_since: datetime | None = Field(
        description="When the first missing partition was appended: the replica is complete up to then; null: not stale"
    )
    topping_up: bool = Field(description="Whether the missing partitions of a stale replica are being copied")
    verified_at: datetime | None = Field(
        description="Since this time, all content has been read and matched its checksums; null: some was never read"
    )
    wrong_since: datetime | None = Field(
        description="When a verification found that it differs from the catalogue; no job starts on it until repaired"
    )
    wrong: str | None = Field(description="The first difference that was found, as a sentence")
    kept_because: str | None = Field(description="Why its objects still exist although its grace period is over")
    delete_at: datetime | None
    source_region: str | None
    done_bytes: int
    total_bytes: int
    requested_by: str | None = Field(description="The workload that requested the copy")
    created_at: datetime
    ready_at: datetime | None


class TableView(View):
    """An input table with its replicas."""

    name: str
    namespace: str
    size_bytes: int
    home_region: str
    created_at: datetime
    replicas: list[ReplicaView]


class TableList(Page[TableView]):
    """Tables, sorted by name."""


class ReplicaList(View):
    """Replicas, sorted by region."""

    items: list[ReplicaView]


@router.get("", summary="List tables")
def list_tables(
    state: StateOf,
    _: Viewer,
    namespace: Annotated[Name | None, Query(description="Only tables in this namespace")] = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 100,
    cursor: Annotated[TableName | None, Query(description="Return tables after this name")] = None,
) -> TableList:
    """Lists tables with their replicas, sorted by name."""
    statement = select(Table).order_by(Table.name).limit(limit + 1)
    if namespace is not None:
        statement = statement.where(Table.namespace == namespace)
    if cursor is not None:
        statement = statement.where(Table.name > cursor)
    with state.transaction() as session:
        rows = session.scalars(statement).all()
        shown, more = rows[:limit], len(rows) > limit
        return TableList(items=_views(session, shown), next_cursor=shown[-1].name if more else None)


@router.get("/{name}", summary="Get a table", responses=refusals(404))
def get_table(name: str, state: StateOf, _: Viewer) -> TableView:
    """Returns one table with its replicas."""
    with state.transaction() as session:
        return _view(session, find_table(session, name))


@router.post("", status_code=201, summary="Register a table", responses=refusals(409))
def create_table(body: TableBody, response: Response, state: StateOf, caller: Operator) -> TableView:
    """Registers the objects under `tables/<name>/` in the home region's bucket as a table with its first replica.

    If all objects are in folders, each folder is a partition, and more partitions can be appended. Otherwise the table
    is a single partition named `all`, which cannot be changed.
    """
    with state.transaction() as session:
        if session.get(Table, body.name) is not None:
            raise HttpProblem(ProblemType.CONFLICT, f"a table named {body.name} already exists")
        region = session.get(Region, body.home_region)
        if region is None:
            raise invalid("home_region", "this region does not exist", body.home_region)
        read_at = integrity.clock(session)
    # Outside of a transaction, because this sends requests to the object store.
    found = partitions_of(state, region, body.name)
    size_bytes = sum(f.size_bytes for f in found)
    if size_bytes <= state.settings.copies.checksum_at_once_bytes:
        found = [with_checksums(state, region, f, declared=False) for f in found]
    with state.transaction() as session:
        session.add(Table(name=body.name, home_region=region.name))
        session.flush()
        session.add_all(
            Partition(data_table=body.name, name=f.name, location=f.location, size_bytes=f.size_bytes) for f in found
        )
        session.flush()
        session.add(
            Replica(data_table=body.name, region=region.name, state="ready", done_bytes=size_bytes, ready_at=func.now())
        )
        session.flush()
        keep_manifests(session, body.name, region.name, found, read_at)
        events.record(session, "table.registered", region=region.name, detail={"table": body.name, "bytes": size_bytes})
        write_audit(session, caller, "table.create", body.name, home_region=region.name, size_bytes=size_bytes)
        outbox.wake_scheduler(session)
        response.headers["Location"] = f"/v1/tables/{body.name}"
        return _view(session, find_table(session, body.name))


@router.delete("/{name}", status_code=204, summary="Unregister a table", responses=refusals(404, 409))
def delete_table(name: str, state: StateOf, caller: Operator) -> None:
    """Unregisters a table; its objects stay in the buckets. Refused while an unfinished workload reads the table."""
    with state.transaction() as session:
        row = find_table(session, name, lock=True)
        reads_it = Workload.spec["tables"].contains([name])
        readers = session.scalars(
            select(Workload.id).where(Workload.finished_at.is_(None), reads_it).order_by(Workload.id).limit(3)
        ).all()
        if readers:
            raise HttpProblem(
                ProblemType.CONFLICT, f"table {name} is read by workloads that have not ended; retry when they have"
            )
        session.delete(row)
        events.record(session, "table.deleted", region=row.home_region, detail={"table": name})
        write_audit(session, caller, "table.delete", name)


@router.get("/{name}/replicas", summary="List a table's replicas", responses=refusals(404))
def list_replicas(name: str, state: StateOf, _: Viewer) -> ReplicaList:
    """Lists the replicas of a table, including those that are being copied, with their staleness."""
    with state.transaction() as session:
        return ReplicaList(items=_view(session, find_table(session, name)).replicas)


@router.post("/{name}/replicas", status_code=202, summary="Copy a table to a region", responses=refusals(404, 409))
def create_replica(name: str, body: ReplicaBody, state: StateOf, caller: Operator) -> ReplicaView:
    """Starts a copy of the whole table, or of the missing partitions of a stale replica.

    A replica that is complete or is being copied is not changed. If a replica is in its grace period before deletion,
    the deletion is cancelled. The response is 409, with sizes, if the region does not have enough storage.
    """
    with state.transaction() as session:
        # Lock the region before the table, in the same order as every transaction that adds data to a region.
        if session.get(Region, body.region, with_for_update={"key_share": True}) is None:
            find_table(session, name)
            raise invalid("region", "this region does not exist", body.region)
        find_table(session, name, lock=True)
        before = session.get(Replica, (name, body.region))
        state_before = None if before is None or not before.whole else (before.state, before.topping_up)
        try:
            replica = catalogue.want_replica(session, name, body.region, fresh=True, by=caller.id)
        except catalogue.StorageFull as error:
            raise HttpProblem(ProblemType.CONFLICT, str(error)) from None
        if replica is None or replica.state == "deleting":
            raise HttpProblem(
                ProblemType.CONFLICT,
                f"the objects of {name} in {body.region} are being deleted; retry when this is complete",
            )
        if (replica.state, replica.topping_up) != state_before:
            target = f"{name}/{body.region}"
            write_audit(session, caller, "replica.create", target, source_region=replica.source_region)
        return next(r for r in _view(session, find_table(session, name)).replicas if r.region == body.region)


@router.delete("/{name}/replicas/{region}", status_code=202, summary="Drop a replica", responses=refusals(404, 409))
def drop_replica(
    name: str,
    region: str,
    state: StateOf,
    caller: Operator,
    grace_s: Annotated[
        float | None, Query(ge=0, le=_LONGEST_GRACE_S, description="Grace period; default: as configured")
    ] = None,
) -> ReplicaView:
    """Drops a replica: new attempts no longer read it.

    Its objects are deleted when the grace period is over and no attempt reads them. Until then, a new request for the
    table in this region cancels the deletion. The table's home cannot be dropped.
    """
    grace_s = state.settings.copies.drop_grace_s if grace_s is None else grace_s
    with state.transaction() as session:
        find_table(session, name, lock=True)
        try:
            row = catalogue.drop_replica(session, name, region, grace_s=grace_s, by=caller.id)
        except CatalogueError as error:
            raise HttpProblem(ProblemType.CONFLICT, str(error)) from None
        if row is None:
            raise not_found("replica", f"{name}/{region}")
        write_audit(session, caller, "replica.drop", f"{name}/{region}", grace_s=grace_s)
        return next(r for r in _view(session, find_table(session, name)).replicas if r.region == region)


@router.post("/{name}/verify", status_code=202, summary="Verify a table", responses=refusals(404))
def verify_table(name: str, body: VerifyBody, state: StateOf, caller: Operator) -> VerificationView:
    """Starts a background verification: reads all copies of a table, or one, and compares them with their checksums.

    The verification of a replica is complete when its `verified_at` is at or after `asked_at`, or `wrong` is set.
    """
    with state.transaction() as session:
        find_table(session, name)
        rows = session.scalars(
            select(Replica)
            .where(Replica.data_table == name, Replica.state != "deleting")
            .where(Replica.region == body.region if body.region is not None else true())
            .order_by(Replica.region)
            .with_for_update()
        ).all()
        if not rows and body.region is not None:
            raise not_found("replica", f"{name}/{body.region}")
        asked_at = integrity.clock(session)
        for row in rows:
            row.verify_asked_at = asked_at
            outbox.scrub(session, row.region)
        write_audit(session, caller, "table.verify", name, regions=[row.region for row in rows])
        return VerificationView(asked_at=asked_at, regions=[row.region for row in rows])


def find_table(session: Session, name: str, *, lock: bool = False) -> Table:
    """Returns the row of a table.

    Raises:
        Problem: 404, the table does not exist.
    """
    row = session.get(Table, name, with_for_update=lock, populate_existing=True)
    if row is None:
        raise not_found("table", name)
    return row


def _view(session: Session, row: Table) -> TableView:
    return _views(session, [row])[0]


def _views(session: Session, rows: Sequence[Table]) -> list[TableView]:
    names = [row.name for row in rows]
    replicas: dict[str, list[Replica]] = defaultdict(list)
    for replica in session.scalars(select(Replica).where(Replica.data_table.in_(names)).order_by(Replica.region)):
        replicas[replica.data_table].append(replica)
    held = _held(session, names)
    return [TableView.from_row(row, replicas=[_replica(row, r, held) for r in replicas[row.name]]) for row in rows]


@dataclass(frozen=True)
class _Counts:
    """Aggregates over the copied partitions of a replica."""

    there: int = 0
    verified_at: datetime | None = None
    wrong: str | None = None


def _held(session: Session, tables: Iterable[str]) -> dict[tuple[str, str], _Counts]:
    """Returns the aggregates over copied partitions, by table and region."""
    held = ReplicaPartition
    key = held.data_table, held.region
    verified = case((func.count() == func.count(held.verified_at), func.min(held.verified_at)))
    wrong = func.min(held.wrong)
    there = held.data_table.in_(tables), held.ready_at.is_not(None)
    statement = select(*key, func.count(), verified, wrong).where(*there).group_by(*key)
    return {(t, r): _Counts(count, at, what) for t, r, count, at, what in session.execute(statement)}


def _replica(table: Table, row: Replica, held: Mapping[tuple[str, str], _Counts]) -> ReplicaView:
    counts = held.get((row.data_table, row.region), _Counts())
    return ReplicaView.from_row(
        row,
        partitions=counts.there,
        verified_at=counts.verified_at,
        wrong=counts.wrong,
        total_bytes=table.size_bytes,
    )
