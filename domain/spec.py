"""The validated specification of a workload, as the database stores it and the launch reads it.

`api.documents` validates the user's document (YAML or JSON) and normalises it into this form once, at submission. Names
end in their unit. Commands are not interpreted.
"""

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_serializer, field_validator

from domain.capacity import OWN, USUAL, CapacityKind, dedicated, own_of
from domain.isolation import Isolation
from domain.notify_spec import NotifySpec
from domain.scheduling import JobRequest
from domain.serving_spec import ServingSpec
from domain.spread import SpreadRule
from domain.topology import ANYWHERE, TopologyRule

MOUNTS = ".mounts"
"""Folder in an archive with the files that tasks see at absolute paths."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ResourceSpec(_Frozen):
    """Resources of one task."""

    gpus: int = 0
    gpu_types: tuple[str, ...] = ()
    """In order of preference; empty if `gpus` is 0."""
    cpus_milli: int = 1000
    memory_bytes: int = 1 << 30

    def fits(self, *, gpu_type: str | None, gpus: int, cpus_milli: int, memory_bytes: int) -> bool:
        """Returns whether one task fits on an empty machine with these GPUs, CPUs and memory."""
        return (
            (self.gpus == 0 or (gpu_type in self.gpu_types and gpus >= self.gpus))
            and cpus_milli >= self.cpus_milli
            and memory_bytes >= self.memory_bytes
        )


class MountSpec(_Frozen):
    """Files that a task finds at a path."""

    target: str
    """A path relative to the working directory, or an absolute path, which exists only in sandboxes and containers."""
    source: str | None = None
    """URL of an object, or of a folder of a bucket, which is copied before the setup script; None: the archive has the
    files."""

    @property
    def is_absolute(self) -> bool:
        """Whether the path is outside of the working directory."""
        return self.target.startswith("/")


class TaskSpec(_Frozen):
    """What each task of a job runs. Agents read these fields in the launch description."""

    argv: tuple[str, ...] = ()
    """Empty if `script` is set. If both are empty, the command of the image runs."""
    script: str | None = None
    """Script, run with the interpreter of its first line, or by bash with `-e`."""
    setup: str | None = None
    """Script that runs before the command, once on each machine (`agent.task_setup`), with the same user, in the same
    way."""
    env: dict[str, str] = Field(default_factory=dict)
    output: Literal["merged", "separate"] = "merged"
    """Whether stdout and stderr are one file, which keeps their order, or can be told apart."""
    image: str | None = None
    """Reference of a container image (`domain.images`) in which the tasks run; None: they use the machine's files."""
    mounts: tuple[MountSpec, ...] = ()
    """Files in addition to those of the archive."""

    def task_fields(self) -> dict[str, Any]:
        """Returns the fields of this class by name."""
        return {name: getattr(self, name) for name in TaskSpec.model_fields}


class JobSpec(TaskSpec):
    """A job: `tasks` identical tasks with a role, or more if it is elastic."""

    name: str
    role: str
    tasks: int
    most_tasks: int | None = None
    """Of an elastic job: an attempt has `tasks` to `most_tasks` tasks, as many as fit at its award; None: `tasks`."""
    span_clusters: bool = False
    """The tasks may span several clusters of a region if no single cluster can currently hold them all."""
    topology: TopologyRule | None = None
    """Which of the tasks stay together; None: all in one cluster, unless they may span several."""
    resources: ResourceSpec
    secrets: dict[str, str] = Field(default_factory=dict)
    """Environment variable to the name of one of the tenant's secrets."""
    restart: Literal["gang", "task"] = "gang"
    """What is started again after the failure of a task: the workload, or the task alone, on its machine."""
    image_pull_secret: str | None = None
    """Name of the tenant's secret with `USER:PASSWORD` for the registry of the image."""

    def request(self, capacity: tuple[str, ...] = USUAL) -> JobRequest:
        """Returns the scheduling request of this job. `capacity` is as in `WorkloadSpec.kinds`."""
        return JobRequest(
            name=self.name,
            tasks=self.tasks,
            gpus_per_task=self.resources.gpus,
            gpu_types=self.resources.gpu_types,
            cpus_milli_per_task=self.resources.cpus_milli,
            memory_bytes_per_task=self.resources.memory_bytes,
            span_clusters=self.span_clusters,
            topology=self.topology or ANYWHERE,
            most_tasks=self.most_tasks or 0,
            capacity=capacity,
        )


class CheckpointSpec(_Frozen):
    """Checkpoint settings. A workload without checkpoints starts from the beginning at each attempt."""

    interval_s: float | None = None
    """None: each task computes its own interval from the cost of a save and the frequency of interruptions."""
    grace_s: float = 120.0
    """Time between the notice (SIGTERM) and SIGKILL."""
    keep: int = 2
    max_failing_s: float | None = None
    """How long saves may fail in a row before the task ends; None: the SDK's default."""
    max_failures: int | None = None
    """How many saves in a row may fail before the task ends; None: not limited."""


class LimitsSpec(_Frozen):
    """Limits that mizzen enforces automatically. None: no limit."""

    max_runtime_s: float | None = None
    """Seconds of running, summed over all attempts."""
    max_silence_s: float | None = None
    """Seconds without progress, log output or checkpoint after which a gang counts as hung."""
    max_pending_s: float | None = None
    """Seconds in the queue, since the submission or the last return to the queue, after which the workload fails."""
    retries: int | None = 0
    """Number of retries after failures of the user's tasks; preemptions and machine losses do not count."""
    retries_by_exit: dict[str, int | None] = Field(default_factory=dict)
    """Number of retries by exit status, as a shell reports it (128 plus the number of the signal). Failures with these
    statuses do not count towards `retries`."""
    max_preemptions: int | None = None
    """Preemptions after which the workload is queued again; after one more, it fails."""
    max_losses: int | None = None
    """The same for losses of machines."""

    @property
    def restarts(self) -> dict[str, int | None]:
        """Exit status, or `other` for all that are not listed, to the number of retries."""
        return {**self.retries_by_exit, "other": self.retries}


class DependencySpec(_Frozen):
    """What must hold before a workload enters the queue: a condition on a workload, or on a partition of a table."""

    workload: str | None = None
    """Name or id of a workload, as in the document."""
    id: str | None = None
    """Id of the workload that `workload` named at the submission."""
    table: str | None = None
    partition: str | None = None
    condition: str = "succeeded"
    """`succeeded`, `ended`, `failed` or `started`; of a partition `ready`."""
    same_index: bool = False
    """Whether each element of the array waits for the element of the other array with the same index."""


IndexRange = tuple[int, int, int]
"""The first index, the last index, and the step between indexes."""


class RunnersSpec(_Frozen):
    """Runners of an array: workloads that run its elements one after the other."""

    interrupt: Literal["after_element", "now"] = "after_element"
    """Whether a runner that is to stop first lets its element end, if that takes at most half of the grace."""
    at_most_once: bool = False
    """Whether an element that may have been started is never started again."""


class ArraySpec(_Frozen):
    """Many elements of one document, which are placed independently (`domain.array_elements`)."""

    ranges: tuple[IndexRange, ...] = ()
    """The indexes of the elements; in the row of an element, only its own; none in that of a runner."""
    throttle: int | None = None
    """Maximum number of elements that run at a time, as submitted; None: no limit."""
    matrix: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Names of parameters to their values. An index is the number of a combination, so the order of the names counts.
    It is stored as a list of pairs, because Postgres sorts the keys of an object."""
    exclude: tuple[dict[str, str], ...] = ()
    """Values of parameters whose combinations are left out."""
    entries: tuple[dict[str, str], ...] = ()
    """In place of a matrix: the parameters of each index, from 0. A single entry is that of all indexes: the row of an
    element has only its own, because a list or a matrix can be long."""
    runners: RunnersSpec | None = None
    """None: each element is placed as a workload of its own."""

    @field_validator("matrix", mode="before")
    @classmethod
    def _from_pairs(cls, matrix: Any) -> Any:
        return dict(matrix) if isinstance(matrix, list | tuple) else matrix

    @field_serializer("matrix")
    def _to_pairs(self, matrix: dict[str, tuple[str, ...]]) -> list[tuple[str, tuple[str, ...]]]:
        return list(matrix.items())


class WorkloadSpec(_Frozen):
    """A workload: a gang that gets all its resources at once, in one region, or none."""

    version: int = 1
    name: str
    tenant: str
    labels: dict[str, str] = Field(default_factory=dict)
    recurring: str | None = None
    level: int | None = None
    """A priority level below the tenant's; None: the tenant's level."""
    jobs: tuple[JobSpec, ...]
    array: ArraySpec | None = None
    tables: tuple[str, ...] = ()
    files: dict[str, str] = Field(default_factory=dict)
    """Relative path to text; the files are written into each task's working directory."""
    workdir: str | None = None
    """SHA-256 (hex) of an uploaded tar.gz archive, unpacked into each task's working directory before `files`."""
    checkpoint: CheckpointSpec = CheckpointSpec()
    limits: LimitsSpec = LimitsSpec()
    regions_allowed: tuple[str, ...] | None = None
    """None: all."""
    regions_excluded: tuple[str, ...] = ()
    capacity: tuple[CapacityKind | Literal["own"], ...] | None = None
    """Capacity kinds on which the workload may run, in order of preference; None: `domain.capacity.USUAL`."""
    serving: ServingSpec | None = None
    """Set if the workload serves requests: it is a replica of a service."""
    one_attempt: bool = False
    """True: every end of an attempt ends the workload. It is not queued again after a preemption or a lost machine."""
    outputs: dict[str, str] = Field(default_factory=dict)
    """Name to the relative path of a file or folder in the working directory, which is stored at the end of each
    attempt (`domain.output_manifest`)."""
    keep_s: float | None = None
    """How long the tasks' working directories stay on their machines after the end of an attempt, in seconds; None: as
    long as `tasks.keep_runs_s` says."""
    isolation: Isolation | None = None
    """The weakest mode of isolation of machines on which the workload may run; None: as its tenant."""
    after: tuple[DependencySpec, ...] = ()
    not_before: datetime | None = None
    """The workload enters the queue at this time at the earliest."""
    delay_s: float | None = None
    """The same in seconds after the submission."""
    if_never: Literal["end", "keep"] = "end"
    """What happens if one of `after` can never hold: the workload is cancelled, or stays blocked."""
    notify: tuple[NotifySpec, ...] = ()
    """Who is notified when the workload has ended."""
    cluster: str | None = None
    """The dedicated cluster whose machines are the only ones on which the workload may run; None: any shared one."""
    spread: SpreadRule | None = None
    """How far it should be from other workloads of its group: the replicas of its service."""

    def requests(self) -> tuple[JobRequest, ...]:
        """Returns the scheduling requests of the jobs."""
        return tuple(job.request(self.kinds) for job in self.jobs)

    @property
    def has_dependencies(self) -> bool:
        """Whether something must hold before the workload enters the queue."""
        return bool(self.after) or self.not_before is not None or self.delay_s is not None

    @property
    def kinds(self) -> tuple[str, ...]:
        """The capacity kinds on which the workload may run, in order of preference."""
        if self.cluster is not None:
            return (dedicated(self.cluster),)
        if self.capacity is None:
            return USUAL
        return tuple(own_of(self.tenant) if kind == OWN else str(kind) for kind in self.capacity)

    def allows_region(self, region: str) -> bool:
        """Returns whether the user allows the workload to run in `region`."""
        return region not in self.regions_excluded and (self.regions_allowed is None or region in self.regions_allowed)
