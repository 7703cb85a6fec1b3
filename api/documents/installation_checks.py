"""Checks a document against the existing tenants, tables, regions, machines, secrets and archives."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from urllib.parse import urlsplit

from sqlalchemy import func, or_, select
from sqlalchemy.orm import Session

from api.data.archives import check_files
from api.documents.after import ON_ARRAY, SAME_INDEX
from api.documents.feasibility import EqualMachines
from api.documents.position import At, listed
from api.documents.service import ServiceDraft
from api.documents.workload import Draft, WorkloadDraft
from api.problems import nearest
from domain.addresses import is_ip
from domain.array_elements import indexes, shown_indexes
from domain.capacity import OWN
from domain.egress import refusal
from domain.notify_spec import NotifySpec
from domain.priority import LOWEST_LEVEL
from domain.spec import ArraySpec, ResourceSpec
from infra.archives import BadArchive
from infra.config.notify import NotifySettings
from infra.db.array_rows import WorkloadArray
from infra.db.capacity import PoolRow
from infra.db.dependencies import named
from infra.db.models import Cluster, Machine, Region
from infra.db.tables import Table
from infra.db.tenants import Archive, Secret, Tenant
from services.workloads import SHARED

_MADE_BY = {
    "tenant": "tenants set NAME --level 3",
    "table": "tables add NAME --home-region REGION",
    "region": "regions set NAME",
    "secret": "tenants secrets set TENANT NAME",
}
"""The command that creates an object of a kind."""
_MOST_RANGES = 1000
"""Of arrays whose elements wait for each other: Postgres compares each range with each element."""
_SHOWN = 20
"""Of the ranges of an array's indexes, how many an error shows."""
_GONE_AFTER = timedelta(days=1)
"""A machine that has been lost for longer than this is ignored."""
_COUNTED = or_(Machine.state != "lost", Machine.lost_at > func.now() - _GONE_AFTER)
_KIND = (Machine.region, Machine.cluster, Machine.gpu_type, Machine.gpus, Machine.cpus_milli, Machine.memory_bytes)
_FLEET = (
    select(*_KIND, func.count(), Cluster.capacity)
    .join(Cluster, (Cluster.region == Machine.region) & (Cluster.name == Machine.cluster))
    .where(_COUNTED, Cluster.service.is_(None), Cluster.tenant.is_(None))
    .group_by(*_KIND, Cluster.capacity)
)


@dataclass(frozen=True)
class FleetShape:
    """The resources of one type of machine in the fleet."""

    gpu_type: str | None
    gpus: int
    cpus_milli: int
    memory_bytes: int

    def holds(self, task: ResourceSpec) -> bool:
        """Returns whether a task fits on an empty machine of this shape."""
        return task.fits(
            gpu_type=self.gpu_type, gpus=self.gpus, cpus_milli=self.cpus_milli, memory_bytes=self.memory_bytes
        )

    def __str__(self) -> str:
        gpus = f"{self.gpus} {self.gpu_type}, " if self.gpus else ""
        return f"{gpus}{self.cpus_milli / 1000:g} CPUs and {_in_words(self.memory_bytes)} of memory"


def fleet(session: Session) -> list[EqualMachines]:
    """Returns the machines against which submissions are checked, with equal machines of a cluster grouped.

    Machines reserved for services or for one tenant are left out, because no other workload runs there.
    """
    return [EqualMachines(*row) for row in session.execute(_FLEET)]


def check(session: Session, draft: WorkloadDraft, own_tenant: str | None, machines: Iterable[EqualMachines]) -> None:
    """Checks the document against the database and the machines of the `fleet`, and adds all errors to the draft.

    `own_tenant` is the tenant of the caller's key; None: the key may submit for any tenant.
    """
    tenant = _check_tenant(session, draft, own_tenant)
    _check_names(draft.at, "table", _names(session, Table, draft.at.named("table")))
    _check_regions(session, draft)
    _check_machines(draft, {FleetShape(m.gpu_type, m.gpus, m.cpus_milli, m.memory_bytes) for m in machines})
    if tenant is not None:
        _check_priority(draft, tenant)
        _check_secrets(session, draft, tenant)
        _check_archive(session, draft, tenant)
        _find_predecessors(session, draft, tenant)


def check_keep(draft: WorkloadDraft, at_most_s: float) -> None:
    """Adds an error if the document keeps working directories for longer than the operator's limit, in seconds."""
    if draft.fields.get("keep_s", 0.0) > at_most_s:
        draft.at.get("keep").wrong(f"must be at most {at_most_s / 86400:g}d, the setting tasks.keep_at_most_s")


def check_receivers(draft: Draft, settings: NotifySettings) -> None:
    """Adds an error for each receiver of notifications to which the operator's settings send nothing.

    The address of a host name may change, so it is checked at each delivery.
    """
    for place, url in draft.at.named("webhook"):
        parts = urlsplit(url)
        host = parts.hostname or ""
        if parts.scheme == "http" and not settings.allow:
            place.wrong("must be https; an operator can allow networks for http with notify.allow")
        elif is_ip(host) and (why := refusal(parts.scheme, host, settings.networks)) is not None:
            place.wrong(f"cannot be used: {why}; an operator can allow it with notify.allow")
    for place, address in draft.at.named("email"):
        if settings.smtp is not None and not settings.smtp.takes(address):
            place.wrong(f"must be in one of the domains {listed(settings.smtp.domains)}")


def notes_on_receivers(receivers: Iterable[NotifySpec], settings: NotifySettings) -> list[str]:
    """Returns sentences about receivers that get no messages. They are no errors, so that documents stay portable."""
    addresses = [one.email for one in receivers if one.email is not None]
    if settings.smtp is not None or not addresses:
        return []
    return [f"notify: e-mail to {', '.join(addresses)} is not sent: an operator has to set notify.smtp"]


def check_service(
    session: Session, draft: ServiceDraft, own_tenant: str | None, machines: Iterable[EqualMachines]
) -> None:
    """Checks a service document against the database, and adds all errors to the draft.

    GPU types get the spelling of the `machines`. Types and places of machines are checked only if the replicas can run
    on no other machines: providers may launch some that the database does not list.

    Args:
        session: a session of the transaction that stores the service.
        draft: the document.
        own_tenant: the tenant of the caller's key; None: the key may submit for any tenant.
        machines: the `fleet`.
    """
    tenant = _check_tenant(session, draft, own_tenant)
    machines = list(machines)
    draft.spell({machine.gpu_type for machine in machines if machine.gpu_type is not None})
    _check_shared(session, draft, machines)
    if tenant is not None:
        _check_priority(draft, tenant)
        _check_secrets(session, draft, tenant)
        _check_archive(session, draft, tenant)


def _check_tenant(session: Session, draft: Draft, own_tenant: str | None) -> Tenant | None:
    if draft.tenant is None:
        return None
    if own_tenant is not None and draft.tenant != own_tenant:
        # The message is the same for existing and unknown tenants.
        draft.at.get("tenant").wrong(f"this API key may only submit for tenant {own_tenant}")
        return None
    tenant = session.get(Tenant, draft.tenant)
    if tenant is None:
        _unknown(draft.at.get("tenant"), "tenant", draft.tenant, session.scalars(select(Tenant.name)).all())
    return tenant


def _names(session: Session, kind: type[Table] | type[Region], asked: Collection[object]) -> Collection[str]:
    return session.scalars(select(kind.name)).all() if asked else ()


def _check_names(document: At, kind: str, known: Collection[str], whose: str = "") -> None:
    for place, name in document.named(kind):
        if name not in known:
            _unknown(place, kind + whose, name, known)


def _unknown(at: At, what: str, name: str, known: Iterable[str]) -> None:
    names = list(known)
    meant = nearest(name, names)
    hint = f"; did you mean {meant}?" if meant else f"; existing: {listed(names)}"
    if not names:
        hint = f"; none exists: `mizzen {_MADE_BY[what.partition(' ')[0]]}` creates one"
    at.wrong(f"unknown {what}{hint}", meant)


def _check_regions(session: Session, draft: WorkloadDraft) -> None:
    given = draft.at.named("region")
    known = _names(session, Region, given)
    _check_names(draft.at, "region", known)
    excluded = set(draft.fields.get("regions_excluded", ()))
    allowed = draft.fields.get("regions_allowed")
    left = set(known if allowed is None else allowed) - excluded
    if excluded and not left and all(name in known for _, name in given):
        place, _ = given[-1]
        place.wrong("no region is left: all allowed regions are excluded")


def _check_machines(draft: WorkloadDraft, shapes: Collection[FleetShape]) -> None:
    if not shapes or OWN in draft.fields.get("capacity", ()):
        return  # No machine has registered yet, so nothing can be ruled out; or the tenant brings machines.
    types = {shape.gpu_type for shape in shapes if shape.gpu_type is not None and shape.gpus}
    for place, name in draft.at.named("GPU type"):
        if name not in types:
            meant = nearest(name, types)
            hint = f"did you mean {meant}?" if meant else f"there are {listed(types)}" if types else "there are no GPUs"
            place.wrong(f"no machine has GPUs of type {name}; {hint}", meant)
    for at, job in draft.jobs:
        task = job.get("resources")
        if task is None and at.get("resources").value is not None:
            continue  # Invalid accelerators.
        task = task or ResourceSpec()
        if not types.issuperset(task.gpu_types) or any(shape.holds(task) for shape in shapes):
            continue
        of_type = [s for s in shapes if task.gpus == 0 or s.gpu_type in task.gpu_types] or list(shapes)
        largest = max(of_type, key=partial(_size, task.gpus > 0))
        asked = FleetShape("/".join(task.gpu_types), task.gpus, task.cpus_milli, task.memory_bytes)
        where = at.get("resources") if "resources" in job else at
        where.wrong(f"no machine can hold a task with {asked}; the largest has {largest}")


def _check_shared(session: Session, draft: ServiceDraft, machines: Sequence[EqualMachines]) -> None:
    """Checks that a machine can hold a replica on shared machines, unless a pool can launch further machines."""
    shared = [one for one in draft.options if not one.spot and one.provider is None and one.zone is None]
    shapes = {
        (m.region, FleetShape(m.gpu_type, m.gpus, m.cpus_milli, m.memory_bytes))
        for m in machines
        if m.capacity in SHARED
    }
    has_pools = session.scalar(select(PoolRow.name).limit(1)) is not None
    if not shapes or not shared or len(shared) < len(draft.options) or has_pools:
        return
    if any(o.region in (None, region) and shape.holds(o.resources) for o in shared for region, shape in shapes):
        return
    kinds = listed(sorted({f"{shape} in {region}" for region, shape in shapes}))
    draft.at.get("resources").wrong(f"no machine can hold a replica; there are machines with {kinds}")


def _size(by_gpus: bool, shape: FleetShape) -> tuple[object, ...]:
    return (shape.gpus if by_gpus else 0, shape.cpus_milli, shape.memory_bytes, shape.gpus, shape.gpu_type or "")


def _check_priority(draft: Draft, tenant: Tenant) -> None:
    level = draft.fields.get("level")
    if level is not None and level < tenant.level:
        draft.at.get("priority").wrong(
            f"must not raise the priority: tenant {tenant.name} has level {tenant.level}, so use a level from "
            f"{tenant.level} to {LOWEST_LEVEL}, or omit it"
        )


def _check_secrets(session: Session, draft: Draft, tenant: Tenant) -> None:
    if draft.at.named("secret"):
        known = session.scalars(select(Secret.name).where(Secret.tenant == tenant.name)).all()
        _check_names(draft.at, "secret", known, f" of tenant {tenant.name}")


def _find_predecessors(session: Session, draft: WorkloadDraft, tenant: Tenant) -> None:
    """Adds to the draft the ids of the workloads on which it depends. These exist already, so there are no cycles."""
    found: dict[str, str | None] = {}
    for place, reference in draft.at.named("workload"):
        found[reference] = named(session, tenant.name, reference)
        if found[reference] is None:
            # The message is the same for workloads of other tenants.
            place.wrong(f"tenant {tenant.name} has no workload with the name or id {reference}; submit it first")
    if found:
        after = draft.fields.get("after", ())
        draft.fields["after"] = tuple(one.model_copy(update={"id": found.get(one.workload)}) for one in after)
    for place, reference in draft.at.named(SAME_INDEX):
        if (workload := found[reference]) is not None:
            _check_indexes(session, draft, place, reference, workload)


def _check_indexes(session: Session, draft: WorkloadDraft, place: At, reference: str, workload: str) -> None:
    """Checks that a referenced workload is an array with all indexes of the document's array."""
    array: ArraySpec | None = draft.fields.get("array")
    body = session.scalar(select(WorkloadArray.ranges).where(WorkloadArray.id == workload))
    if body is None:
        place.wrong(f"workload {reference} is not an array", rule=ON_ARRAY)
    elif array is not None:
        ranges = tuple((first, last, step) for first, last, step in body)
        if len(ranges) > _MOST_RANGES or len(array.ranges) > _MOST_RANGES:
            most = f"the indexes of both arrays may have at most {_MOST_RANGES} ranges and numbers"
            place.wrong(f"{most}, these have {len(array.ranges)} and {len(ranges)}", rule=ON_ARRAY)
            return
        theirs = set(indexes(ranges))
        missing = next((index for index in indexes(array.ranges) if index not in theirs), None)
        if missing is not None:
            shown = shown_indexes(ranges[:_SHOWN]) + (" and others" if len(ranges) > _SHOWN else "")
            place.wrong(f"array {reference} has no index {missing}; it has {shown}", rule=ON_ARRAY)


def _check_archive(session: Session, draft: Draft, tenant: Tenant) -> None:
    digest, at = draft.fields.get("workdir"), draft.at.get("workdir")
    if digest is None:
        return
    key = (Archive.tenant == tenant.name, Archive.sha256 == digest)
    # The row lock prevents the expiry of the archive until the workload that refers to it is inserted.
    if session.scalar(select(Archive.sha256).where(*key).with_for_update(read=True, key_share=True)) is None:
        at.wrong(f"no archive of tenant {tenant.name} with this checksum; upload it with PUT /v1/archives/{digest}")
    elif files := draft.fields.get("files"):
        try:
            check_files(session, tenant.name, digest, files)
        except BadArchive as error:
            at.wrong(f"file {error.member!r}: {error}")


def _in_words(size_bytes: int) -> str:
    for unit, power in (("TiB", 40), ("GiB", 30), ("MiB", 20)):
        if size_bytes >= 1 << power:
            return f"{round(size_bytes / (1 << power), 2):g} {unit}"
    return f"{size_bytes} bytes"
