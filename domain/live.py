"""A snapshot of the live fleet, its tenants and its workloads: what the API exports and the simulator starts from."""

from datetime import datetime

from pydantic import BaseModel, ConfigDict, Field

from domain.capacity import CapacityKind
from domain.scheduling import Holding, JobRequest


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class LiveMachine(_Part):
    """A machine on which work may be placed now."""

    id: str
    region: str
    cluster: str
    rack: str
    gpu_type: str | None
    gpus: int = Field(ge=0)
    cpus_milli: int = Field(ge=0)
    memory_bytes: int = Field(ge=0)
    capacity: CapacityKind = CapacityKind.RESERVED
    gpu_usd_per_h: float = Field(0.0, ge=0)
    core_usd_per_h: float = Field(0.0, ge=0)


class LiveTenant(_Part):
    """A tenant."""

    name: str
    level: int = Field(ge=1, le=7)
    quota_gpus: dict[str, int]
    quota_cpus_milli: int | None
    """Null: no limit."""


class LivePlacement(_Part):
    """Where a workload is placed."""

    region: str
    awarded_at: datetime
    started_at: datetime | None
    """When its tasks ran; null: they do not yet."""
    gpus: dict[str, int]
    """GPU type to slots."""
    holdings: tuple[Holding, ...]
    """What it holds, or was promised."""


class LiveWorkload(_Part):
    """A workload that has not ended. Null `placement`: it is queued, or on its way back to the queue."""

    id: str
    tenant: str
    submitted_at: datetime
    level: int | None = Field(None, ge=1, le=7)
    """The level that it requests, lower than its tenant's."""
    held: bool
    jobs: tuple[JobRequest, ...] = Field(min_length=1)
    regions: tuple[str, ...] | None
    """Where it may run, by what its user allows and its data; null: anywhere."""
    ran_s: float = Field(ge=0)
    """Seconds that it ran so far, all attempts together."""
    max_runtime_s: float | None
    placement: LivePlacement | None


class LiveSnapshot(_Part):
    """All of it, at one moment."""

    version: int = Field(1, ge=1, le=1)
    taken_at: datetime
    machines: tuple[LiveMachine, ...]
    tenants: tuple[LiveTenant, ...]
    workloads: tuple[LiveWorkload, ...]
