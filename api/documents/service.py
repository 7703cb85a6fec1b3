"""Reads and validates a whole service document, in mizzen's own form or in that of SkyPilot's service files."""

from dataclasses import dataclass, field
from typing import Any

from api.documents.at import At
from api.documents.loading import Value
from api.problems import FieldError
from domain.service import ResourceOption, ServiceSpec


@dataclass(frozen=True)
class ServiceDraft:
    """The valid fields of a service document, its errors, and the positions of values that must be checked further."""

    problems: list[FieldError]
    tenant: str | None
    tenant_at: At
    priority_at: At | None
    secrets_at: list[tuple[At, str]]
    types_at: list[tuple[At, str]]
    workdir_at: At | None
    workdir: str | None
    options: list[ResourceOption]
    fields: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    """One sentence for each field that is accepted but has no effect."""

    def spec(self) -> ServiceSpec:
        """Returns the specification. Call it only if the document has no errors."""
        return ServiceSpec(options=tuple(self.options), **self.fields)


def read_service(value: Value, default_tenant: str | None, default_name: str | None = None) -> ServiceDraft:
    """Reads the document `value`.

    Args:
        value: the parsed document.
        default_tenant: the tenant of the caller's key, which is used if the document names no tenant.
        default_name: the name of the service if the document has none; SkyPilot's files often have none.
    """
    raise NotImplementedError
