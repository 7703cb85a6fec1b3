"""Services: their versions, their replicas, and the requests that their balancers counted.

A replica is a workload of one gang (`service_replica.workload`). The state of the decisions about replicas is stored in
the row of the service, in the transaction that writes the effects of a decision.
"""

from datetime import datetime
from typing import Any

from sqlalchemy import CheckConstraint, ForeignKey, ForeignKeyConstraint, Index, select, text, update
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, Session, mapped_column

from domain.capacity import CapacityKind
from domain.phases import QUEUED_PHASES
from domain.service import ServiceSpec, UpdateMode
from infra.db.base import NOW, Base, Json
from infra.db.models import Workload

_KINDS = f"kind in ({', '.join(repr(kind.value) for kind in CapacityKind)})"
_MODES = f"mode in ({', '.join(repr(mode.value) for mode in UpdateMode)})"


class ServiceRow(Base):
    """A service. The row is kept as history after the service has ended."""

    __tablename__ = "service"
    id: Mapped[str] = mapped_column(primary_key=True)
    tenant: Mapped[str] = mapped_column(ForeignKey("tenant.name"))
    name: Mapped[str]
    version: Mapped[int] = mapped_column(server_default="1")
    """The newest version."""
    mode: Mapped[str] = mapped_column(server_default=UpdateMode.ROLLING.value)
    """How the replicas of older versions are replaced."""
    state: Mapped[Json | None] = mapped_column(JSONB(none_as_null=True))
    """The state of the decisions between rounds, a `services.values.ServiceState`; None before the first decision."""
    zones: Mapped[list[Any]] = mapped_column(JSONB, server_default=text("'[]'"))
    """The zones that the policy knows, each a `services.zones.ZoneOffer`."""
    target: Mapped[int] = mapped_column(server_default="0")
    """N_tar, the number of replicas that should be ready."""
    notes: Mapped[list[str]] = mapped_column(JSONB, server_default=text("'[]'"))
    """Why fewer replicas are launched than the target (`services.values.ServiceDecision.notes`)."""
    replicas: Mapped[int] = mapped_column(server_default="0")
    """The number of replicas launched so far, which is the number of the next one."""
    counted_until: Mapped[int] = mapped_column(server_default="0")
    """The requests up to this second since the epoch, inclusive, were part of a decision."""
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    created_by: Mapped[str] = mapped_column(server_default="")
    stopping_at: Mapped[datetime | None]
    """When its end was requested."""
    ended_at: Mapped[datetime | None]
    """When its last replica had ended."""
    __table_args__ = (
        CheckConstraint(_MODES, name="service_mode"),
        Index("service_name", "tenant", "name", unique=True, postgresql_where=text("ended_at is null")),
        Index("service_live", "id", postgresql_where=text("ended_at is null")),
    )


class ServiceVersion(Base):
    """A version of a service's specification."""

    __tablename__ = "service_version"
    service: Mapped[str] = mapped_column(ForeignKey("service.id", ondelete="CASCADE"), primary_key=True)
    version: Mapped[int] = mapped_column(primary_key=True)
    spec: Mapped[Json]
    """A `domain.service.ServiceSpec`."""
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    created_by: Mapped[str] = mapped_column(server_default="")
    idempotency_key: Mapped[str | None]
    """The Idempotency-Key of the request that made the version; unique for each `created_by`."""
    request_sha256: Mapped[str | None]
    """The digest of that request, which a repeated request must have, too."""
    __table_args__ = (
        Index(
            "service_version_key", "created_by", "idempotency_key", unique=True,
            postgresql_where=text("idempotency_key is not null"),
        ),
    )  # fmt: skip


class ServiceReplica(Base):
    """A replica of a service, from its launch. The row is kept as history after the replica has ended."""

    __tablename__ = "service_replica"
    service: Mapped[str] = mapped_column(ForeignKey("service.id", ondelete="CASCADE"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    version: Mapped[int]
    workload: Mapped[str] = mapped_column(unique=True)
    """Not a foreign key, because the row is kept after the workload is deleted."""
    kind: Mapped[str]
    """`spot` or `on_demand`, as the policy asked. A replica on shared machines is `on_demand`."""
    zone: Mapped[str | None]
    """The zone in which the policy placed it; None: any zone."""
    cluster: Mapped[str | None]
    """The cluster of the replica's own machines; None: it runs on shared machines."""
    usd_per_h: Mapped[float | None]
    """The price of the replica's own machines; None: it runs on shared machines."""
    is_base: Mapped[bool]
    """Whether it runs at the service's priority level, not at the lower one."""
    replaces: Mapped[int | None]
    """The replica of an older version that it succeeds."""
    launched_at: Mapped[datetime] = mapped_column(server_default=NOW)
    ready: Mapped[bool] = mapped_column(server_default=text("false"))
    """Whether its probe succeeds, as its agent last reported."""
    ready_changed_at: Mapped[datetime | None]
    """Since when the probe has succeeded or failed."""
    first_ready_at: Mapped[datetime | None]
    """When a decision first found it ready."""
    address: Mapped[str | None]
    port: Mapped[int | None]
    probe_error: Mapped[str | None]
    """The result of its last probe, if it failed."""
    load: Mapped[float | None]
    """The load that it reports (`domain.serving_spec.LOAD_HEADER`), as its agent last read it; None: none."""
    ejected_at: Mapped[datetime | None]
    """Since when balancers have sent it no requests, or few, because its answers fail; None: it gets requests."""
    ejected_why: Mapped[str | None]
    """Why balancers send it no requests, as they reported."""
    leaving_at: Mapped[datetime | None]
    """When a decision found that its machine is about to end."""
    idle_at: Mapped[datetime | None]
    """When its workload got the message that a drained replica has no requests in progress."""
    draining_at: Mapped[datetime | None]
    """Since when it is drained: it gets no new requests."""
    ending_at: Mapped[datetime | None]
    """When its end was requested."""
    cause: Mapped[str | None]
    """Why it is drained or ended, or how it was lost: an `EndCause` or a `LossKind` of `services.values`."""
    ended_at: Mapped[datetime | None]
    __table_args__ = (
        ForeignKeyConstraint(
            ["service", "version"], ["service_version.service", "service_version.version"], ondelete="CASCADE"
        ),
        CheckConstraint(_KINDS, name="service_replica_kind"),
        Index("service_replica_live", "service", "number", postgresql_where=text("ended_at is null")),
    )


def continue_replicas(session: Session, row: ServiceRow, spec: ServiceSpec) -> None:
    """Moves replicas of older versions to the newest version if they satisfy its specification.

    So an update replaces only the replicas that it changes, and a rollback keeps replicas that still run. If one of
    these versions was good, the newest one is, too. The caller holds the lock of the service's row and has written the
    newest version, whose specification is `spec`.
    """
    live = (ServiceReplica.service == row.id, ServiceReplica.ended_at.is_(None))
    versions = select(ServiceVersion).where(
        ServiceVersion.service == row.id, ServiceVersion.version.in_(select(ServiceReplica.version).where(*live))
    )
    specs = {one.version: ServiceSpec.model_validate(one.spec) for one in session.scalars(versions)}
    same = [version for version, other in specs.items() if spec.has_replicas_of(other)]
    # A replica that waits for machines keeps the spread rule that it was launched with.
    respread = [version for version in same if specs[version].spread != spec.spread]
    queued = select(Workload.id).where(Workload.phase.in_(sorted(QUEUED_PHASES)))
    waits = ServiceReplica.version.in_(respread) & ServiceReplica.workload.in_(queued)
    if row.state is not None and row.state.get("good_version") in same:
        row.state = {**row.state, "good_version": row.version}
    if same:
        kept = (ServiceReplica.draining_at.is_(None), ServiceReplica.ending_at.is_(None), ~waits)
        moved = update(ServiceReplica).where(*live, *kept, ServiceReplica.version.in_(same))
        session.execute(moved.values(version=row.version))


REQUESTS_WINDOW_S = 60
"""The time over which the rate of a service's requests is measured."""
REQUESTS_LATE_S = 3
"""Delay after which the counts of a second are used, so that the reports of all balancers have arrived."""


class ServiceRequests(Base):
    """How many requests one balancer of a service has counted in one second."""

    __tablename__ = "service_requests"
    service: Mapped[str] = mapped_column(ForeignKey("service.id", ondelete="CASCADE"), primary_key=True)
    second: Mapped[int] = mapped_column(primary_key=True)
    """Seconds since the epoch."""
    balancer: Mapped[str] = mapped_column(primary_key=True)
    requests: Mapped[int]
    """Requests that began in this second."""
    failed: Mapped[int]
    """Requests that ended in it with an error of the balancer or no answer."""
    cut: Mapped[int]
    """Answers that broke off in it."""
    p50_s: Mapped[float | None]
    """Median time until the last byte of the answer."""
    p99_s: Mapped[float | None]
    canary: Mapped[Json | None] = mapped_column(JSONB(none_as_null=True))
    """While a version is judged by its canary: the `version`, and the counts of a `services.values.CanaryAnswers`."""


class BalancerReport(Base):
    """The last report of one balancer of a service."""

    __tablename__ = "balancer_report"
    service: Mapped[str] = mapped_column(ForeignKey("service.id", ondelete="CASCADE"), primary_key=True)
    balancer: Mapped[str] = mapped_column(primary_key=True)
    reported_at: Mapped[datetime] = mapped_column(server_default=NOW)
    waiting: Mapped[int] = mapped_column(server_default="0")
    """The number of requests that wait because no replica is up."""
    replicas: Mapped[list[Any]] = mapped_column(JSONB, server_default=text("'[]'"))
    """For each replica an object with its number (`replica`), its requests in progress (`ongoing`), whether it
    gets no new ones because it is to end (`drained`), and, if the balancer ejects it, since how many seconds at
    `reported_at` (`ejected_s`) and `why`."""


REPORT_VALID_S = 25.0
"""Age at which a balancer's report is ignored. Balancers report at least every ten seconds."""
