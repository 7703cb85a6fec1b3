"""Configuration of one machine's agent."""

import os
import pwd
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from agent.launch import Owner
from domain.ids import is_name, machine_id
from domain.isolation import Isolation, TaskNetwork
from domain.launch import LaunchDescription
from mizzen.cadence import PLATFORMS as PRIORS
from mizzen.notices.detection import PLATFORMS

DEFAULT_INTERFACE = "default"
"""The value of `AgentConfig.interface` for the interface of the default route."""
DETECT = "detect"
"""The value of `AgentConfig.platform` that makes the agent detect the platform."""


class AgentConfig(BaseModel):
    """One machine as its agent registers it, and the settings of the agent."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    machine: str
    """Id of the machine, `region/cluster/name`."""
    region: str
    cluster: str
    rack: str
    gpu_type: str | None = None
    gpus: int = Field(0, ge=0)
    gpu_numbers: tuple[int, ...] = ()
    """The numbers of the GPUs that this agent offers, in the order of its slots; empty: slot i is GPU i."""
    cpus_milli: int = Field(gt=0)
    memory_bytes: int = Field(gt=0)
    address: str
    """Host name or IP address at which the other machines of the cluster can connect to this one."""
    ports: tuple[int, int]
    """First and last port for rendezvous and for tasks that serve requests, inclusive. Must be outside the system's
    ephemeral range. Machines that share an address need disjoint ranges."""
    bucket_url: str | None = None
    """URL at which this machine reaches the region's bucket. None uses the URL in each request."""
    state_dir: Path
    """Folder for the agent's state. Must be on a local disk and persist over restarts of the agent."""
    run_as: str | None = None
    """User name or user id that tasks run as. None means the agent's own user. Requires an agent that runs as root."""
    cgroup: bool = True
    """Create cgroups for each task, with limits on memory and processes from its resource request, if the agent is
    allowed to create them."""
    processes_per_task: int = Field(128, gt=0)
    """Number of processes and threads that every task may have, whatever its resource request."""
    processes_per_cpu: int = Field(128, ge=0)
    """Number of processes and threads that a task may have in addition for each CPU that it requests."""
    tenant_uids: tuple[int, int] | None = None
    """First user id and number of user ids: tasks of the tenant with number n run as first + n, so that each tenant has
    its own user id. None: all tasks run as `run_as`, or as the agent's user. Requires an agent that runs as root."""
    isolation: Isolation = Isolation.NONE
    """How tasks are separated (`agent.isolation.choose`). With `user` and `sandbox`, an agent that runs as root needs
    `tenant_uids` or `run_as`."""
    network: TaskNetwork = TaskNetwork.HOST
    """The network of tasks. `ports` needs the isolation `sandbox`, no `engine_socket` and no `interface`."""
    isolation_why: str = ""
    """Why no stronger mode is used, shown by `mizzen machines`."""
    engine_socket: Path | None = None
    """Socket of the container engine, for tasks with an image (`agent.containers`); None: the machine has none."""
    engine: str = ""
    """Kind and version of that engine, shown by `mizzen machines`."""
    s3_role: str | None = None
    """ARN of the role that the agent assumes for tasks that use buckets of S3 (`agent.credentials`). None: they get no
    credentials."""
    gcs_tokens: bool = False
    """Whether tasks that use Google buckets get restricted tokens of the agent (`agent.credentials`)."""
    credentials_s: float = Field(3600.0, ge=900, le=43200)
    """How long the credentials from `s3_role` are valid, in seconds. They are renewed after half of it."""
    metadata_service: bool = False
    """Whether tasks may connect to the metadata service of a cloud, which has credentials of the machine
    (`agent.connect_rules`)."""
    paths: tuple[str, ...] = ()
    """Further folders and files of the machine that are visible in sandboxes. They are read-only, unless the entry ends
    with `:rw`."""
    heartbeat_interval_s: float = Field(5.0, gt=0)
    """Interval of the heartbeats that report the progress of running tasks, in seconds. Each heartbeat costs the
    Temporal server a write."""
    attend_interval_s: float | None = Field(None, gt=0)
    """Interval of the heartbeats that show that the machine is alive, in seconds. None: as rarely as the heartbeat
    timeout allows, because each heartbeat of each machine costs the Temporal server a write."""
    poll_interval_s: float = Field(0.5, ge=0.05)
    """Interval at which the reports of running tasks are read, in seconds. A task's end is detected at once,
    independently of this interval."""
    hello_interval_s: float = Field(30.0, gt=0)
    """Interval at which the agent registers its machine again while no `machine.attend` activity runs, in seconds."""
    checkpoint_memory_bytes: int = Field(0, ge=0)
    """The part of `memory_bytes` that tasks do not get, because it holds checkpoints (`agent.memory_servers`). 0: the
    machine holds none; trainings that use the tier start servers of their own, which end with their tasks."""
    keep_memory_s: float = Field(600.0, ge=0)
    """How long the checkpoints of a workload without a task on this machine stay in memory, in seconds."""
    keep_runs_s: float = Field(600.0, ge=0)
    """How long an attempt's folder is kept after all output of its tasks was shipped, in seconds."""
    keep_at_most_s: float = Field(14 * 86400.0, ge=0)
    """The longest time for which a document may keep an attempt's folder, in seconds."""
    keep_free: float = Field(0.1, ge=0, le=1)
    """While less than this fraction of the disk is free, folders that documents keep are removed, oldest first."""
    keep_images_s: float = Field(7 * 86400.0, ge=0)
    """How long an image that the agent has fetched is kept after its last use, in seconds."""
    images_bytes: int = Field(100 << 30, ge=0)
    """Maximum total size of these images, in bytes; beyond it, the longest unused ones are removed."""
    image_bytes_s: float | None = Field(None, ge=10_000)
    """The bandwidth that fetches of images may have together, in bytes per second (`agent.containers.pull_rate`). None:
    any."""
    disk_fraction: float | None = Field(0.9, gt=0, le=1)
    """The part of the disk's free space that tasks may use together (`agent.disk`). None: they have no limit."""
    output_bytes: int = Field(1 << 30, ge=1 << 22)
    """Limit on the disk space that one task's output uses on this machine. Output beyond the limit is freed: first the
    part that was shipped, then the oldest part that was not."""
    log_bytes: int = Field(10 << 30, ge=1 << 20)
    """Size of the log of a task and attempt in the bucket from which on only the end of the output is stored."""
    keep_outcomes_s: float = Field(14 * 86400.0, ge=0)
    """How long exit statuses are kept after the folder is removed, in seconds. A workflow may need them long after the
    end, for example after an outage of Temporal or a restore of its database."""
    largest_output_bytes: int = Field(50 << 30, ge=0)
    """Maximum size of one output of one task, in bytes; a larger one is not stored (`agent.output_storage`)."""
    largest_output_files: int = Field(100_000, ge=0)
    """Maximum number of files and folders of one output of one task."""
    keep_stopped_s: float = Field(14 * 86400.0, gt=0)
    """How long the record of a workload's last stopped attempt is kept, in seconds since that stop."""
    platform: str | None = None
    """Platform whose termination notices the agent polls: a name of `mizzen.notices` (`aws`) or of `mizzen.cadence`
    (`aws-spot`). The latter also gives the platform's rate of interruptions to the tasks. `detect` queries the metadata
    servers at the start of the agent. None uses the agent's own `MIZZEN_PLATFORM`; if that is not set, nothing is
    polled. `sigterm` polls nothing."""
    notice_file: Path | None = None
    """With platform `file`: path of the file that announces the end of the machine (`mizzen.notices.file`)."""
    owner: str | None = None
    """User name or user id of the owner who lends this machine, and may take it back at any time through a local
    socket. None: the machine has no owner, and there is no socket."""
    owner_socket: Path | None = None
    """Path of the owner's socket. None: `owner.sock` in `state_dir`."""
    interface: str | None = None
    """Network interface on which the rates of leaving checkpoints and the kill-switch are enforced, or `default` for
    that of the default route (`agent.network`). None: nothing is enforced. Needs root."""
    link_bytes_s: float = Field(125e6, gt=0)
    """Bandwidth of the machine's link in bytes per second, with `interface`."""
    research_bytes_s: float = Field(0.0, ge=0)
    """Minimum bandwidth for all other traffic while checkpoints are uploaded (B_min), with `interface`."""
    once: bool = False
    """Whether the agent serves only until the platform's notice, and then ends (`agent.pilot`)."""
    instance: str = ""
    """Id of the machine's instance, if mizzen launched the machine."""
    join_token: str = ""
    """Token that the instance was launched with, if mizzen launched the machine."""
    native_id: str = ""
    """The provider's id of the machine, if it knows it: a Slurm job's number."""
    machine_key: str = ""
    """The API key with which an agent of `agent.fleet` connects; empty: the key in the settings."""
    max_archive_bytes: int = Field(1 << 30, gt=0)
    """Maximum size of an uploaded working directory's archive, compressed."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for field in ("region", "cluster"):
            if not is_name(getattr(self, field)):
                raise ValueError(
                    f"{field} {getattr(self, field)!r}: must be a name of lower-case letters, digits and hyphens"
                )
        if self.machine != machine_id(self.region, self.cluster, self.machine.rpartition("/")[2]):
            raise ValueError(f"machine {self.machine!r}: must be {self.region}/{self.cluster}/NAME")
        first, last = self.ports
        if not 0 < first <= last < 1 << 16:
            raise ValueError(f"ports {first} to {last}: must be a range within 1 to 65535")
        if self.run_as is not None and os.geteuid() != 0:
            raise ValueError(f"run_as {self.run_as!r}: only an agent that runs as root can start tasks as another user")
        if self.tenant_uids is not None and (os.geteuid() != 0 or min(self.tenant_uids) <= 0):
            raise ValueError(f"tenant_uids {self.tenant_uids}: must be positive, and the agent must run as root")
        if self.platform is not None and self.platform not in (DETECT, *PLATFORMS, *PRIORS):
            known = ", ".join(dict.fromkeys((DETECT, *PLATFORMS, *PRIORS)))
            raise ValueError(f"platform {self.platform!r}: must be one of {known}")
        if self.checkpoint_memory_bytes > self.memory_bytes // 2:
            raise ValueError(
                f"checkpoint_memory_bytes {self.checkpoint_memory_bytes}: must be at most half of memory_bytes,"
                f" {self.memory_bytes}"
            )
        if self.research_bytes_s >= self.link_bytes_s:
            raise ValueError(f"research_bytes_s {self.research_bytes_s:g}: must be less than link_bytes_s")
        if self.isolation is not Isolation.NONE and os.geteuid() == 0 and not (self.tenant_uids or self.run_as):
            raise ValueError(f"isolation {self.isolation}: an agent that runs as root needs tenant_uids or run_as")
        if self.isolation is Isolation.USER and os.geteuid() != 0:
            raise ValueError("isolation user: only an agent that runs as root can start tasks as another user")
        if self.network is TaskNetwork.PORTS and (self.isolation is not Isolation.SANDBOX or self.engine_socket):
            raise ValueError("network ports: needs isolation sandbox and no engine_socket")
        if self.network is TaskNetwork.PORTS and self.interface is not None:
            raise ValueError(f"interface {self.interface}: needs network host, to recognise the traffic of tasks")
        self.task_owner()
        self.owner_uid()
        return self

    @property
    def task_memory_bytes(self) -> int:
        """The memory that tasks can request on this machine."""
        return self.memory_bytes - self.checkpoint_memory_bytes

    def kept_s(self, launch: LaunchDescription | None) -> float:
        """Returns how long the folder of an attempt is kept after its end, in seconds."""
        asked_s = 0.0 if launch is None or launch.keep_s is None else launch.keep_s
        return max(self.keep_runs_s, min(asked_s, self.keep_at_most_s))

    def owner_uid(self) -> int | None:
        """Returns the user id of the machine's owner; None: it has none.

        Raises:
            ValueError: the user does not exist.
        """
        return None if self.owner is None else _user("owner", self.owner).pw_uid

    def owner_of(self, tenant_number: int) -> Owner | None:
        """Returns the user that a tenant's tasks run as, or None for the agent's own user.

        Raises:
            ValueError: `tenant_uids` has no user id for this tenant.
        """
        if self.run_as is not None or self.tenant_uids is None:
            return self.task_owner()
        first, count = self.tenant_uids
        if not 0 <= tenant_number < count:
            raise ValueError(f"tenant number {tenant_number}: must be less than the {count} user ids of tenant_uids")
        return Owner(first + tenant_number, first + tenant_number, ())

    def task_owner(self) -> Owner | None:
        """Returns the user in `run_as`, or None for the agent's own user.

        Raises:
            ValueError: the user does not exist.
        """
        if self.run_as is None:
            return None
        user = _user("run_as", self.run_as)
        return Owner(user.pw_uid, user.pw_gid, tuple(os.getgrouplist(user.pw_name, user.pw_gid)))


def _user(field: str, name: str) -> pwd.struct_passwd:
    try:
        return pwd.getpwuid(int(name)) if name.isdigit() else pwd.getpwnam(name)
    except KeyError:
        raise ValueError(f"{field} {name!r}: this user does not exist on this machine") from None
