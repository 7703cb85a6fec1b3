"""Models of tenants, and of their API keys, secrets and uploaded archives."""

from datetime import datetime

from sqlalchemy import CheckConstraint, ColumnElement, ForeignKey, Identity, UniqueConstraint, func, or_, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from infra.db.base import NOW, Base, Json


class Tenant(Base):
    """A team with a priority level and a quota (MAST 4.2)."""

    __tablename__ = "tenant"
    name: Mapped[str] = mapped_column(primary_key=True)
    level: Mapped[int] = mapped_column(CheckConstraint("level between 1 and 7", name="tenant_level"))
    quota_gpus: Mapped[Json] = mapped_column(server_default=text("'{}'"))
    quota_cpus_milli: Mapped[int | None]
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    isolation: Mapped[str | None] = mapped_column(
        CheckConstraint("isolation in ('none', 'user', 'sandbox')", name="tenant_isolation")
    )
    """The weakest mode of isolation of machines that run the tenant's tasks (`domain.isolation`); None: any."""
    number: Mapped[int] = mapped_column(Identity(always=True))
    """Unique number, never reused. Agents that run as root derive the user id of the tenant's tasks from it."""
    __table_args__ = (UniqueConstraint("number", name="tenant_number"),)


class ApiKey(Base):
    """An API key, stored as its SHA-256, with a role.

    A submitter's key has a tenant, a machine's key has a machine. Keys of viewers and balancers may have a tenant.
    """

    __tablename__ = "api_key"
    id: Mapped[str] = mapped_column(primary_key=True)
    sha256: Mapped[str] = mapped_column(unique=True)
    role: Mapped[str] = mapped_column(
        CheckConstraint("role in ('viewer', 'submitter', 'operator', 'machine', 'balancer')", name="api_key_role")
    )
    tenant: Mapped[str | None] = mapped_column(ForeignKey("tenant.name"))
    machine: Mapped[str | None]
    """Id of the only machine whose agent may use the key. The machine need not have registered yet."""
    label: Mapped[str] = mapped_column(server_default="")
    person: Mapped[str | None]
    """Who uses the key. Keys with the same person count as one among the people of a tenant."""
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    revoked_at: Mapped[datetime | None]
    expires_at: Mapped[datetime | None]
    """Time from which the key is refused; None if it never expires."""
    __table_args__ = (
        CheckConstraint(
            "tenant is not null or role in ('operator', 'viewer', 'machine', 'balancer')", name="api_key_tenant"
        ),
        CheckConstraint(
            "case role when 'machine' then machine is not null and tenant is null else machine is null end",
            name="api_key_machine",
        ),
    )

    @classmethod
    def is_good(cls) -> ColumnElement[bool]:
        """Returns the query condition that the key is neither revoked nor expired."""
        return cls.revoked_at.is_(None) & or_(cls.expires_at.is_(None), cls.expires_at > func.now())


class Secret(Base):
    """A tenant's secret, encrypted with the master key.

    It leaves the database only encrypted for a machine's key, except for the certificate of a service, which the API
    decrypts for balancers.
    """

    __tablename__ = "secret"
    tenant: Mapped[str] = mapped_column(ForeignKey("tenant.name"), primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    box: Mapped[bytes]
    service: Mapped[str | None] = mapped_column(ForeignKey("service.id"))
    """The service whose document contains the value. The secret is deleted when it ends. None: not from a document."""
    updated_at: Mapped[datetime] = mapped_column(server_default=NOW)


class Archive(Base):
    """An uploaded working directory (tar.gz), identified by its SHA-256."""

    __tablename__ = "archive"
    tenant: Mapped[str] = mapped_column(ForeignKey("tenant.name"), primary_key=True)
    sha256: Mapped[str] = mapped_column(primary_key=True)
    body: Mapped[bytes]
    """The archive; empty if it is the sequence of `parts`."""
    parts: Mapped[list[str] | None] = mapped_column(JSONB(none_as_null=True))
    """The SHA-256 of each part (`ArchivePart`), in order; None: the archive is in `body`."""
    paths: Mapped[bytes]
    """The paths in the archive (`infra.archives.ArchiveTree.dump`)."""
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)


class ArchivePart(Base):
    """A part of uploaded working directories, which several archives of the tenant may share."""

    __tablename__ = "archive_part"
    tenant: Mapped[str] = mapped_column(ForeignKey("tenant.name"), primary_key=True)
    sha256: Mapped[str] = mapped_column(primary_key=True)
    body: Mapped[bytes]
    used_at: Mapped[datetime] = mapped_column(server_default=NOW)
    """When an upload last sent this part, or found that it exists."""
