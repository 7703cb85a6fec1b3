"""The launch description: all that an agent needs to know of an attempt.

The control plane writes it, as JSON, into the region's bucket under `domain.ids.launch_key`, once for the whole gang;
every agent of the gang reads the same document and runs the tasks that name its machine. Ports are not in it: they are
reserved by the agents afterwards and come with `RunNode.masters`. Secrets are in it only sealed, for each machine those
of the jobs that run there.
"""

from typing import Self

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, model_validator

from domain.ids import NAME_PATTERN, TABLE_RULE, is_name, is_table_name


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class CheckpointLaunch(_Frozen):
    """Checkpoint settings of the attempt."""

    interval_s: float | None = None
    """Seconds from one save to the next, where the user asked for an interval; None: each task finds its own."""
    grace_s: float
    """Time from the notice (SIGTERM) to SIGKILL."""
    keep: int
    uri: str
    """Folder of the workload's checkpoints in the region's bucket."""
    machine_hazard_per_h: float | None = Field(None, gt=0)
    """Interruptions per machine hour that the scheduler has seen in the region; None: too little was seen."""


class LogLaunch(_Frozen):
    """How output is shipped (`agent.logs`)."""

    segment_bytes: int = Field(64 << 10, gt=0)
    """New output of this size is shipped at once."""
    interval_s: float = Field(1.0, gt=0)
    """Less is shipped this often."""
    tail_bytes: int = Field(4096, ge=0)
    """Of earlier versions: the end of the output travelled with the exit status."""


class JobLaunch(_Frozen):
    """What the tasks of a job have in common."""

    role: str
    tasks: int = Field(gt=0)
    argv: tuple[str, ...] = ()
    """Empty where `script` is set."""
    script: str | None = None
    """Run with `/bin/sh -eu`."""
    env: dict[str, str] = Field(default_factory=dict)
    master_machine: str
    """Machine of the job's task 0, where its rendezvous port is reserved."""

    @model_validator(mode="after")
    def _has_a_command(self) -> Self:
        if bool(self.argv) == (self.script is not None):
            raise ValueError("give either argv or script")
        return self


class TaskPlace(_Frozen):
    """One task and where it runs."""

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
    """Indices of the machine's GPU slots that it holds."""
    cpus_milli: int = 0
    memory_bytes: int = 0


class LaunchDescription(_Frozen):
    """An attempt of a workload, as its agents read it."""

    version: int = 1
    workload_id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")
    name: str
    tenant: str
    tenant_number: int | None = Field(None, ge=0)
    """Which user the tenant's tasks run as, where tenants have users of their own (`AgentConfig.tenant_uids`)."""
    attempt: int = Field(gt=0)
    region: str
    checkpoint: CheckpointLaunch
    tables: dict[str, str] = Field(default_factory=dict)
    """Table to the URI of its folder in the region's bucket."""
    stale_tables: dict[str, AwareDatetime] = Field(default_factory=dict)
    """Those of which the region lacks what was appended lately, each with the time before which it is complete."""
    files: dict[str, str] = Field(default_factory=dict)
    """Relative path to text, written over the archive's content."""
    workdir: str | None = Field(None, pattern=r"^[0-9a-f]{64}$")
    """SHA-256 of the archive, which is in the same bucket under `domain.ids.archive_key`."""
    logs: LogLaunch = LogLaunch()
    jobs: dict[str, JobLaunch]
    tasks: tuple[TaskPlace, ...]
    sealed_secrets: dict[str, str] = Field(default_factory=dict)
    """Machine to base64 of a sealed box, for its public key, of the JSON `{job: {variable: value}}`."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for name in self.jobs:
            if not is_name(name):
                raise ValueError(f"name {name!r}: must match {NAME_PATTERN}")
        for name in self.tables:
            if not is_table_name(name):
                raise ValueError(f"table {name!r}: must be {TABLE_RULE}")
        seen = set()
        for task in self.tasks:
            if task.job not in self.jobs or task.task >= self.jobs[task.job].tasks:
                raise ValueError(f"task {task.job}/{task.task}: there is no such job or task")
            if (task.job, task.task) in seen:
                raise ValueError(f"task {task.job}/{task.task}: named twice")
            seen.add((task.job, task.task))
        return self

    def on_machine(self, machine: str) -> tuple[TaskPlace, ...]:
        """The tasks of one machine, by job and index."""
        return tuple(sorted((t for t in self.tasks if t.machine == machine), key=lambda t: (t.job, t.task)))
