"""Endpoints to append and list the partitions of a table. Partitions are immutable."""

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any

from fastapi import Query
from pydantic import Field, StringConstraints
from sqlalchemy import select
from sqlalchemy.orm import Session

from api.auth import Operator, Viewer
from api.bodies import Body, Bytes, JsonOnly
from api.data.objects import FoundPartition, keep_manifests, partition_at, with_checksums
from api.data.tables import find_table
from api.openapi import refusals
from api.paging import Page
from api.problems import FieldError, HttpProblem, ProblemType
from api.routing import Router
from api.state import ApiState, StateOf
from api.views import View, write_audit
from domain.ids import PARTITION_PATTERN, partition_prefix, table_prefix
from infra.copies.manifest import declared_checksum
from infra.db import events, integrity
from infra.db.models import Region
from infra.db.tables import Partition

router = Router(prefix="/v1/tables/{name}/partitions", tags=["data"], dependencies=[JsonOnly])
MAX_APPENDED = 100
_PartitionName = Annotated[str, StringConstraints(pattern=PARTITION_PATTERN)]


class PartitionBody(Body):
    """A partition whose objects are already in the home region's bucket, under `tables/<table>/<name>/`."""

    name: _PartitionName = Field(examples=["ds=2026-11-22"])
    size_bytes: Bytes = Field(description="Total size of its objects")
    checksum: str | None = Field(
        None,
        pattern=r"^sha256:[0-9a-f]{64}$",
        description="SHA-256 of the output of `sha256sum` for the object paths in the folder, sorted by path",
    )


class AppendBody(Body):
    """Partitions to append; either all are appended or none."""

    partitions: list[PartitionBody] = Field(min_length=1, max_length=MAX_APPENDED)


class PartitionView(View):
    """A partition of a table."""

    name: str
    location: str = Field(description="Folder of the partition in the bucket of every region that has it")
    size_bytes: int
    checksum: str | None
    created_at: datetime


class PartitionList(Page[PartitionView]):
    """Partitions, sorted by name."""


@router.get("", summary="List a table's partitions", responses=refusals(404))
def list_partitions(
    name: str,
    state: StateOf,
    _: Viewer,
    limit: Annotated[int, Query(ge=1, le=500)] = 100,
    cursor: Annotated[_PartitionName | None, Query(description="Return partitions after this name")] = None,
) -> PartitionList:
    """Lists a table's partitions, sorted by name."""
    with state.transaction() as session:
        find_table(session, name)
        statement = select(Partition).where(Partition.data_table == name).order_by(Partition.name).limit(limit + 1)
        if cursor is not None:
            statement = statement.where(Partition.name > cursor)
        rows = session.scalars(statement).all()
        shown, more = rows[:limit], len(rows) > limit
        return PartitionList(
            items=[PartitionView.from_row(row) for row in shown], next_cursor=shown[-1].name if more else None
        )


@router.post("", summary="Append partitions", responses=refusals(404, 409))
def append_partitions(name: str, body: AppendBody, state: StateOf, caller: Operator) -> PartitionList:
    """Appends partitions at the table's home. A partition that already exists with the same content is not changed."""
    _check_distinct(body.partitions)
    with state.transaction() as session:
        region = session.get_one(Region, find_table(session, name).home_region)
        new = _not_there(session, name, body.partitions)
        read_at = integrity.clock(session)
    # Outside of a transaction, because this sends requests to the object store.
    found = _check_objects(state, region, name, body.partitions, new)
    with state.transaction() as session:
        table = find_table(session, name, lock=True)
        if table.home_region != region.name:
            raise HttpProblem(
                ProblemType.CONFLICT, f"the home of table {name} has moved to {table.home_region}; append there"
            )
        new = _not_there(session, name, body.partitions)
        session.add_all(
            Partition(
                data_table=name, name=p.name, location=partition_prefix(name, p.name), size_bytes=p.size_bytes,
                checksum=p.checksum,
            )
            for p in new
        )  # fmt: skip
        session.flush()
        keep_manifests(session, name, region.name, [found[p.name] for p in new if p.name in found], read_at)
        if new:
            added: dict[str, Any] = {"partitions": [p.name for p in new], "bytes": sum(p.size_bytes for p in new)}
            events.record(session, "table.appended", region=region.name, detail={"table": name, **added})
            write_audit(session, caller, "table.append", name, **added)
        rows = _rows(session, name, body.partitions)
        return PartitionList(items=[PartitionView.from_row(rows[p.name]) for p in body.partitions], next_cursor=None)


def _check_distinct(asked: Sequence[PartitionBody]) -> None:
    seen: set[str] = set()
    wrong = []
    for index, partition in enumerate(asked):
        if partition.name in seen:
            wrong.append(FieldError(f"partitions[{index}].name", "is given twice", partition.name))
        seen.add(partition.name)
    _refuse(ProblemType.INVALID_REQUEST, wrong)


def _not_there(session: Session, table: str, asked: Sequence[PartitionBody]) -> list[PartitionBody]:
    """Returns the partitions in `asked` that the table does not have yet.

    Raises:
        Problem: a partition exists with different content, or the table is a single partition.
    """
    rows = _rows(session, table, asked)
    wrong = []
    for index, partition in enumerate(asked):
        row = rows.get(partition.name)
        if row is not None:
            for field in ("size_bytes", "checksum"):
                given, there = getattr(partition, field), getattr(row, field)
                if given != there:
                    told = f"partition {partition.name} exists with {there} and cannot be changed; use another name"
                    wrong.append(FieldError(f"partitions[{index}].{field}", told, given))
    _refuse(ProblemType.CONFLICT, wrong)
    new = [p for p in asked if p.name not in rows]
    single = Partition.data_table == table, Partition.location == table_prefix(table)
    if new and session.scalar(select(Partition.name).where(*single)) is not None:
        detail = f"table {table} is a single partition, as its objects are not in folders: nothing can be appended"
        raise HttpProblem(ProblemType.CONFLICT, detail)
    return new


def _check_objects(
    state: ApiState, region: Region, table: str, asked: Sequence[PartitionBody], new: Sequence[PartitionBody]
) -> dict[str, FoundPartition]:
    """Checks the new partitions against the objects in the bucket, and returns the found partitions by name."""
    wrong = []
    found = {p.name: there for p in new if (there := partition_at(state, region, table, p.name)) is not None}
    for partition in new:
        location, index, there = (
            partition_prefix(table, partition.name),
            asked.index(partition),
            found.get(partition.name),
        )
        if there is None:
            told = f"the bucket of the table's home {region.name} has no objects under {location}; put them there first"
            wrong.append(FieldError(f"partitions[{index}].name", told, partition.name))
        elif there.size_bytes != partition.size_bytes:
            told = f"the objects under {location} in {region.name} have {there.size_bytes} bytes"
            wrong.append(FieldError(f"partitions[{index}].size_bytes", told, partition.size_bytes))
    _refuse(ProblemType.INVALID_REQUEST, wrong)
    if sum(p.size_bytes for p in new) > state.settings.copies.checksum_at_once_bytes:
        return found
    for partition in new:
        declared = partition.checksum
        read = with_checksums(state, region, found[partition.name], declared=declared is not None)
        found[partition.name] = read
        if declared is not None and (computed := declared_checksum(read.manifest)) != declared:
            told = f"the objects under {read.location} in {region.name} have {computed}"
            wrong.append(FieldError(f"partitions[{asked.index(partition)}].checksum", told, declared))
    _refuse(ProblemType.INVALID_REQUEST, wrong)
    return found


def _refuse(kind: ProblemType, wrong: Sequence[FieldError]) -> None:
    if wrong:
        raise HttpProblem(kind, "; ".join(f"{e.path}: {e.message}" for e in wrong[:5]), errors=wrong)


def _rows(session: Session, table: str, asked: Sequence[PartitionBody]) -> dict[str, Partition]:
    named = Partition.data_table == table, Partition.name.in_([p.name for p in asked])
    return {row.name: row for row in session.scalars(select(Partition).where(*named))}
