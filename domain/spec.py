"""A workload's specification after validation: what the database keeps and the launch reads.

The user's document (YAML or JSON, `api.documents`) is checked and normalised into this once, at submission. Units are
in the names. Nothing here looks into a command.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

from domain.capacity import USUAL, CapacityKind
from domain.scheduling import JobRequest


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ResourceSpec(_Frozen):
    """Resources of one task."""

    gpus: int = 0
    gpu_types: tuple[str, ...] = ()
    """In order of preference; empty where `gpus` is 0."""
    cpus_milli: int = 1000
    memory_bytes: int = 1 << 30


class JobSpec(_Frozen):
    """`tasks` identical tasks with a role."""

    name: str
    role: str
    tasks: int
    span_clusters: bool = False
    """Its tasks may run in several clusters of a region, where no single one can take them all as things are."""
    resources: ResourceSpec
    argv: tuple[str, ...] = ()
    """Empty where `script` is set."""
    script: str | None = None
    """Run with `/bin/sh -eu` where set."""
    env: dict[str, str] = Field(default_factory=dict)
    secrets: dict[str, str] = Field(default_factory=dict)
    """Environment variable to name of a secret of the tenant."""

    def request(self, capacity: tuple[str, ...] = USUAL) -> JobRequest:
        """What the schedulers see of it. `capacity` as `WorkloadSpec.capacity`."""
        return JobRequest(
            name=self.name,
            tasks=self.tasks,
            gpus_per_task=self.resources.gpus,
            gpu_types=self.resources.gpu_types,
            cpus_milli_per_task=self.resources.cpus_milli,
            memory_bytes_per_task=self.resources.memory_bytes,
            span_clusters=self.span_clusters,
            capacity=capacity,
        )


class CheckpointSpec(_Frozen):
    """Checkpoint settings. A workload without checkpoints starts anew at each attempt."""

    interval_s: float | None = None
    """None: each task finds its own, by what a save costs and how often it is interrupted."""
    grace_s: float = 120.0
    """Time between the notice (SIGTERM) and SIGKILL."""
    keep: int = 2


class LimitsSpec(_Frozen):
    """Limits after which mizzen acts on a workload by itself. None: no limit."""

    max_runtime_s: float | None = None
    """Seconds of running, all attempts together."""
    max_silence_s: float | None = None
    """Seconds without progress, log output or checkpoint before a gang counts as hung."""
    max_pending_s: float | None = None
    """Seconds in the queue, since it was submitted or came back, after which it fails."""
    retries: int = 0
    """Retries of the user's own failures; preemptions and machine losses never count."""


class WorkloadSpec(_Frozen):
    """A whole workload: a gang that gets all its resources together, in one region, or none."""

    version: int = 1
    name: str
    tenant: str
    labels: dict[str, str] = Field(default_factory=dict)
    recurring: str | None = None
    level: int | None = None
    """A priority level below its tenant's; None: the tenant's."""
    jobs: tuple[JobSpec, ...]
    tables: tuple[str, ...] = ()
    files: dict[str, str] = Field(default_factory=dict)
    """Relative path to text, put into each task's working directory."""
    workdir: str | None = None
    """SHA-256 (hex) of an uploaded tar.gz archive, unpacked into each task's working directory before `files`."""
    checkpoint: CheckpointSpec = CheckpointSpec()
    limits: LimitsSpec = LimitsSpec()
    regions_allowed: tuple[str, ...] | None = None
    """None: all."""
    regions_excluded: tuple[str, ...] = ()
    capacity: tuple[CapacityKind, ...] | None = None
    """Kinds of capacity on which it may run, in order of preference; None: `domain.capacity.USUAL`."""

    @model_serializer(mode="wrap")
    def _as_before(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without a word of capacity where the document has none: so versions of before it read it as well."""
        body: dict[str, Any] = handler(self)
        if self.capacity is None:
            body.pop("capacity", None)
        return body

    def requests(self) -> tuple[JobRequest, ...]:
        """The jobs as the schedulers see them."""
        return tuple(job.request(self.kinds) for job in self.jobs)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of capacity on which it may run."""
        return USUAL if self.capacity is None else tuple(kind.value for kind in self.capacity)

    def allows_region(self, region: str) -> bool:
        """Whether the user lets it run in `region`."""
        return region not in self.regions_excluded and (self.regions_allowed is None or region in self.regions_allowed)
