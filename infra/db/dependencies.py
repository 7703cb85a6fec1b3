"""Dependencies: conditions for a workload to enter the queue. Triggers decide them (`functions/dependencies.sql`).

The transaction that changes a workload's phase or adds a partition also decides the dependencies on it. Times are
decided by a periodic round (`activities.lifecycle.dependencies`).
"""

from collections.abc import Collection
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import (
    CheckConstraint,
    ForeignKey,
    Index,
    Integer,
    Text,
    and_,
    bindparam,
    case,
    func,
    select,
    text,
    update,
)  # fmt: skip
from sqlalchemy.dialects.postgresql import INT4MULTIRANGE
from sqlalchemy.orm import InstrumentedAttribute, Mapped, Session, mapped_column

from domain.phases import Phase
from domain.reasons import Reason, ReasonCode, in_words
from domain.spec import WorkloadSpec
from infra.db.array_rows import begun
from infra.db.base import Base
from infra.db.models import Workload
from infra.db.tables import Table


class Dependency(Base):
    """One condition of a workload: about another workload, a partition of a table, or the time. It is decided once."""

    __tablename__ = "dependency"
    workload: Mapped[str] = mapped_column(ForeignKey("workload.id", ondelete="CASCADE"), primary_key=True)
    place: Mapped[int] = mapped_column(primary_key=True)
    """Its position in the document. A dependency on the time comes last."""
    predecessor: Mapped[str | None]
    """The id of the predecessor. Not a foreign key, because a decided dependency outlives the predecessor's record."""
    predecessor_name: Mapped[str | None]
    data_table: Mapped[str | None]
    partition: Mapped[str | None]
    due_at: Mapped[datetime | None]
    condition: Mapped[str]
    state: Mapped[str] = mapped_column(server_default="waiting")
    """`met`: it holds, once and for all. `never`: it can no longer hold. `waived`: `never`, but a user gave it up.
    `each`: it is about the elements of the same index, and decided for each of them (`element_dependencies.sql`)."""
    open: Mapped[Any | None] = mapped_column(INT4MULTIRANGE)
    """With `each`: the positions of the elements for which the condition is not decided."""
    never: Mapped[Any | None] = mapped_column(INT4MULTIRANGE)
    """With `each`: the positions of the elements for which it can never hold and was not waived by a user."""
    decided_at: Mapped[datetime | None]
    outcome: Mapped[str | None]
    """The predecessor's phase that decided it."""
    __table_args__ = (
        CheckConstraint("state in ('waiting', 'met', 'never', 'waived', 'each')", name="dependency_state"),
        CheckConstraint("(state = 'each') = (open is not null and never is not null)", name="dependency_each"),
        CheckConstraint(
            "case condition when 'ready' then partition is not null and data_table is not null"
            " when 'due' then due_at is not null"
            " else condition in ('succeeded', 'ended', 'failed', 'started') and predecessor is not null end",
            name="dependency_condition",
        ),
        Index("dependency_workload", "predecessor", postgresql_where=text("state in ('waiting', 'each')")),
        Index("dependency_partition", "data_table", "partition", postgresql_where=text("state = 'waiting'")),
        Index("dependency_in_vain", "workload", postgresql_where=text("not isempty(never)")),
        Index("dependency_due", "due_at", postgresql_where=text("state = 'waiting'")),
    )


_NAMED = text(
    "(select id from workload where id = :given and tenant = :tenant) union all"
    " (select id from workload where tenant = :tenant and name = :given and array_id is null order by id desc limit 1)"
    " limit 1"
)
_ADD = text(
    "insert into dependency (workload, place, predecessor, predecessor_name, condition, state, outcome, decided_at)"
    " select :workload, :place, id, name, :condition, found.state, case when found.state <> 'waiting' then phase end,"
    " case when found.state <> 'waiting' then now() end"
    " from workload cross join lateral condition_state(:condition, id, phase) as found (state) where id = :predecessor"
)
_ADD_EACH = text("select add_each(:workload, :place, :predecessor, :condition)")
_ADD_PARTITION = text(
    "insert into dependency (workload, place, data_table, partition, condition, state, decided_at)"
    " select :workload, :place, :table, :partition, 'ready', case when p.name is null then 'waiting' else 'met' end,"
    " p.created_at from (values (1)) as always (row)"
    " left join data_partition as p on p.data_table = :table and p.name = :partition"
)
_ADD_TIME = text(
    "insert into dependency (workload, place, due_at, condition, state)"
    " select :workload, :place, due_at, 'due', case when due_at <= now() then 'met' else 'waiting' end"
    " from (select coalesce(:at, now() + make_interval(secs => :delay_s)) as due_at) as given"
)


def named(session: Session, tenant: str, reference: str) -> str | None:
    """Returns the tenant's workload with this id, else the tenant's newest with this name, or None."""
    found: str | None = session.scalar(_NAMED, {"tenant": tenant, "given": reference})
    return found


def add_dependencies(session: Session, workload: str, spec: WorkloadSpec) -> Reason | None:
    """Inserts the dependencies of a workload that the transaction has inserted, and decides those it can.

    Predecessors and tables are locked until the end of the transaction, so that no change of them is missed. Returns
    why the workload does not enter the queue yet; None: it does.

    Raises:
        LookupError: the record of a predecessor was deleted since the document was checked.
    """
    wanted = {one.id for one in spec.after if one.id is not None}
    if gone := wanted - _locked(session, Workload.id, wanted):
        raise LookupError(f"the records of {', '.join(sorted(gone))} were deleted")
    _locked(session, Table.name, {one.table for one in spec.after if one.table is not None})
    for place, one in enumerate(spec.after):
        at = {"workload": workload, "place": place}
        if one.id is not None:
            add = _ADD_EACH if one.same_index else _ADD
            session.execute(add, at | {"predecessor": one.id, "condition": one.condition})
        else:
            session.execute(_ADD_PARTITION, at | {"table": one.table, "partition": one.partition})
    if spec.not_before is not None or spec.delay_s is not None:
        at = {"workload": workload, "place": len(spec.after)}
        session.execute(_ADD_TIME, at | {"at": spec.not_before, "delay_s": spec.delay_s})
    return next(filter(None, (one.reason() for one in dependencies_of(session, [workload])[workload])), None)


def waive(session: Session, workload: str) -> bool:
    """Waives dependencies of a workload, or of its elements, that can never hold; returns whether there were any."""
    own = Dependency.workload == workload
    whole = update(Dependency).where(own, Dependency.state == "never").values(state="waived")
    each = update(Dependency).where(own, func.isempty(Dependency.never).is_(False)).values(never=text("'{}'"))
    given_up = [session.execute(one.returning(Dependency.place)).first() for one in (whole, each)]
    return any(given_up)


_OF_ELEMENT = text(
    "select d.predecessor || '-' || :index, d.predecessor_name || '/' || :index, d.condition,"
    " coalesce(e.phase, case when d.never @> :position then 'cancelled' else 'pending' end), d.never @> :position"
    " from dependency as d left join workload as e on e.id = d.predecessor || '-' || :index"
    " where d.workload = :array and d.state = 'each' and d.open + d.never @> :position"
    " order by d.never @> :position desc, d.place limit 1"
).bindparams(bindparam("index", type_=Text), bindparam("position", type_=Integer))
_OF_ELEMENTS = text(
    "select d.workload, d.predecessor, d.predecessor_name, d.condition,"
    " multirange_size((d.open + d.never) * a.waiting)"
    " from dependency as d join workload_array as a on a.id = d.workload"
    " where d.workload = any(:ids) and d.state = 'each' and d.open + d.never && a.waiting order by d.workload, d.place"
)


def why_element_blocked(session: Session, array: str, index: int, position: int, *, kept: bool) -> Reason | None:
    """Returns which element of another array an element without a row waits for; None: it waits for none."""
    values = {"array": array, "index": str(index), "position": position}
    row = session.execute(_OF_ELEMENT, values).one_or_none()
    if row is None:
        return None
    *shown, is_never = row
    detail = dict(zip(("workload", "name", "condition", "phase"), shown, strict=True))
    if not is_never:
        return Reason(ReasonCode.DEPENDENCY, detail)
    return Reason(ReasonCode.DEPENDENCY_NEVER, detail | ({"kept": True} if kept else {}))


def why_elements_blocked(session: Session, arrays: Collection[str]) -> dict[str, list[Reason]]:
    """Returns, by array id, which elements of other arrays the array's waiting elements wait for."""
    found: dict[str, list[Reason]] = {}
    for id_, *shown in session.execute(_OF_ELEMENTS, {"ids": list(arrays)}) if arrays else ():
        detail = dict(zip(("workload", "name", "condition", "elements"), shown, strict=True))
        found.setdefault(id_, []).append(Reason(ReasonCode.ELEMENT_DEPENDENCY, detail))
    return found


def _locked(session: Session, key: InstrumentedAttribute[str], wanted: Collection[str]) -> set[str]:
    """Locks the rows with these keys against changes, and returns the keys of the rows that exist."""
    rows = select(key).where(key.in_(wanted)).order_by(key).with_for_update(read=True)
    return set(session.scalars(rows)) if wanted else set()


class DecidedDependency(NamedTuple):
    """A dependency with the predecessor's phase: the current phase, or the phase that decided it."""

    row: Dependency
    phase: str | None

    def reason(self, *, kept: bool = False) -> Reason | None:
        """Returns why this condition keeps the workload out of the queue; None: it holds, or concerns only elements.

        `kept`: the workload stays blocked until a user waives dependencies that can never hold.
        """
        row = self.row
        if row.state in ("met", "waived", "each"):
            return None
        if row.due_at is not None:
            return Reason(ReasonCode.NOT_BEFORE, {"at": in_words(row.due_at.timestamp())})
        if row.predecessor is None:
            return Reason(ReasonCode.PARTITION_MISSING, {"table": row.data_table, "partition": row.partition})
        detail: dict[str, Any] = {"workload": row.predecessor, "name": row.predecessor_name}
        detail |= {"condition": row.condition, "phase": self.phase}
        if row.state == "waiting":
            return Reason(ReasonCode.DEPENDENCY, detail)
        return Reason(ReasonCode.DEPENDENCY_NEVER, detail | ({"kept": True} if kept else {}))


def dependencies_of(session: Session, workloads: Collection[str]) -> dict[str, list[DecidedDependency]]:
    """Returns the dependencies of workloads that have some, by id; those that can never hold come first."""
    if not workloads:
        return {}
    shown = case((and_(Workload.phase == Phase.PENDING, begun()), Phase.RUNNING.value), else_=Workload.phase)
    rows = session.execute(
        select(Dependency, func.coalesce(Dependency.outcome, shown))
        .outerjoin(Workload, Workload.id == Dependency.predecessor)
        .where(Dependency.workload.in_(workloads))
        .order_by(Dependency.workload, Dependency.state != "never", Dependency.place)
    )
    found: dict[str, list[DecidedDependency]] = {}
    for row, phase in rows:
        found.setdefault(row.workload, []).append(DecidedDependency(row, phase))
    return found
