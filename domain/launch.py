"""The launch description: everything that the agents of a gang need to start an attempt.

The control plane writes it once for the whole gang, as JSON, into the region's bucket under `domain.ids.launch_key`.
Every agent of the gang reads the same document and runs the tasks of its machine. Ports are not part of it: agents
reserve them later, and they are sent in `RunNode.masters`. Secrets are included only in sealed form: for each machine,
the secrets of the jobs that run there.
"""

from typing import Self

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, model_validator

from domain.ids import NAME_PATTERN, TABLE_RULE, is_name, is_table_name
from domain.isolation import Isolation
from domain.serving_spec import ServingSpec
from domain.spec import ArraySpec, TaskSpec


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class CheckpointLaunch(_Frozen):
    """Checkpoint settings of the attempt."""

    interval_s: float | None = None
    """Seconds between saves, if the user set an interval; None: each task computes its own interval."""
    grace_s: float
    """Time from the notice (SIGTERM) to SIGKILL."""
    keep: int
    uri: str
    """URI of the workload's checkpoint folder in the store of the cluster or the bucket of the region."""
    machine_hazard_per_h: float | None = Field(None, gt=0)
    """Observed interruptions per machine hour in the region; None: too few observations for an estimate."""
    process_hazard_per_h: float | None = Field(None, gt=0)
    """Observed losses of processes, with or without their machine, per machine hour; None as above."""
    both_hazard_per_h: float | None = Field(None, gt=0)
    """Observed losses of a machine together with a given other one of its cluster, per machine hour; None as above."""
    max_failing_s: float | None = None
    max_failures: int | None = None
    """Limits of saves that fail in a row (`domain.spec.CheckpointSpec`)."""


class LogLaunch(_Frozen):
    """Settings for uploading the output of tasks (`agent.logs`)."""

    segment_bytes: int = Field(64 << 10, gt=0)
    """New output of at least this size is uploaded immediately."""
    interval_s: float = Field(1.0, gt=0)
    """A smaller amount of new output is uploaded at this interval."""


class JobLaunch(TaskSpec):
    """The parts of a launch that all tasks of a job share. `argv` or `script` is set, or neither with an image."""

    role: str
    tasks: int = Field(gt=0)
    master_machine: str
    """Machine of the job's task 0, where its rendezvous port is reserved."""
    restarts: dict[str, int | None] = Field(default_factory=dict)
    """How often a failed task is started again alone, by its exit status or `other`; None: without limit. Empty: never,
    so that the failure of a task ends the attempt."""
    min_tasks: int | None = None
    """The fewest tasks of an elastic job; None: it is not elastic."""
    max_tasks: int | None = None
    saved_tasks: int | None = None
    """Of an elastic job: the number of tasks of the last attempt that has saved a checkpoint, if one has."""

    @model_validator(mode="after")
    def _has_a_command(self) -> Self:
        if (self.argv and self.script is not None) or not (self.argv or self.script is not None or self.image):
            raise ValueError("give either argv or script, or an image with a command of its own")
        return self


class TaskPlace(_Frozen):
    """One task, with its machine, ranks and resources."""

    job: str
    task: int = Field(ge=0)
    machine: str
    rank: int
    """Rank of the task in its job."""
    world_size: int
    node_rank: int
    local_rank: int
    local_world_size: int
    slots: tuple[int, ...] = ()
    """Indices of the machine's GPU slots that the task holds."""
    cpus_milli: int = 0
    memory_bytes: int = 0


class LaunchDescription(_Frozen):
    """The launch description of one attempt of a workload."""

    version: int = 1
    workload_id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")
    name: str
    tenant: str
    tenant_number: int = Field(ge=0)
    """Number from which the operating-system user of the tenant's tasks is derived, if tenants have separate users
    (`AgentConfig.tenant_uids`)."""
    attempt: int = Field(gt=0)
    region: str
    checkpoint: CheckpointLaunch
    tables: dict[str, str] = Field(default_factory=dict)
    """Table to the URI of its folder in the region's bucket."""
    stale_tables: dict[str, AwareDatetime] = Field(default_factory=dict)
    """Tables whose latest appends are missing in the region, each with the time up to which the copy is complete."""
    files: dict[str, str] = Field(default_factory=dict)
    """Relative path to text. These files overwrite files of the archive."""
    workdir: str | None = Field(None, pattern=r"^[0-9a-f]{64}$")
    """SHA-256 of the archive, stored in the same bucket under `domain.ids.archive_key`."""
    outputs: dict[str, str] = Field(default_factory=dict)
    """Name to the relative path of a file or folder in the working directory, which is stored at the end."""
    logs: LogLaunch = LogLaunch()
    jobs: dict[str, JobLaunch]
    tasks: tuple[TaskPlace, ...]
    addresses: dict[str, str] = Field(default_factory=dict)
    """Machine to the address at which other machines reach it."""
    memory_peers: dict[str, str] = Field(default_factory=dict)
    """Machine to the machine that holds a second copy of its checkpoints in memory (`domain.memory_peers`)."""
    isolation: Isolation = Isolation.NONE
    """The weakest mode of isolation in which agents start the tasks."""
    keep_s: float | None = None
    """How long the agents keep the tasks' working directories after the end of the attempt, in seconds; None: by their
    own setting."""
    array_variables: dict[str, str] = Field(default_factory=dict)
    """Variables of all tasks with the index and the parameters of an element of an array (`domain.array_elements`)."""
    elements: ArraySpec | None = None
    """Of a runner: the array whose elements it runs. The strings of its job still have their braces."""
    max_runtime_s: float | None = None
    """The maximum runtime of an element of a runner, in seconds."""
    serving: ServingSpec | None = None
    """How task 0 of the first job serves requests; None: the workload serves none."""
    sealed_secrets: dict[str, str] = Field(default_factory=dict)
    """Machine to the JSON `{job: {variable: value}}` in a sealed box for the machine's public key, in base64."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for name in self.jobs:
            if not is_name(name):
                raise ValueError(f"name {name!r}: must match {NAME_PATTERN}")
        for name in self.outputs:
            if not is_name(name):
                raise ValueError(f"output {name!r}: must match {NAME_PATTERN}")
        for name in self.tables:
            if not is_table_name(name):
                raise ValueError(f"table {name!r}: must be {TABLE_RULE}")
        seen = set()
        for task in self.tasks:
            if task.job not in self.jobs or task.task >= self.jobs[task.job].tasks:
                raise ValueError(f"task {task.job}/{task.task}: no such job or task in `jobs`")
            if (task.job, task.task) in seen:
                raise ValueError(f"task {task.job}/{task.task}: listed twice in `tasks`")
            seen.add((task.job, task.task))
        return self

    def on_machine(self, machine: str) -> tuple[TaskPlace, ...]:
        """Returns the tasks of one machine, sorted by job and index."""
        return tuple(sorted((t for t in self.tasks if t.machine == machine), key=lambda t: (t.job, t.task)))
