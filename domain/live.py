"""A snapshot of the live fleet, its tenants and its workloads. The API exports it; the simulator can start from it."""

from datetime import datetime

from pydantic import BaseModel, ConfigDict, Field

from domain.capacity import CapacityKind
from domain.scheduling import Holding, JobRequest


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class LiveMachine(_Part):
    """A machine on which workloads can be placed now."""

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
    departures_per_h: float = Field(0.0, ge=0)


class LiveTenant(_Part):
    """A tenant, with its level and quotas."""

    name: str
    level: int = Field(ge=1, le=7)
    quota_gpus: dict[str, int]
    quota_cpus_milli: int | None
    """Null: no limit."""


class LivePlacement(_Part):
    """The placement of a workload that is not queued."""

    region: str
    awarded_at: datetime
    started_at: datetime | None
    """When its tasks started; null: they have not started yet."""
    gpus: dict[str, int]
    """GPU type to slots."""
    holdings: tuple[Holding, ...]
    """Resources that the workload holds, or that are promised to it when its victims leave."""


class LiveWorkload(_Part):
    """A workload that has not ended. Null `placement`: the workload is queued, or is returning to the queue."""

    id: str
    tenant: str
    submitted_at: datetime
    paused_s: float = Field(0.0, ge=0)
    """Seconds on hold, which do not count as waiting."""
    level: int | None = Field(None, ge=1, le=7)
    """The level that the workload requested, with lower priority than its tenant's."""
    submitted_by: str = ""
    """The person who submitted it."""
    held: bool
    jobs: tuple[JobRequest, ...] = Field(min_length=1)
    regions: tuple[str, ...] | None
    """Regions in which the workload may run, by the user's choice and the location of its data; null: all."""
    ran_s: float = Field(ge=0)
    """Seconds of running so far, summed over all attempts."""
    max_runtime_s: float | None
    placement: LivePlacement | None


class LiveSnapshot(_Part):
    """A consistent snapshot of all machines, tenants and workloads."""

    version: int = Field(1, ge=1, le=1)
    taken_at: datetime
    machines: tuple[LiveMachine, ...]
    tenants: tuple[LiveTenant, ...]
    workloads: tuple[LiveWorkload, ...]
