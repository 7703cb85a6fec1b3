"""Configuration of one machine's agent."""

import os
import pwd
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from agent.launch import Owner
from domain.ids import is_name, machine_id
from mizzen.cadence import PLATFORMS as PRIORS
from mizzen.notices.detection import PLATFORMS

DETECT = "detect"
"""A platform's name in the configuration: it is found out."""


class AgentConfig(BaseModel):
    """One machine, as its agent announces it, and how its agent works."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    machine: str
    """`region/cluster/machine`."""
    region: str
    cluster: str
    rack: str
    gpu_type: str | None = None
    gpus: int = Field(0, ge=0)
    cpus_milli: int = Field(gt=0)
    memory_bytes: int = Field(gt=0)
    address: str
    """Host name or IP address that the other machines of its cluster can dial."""
    ports: tuple[int, int]
    """First and last port for rendezvous, outside the system's ephemeral range; disjoint where machines share an
    address."""
    bucket_url: str | None = None
    """The region's bucket as this machine reaches it; None: the URL that comes with each request."""
    state_dir: Path
    """On a local disk that survives a restart of the agent."""
    run_as: str | None = None
    """User of the tasks; None: the agent's own. Another one needs an agent that runs as root."""
    cgroup: bool = True
    """Give each task cgroups of its own, with limits of memory and processes by what it asked for, where the agent
    may."""
    processes_per_task: int = Field(128, gt=0)
    """A task may have so many processes and threads,"""
    processes_per_cpu: int = Field(128, ge=0)
    """and so many more for each CPU that it asked for."""
    tenant_uids: tuple[int, int] | None = None
    """First user id and how many: tasks of the tenant with number n run as first + n, which nobody else has. None: they
    run as `run_as`, or as the agent. Needs an agent that runs as root."""
    heartbeat_interval_s: float = Field(5.0, gt=0)
    """Of a node whose tasks run, with their progress; each one costs the Temporal server a write."""
    attend_interval_s: float | None = Field(None, gt=0)
    """Of signs that the machine is there; None: as seldom as the heartbeat timeout allows, since each one costs the
    Temporal server a write, of every machine."""
    poll_interval_s: float = Field(0.5, ge=0.05)
    """How often it is looked at what running tasks report; their ends are noticed at once."""
    hello_interval_s: float = Field(30.0, gt=0)
    """How often an agent that nobody attends to announces itself again."""
    keep_runs_s: float = Field(600.0, ge=0)
    """How long a run's folder is kept after all its output was shipped."""
    output_bytes: int = Field(1 << 30, ge=1 << 22)
    """How much of a task's output may be on this machine's disk: first what was shipped is freed, then what was not."""
    keep_outcomes_s: float = Field(14 * 86400.0, ge=0)
    """How long exit statuses are kept after that: Temporal may ask for them when it is back, or was restored."""
    keep_stopped_s: float = Field(14 * 86400.0, gt=0)
    """How long it is remembered which attempts were stopped here, after the last of them."""
    platform: str | None = None
    """Whose notices the agent listens to, by a name of `mizzen.notices` (`aws`) or of `mizzen.cadence` (`aws-spot`),
    which also tells its tasks how often they are interrupted; `detect`: the metadata servers are asked at the start.
    None: the agent's own `MIZZEN_PLATFORM`, and without it nobody is asked. `sigterm`: nobody is asked."""
    notice_file: Path | None = None
    """With the platform `file`: where it says that it takes the machine (`mizzen.notices.file`)."""
    instance: str = ""
    """Id of the instance that this machine is, where mizzen launched it,"""
    join_token: str = ""
    """and the token that it was launched with."""
    max_archive_bytes: int = Field(1 << 30, gt=0)
    """Of a working directory as it is uploaded, compressed."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for field in ("region", "cluster"):
            if not is_name(getattr(self, field)):
                raise ValueError(f"{field} {getattr(self, field)!r}: must be a name")
        if self.machine != machine_id(self.region, self.cluster, self.machine.rpartition("/")[2]):
            raise ValueError(f"machine {self.machine!r}: must be {self.region}/{self.cluster}/ and a name")
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
        self.owner()
        return self

    def owner_of(self, tenant_number: int | None) -> Owner | None:
        """As whom a tenant's tasks run; None: as the agent. `tenant_number` is None in launches of earlier versions.

        Raises:
            ValueError: the tenant has no user id in the range.
        """
        if self.run_as is not None or self.tenant_uids is None or tenant_number is None:
            return self.owner()
        first, count = self.tenant_uids
        if not 0 <= tenant_number < count:
            raise ValueError(f"tenant number {tenant_number}: tenant_uids has {count} user ids")
        return Owner(first + tenant_number, first + tenant_number, ())

    def owner(self) -> Owner | None:
        """As whom tasks run that are of no tenant in particular; None: as the agent.

        Raises:
            ValueError: there is no such user.
        """
        if self.run_as is None:
            return None
        try:
            user = pwd.getpwuid(int(self.run_as)) if self.run_as.isdigit() else pwd.getpwnam(self.run_as)
        except KeyError:
            raise ValueError(f"run_as {self.run_as!r}: there is no such user on this machine") from None
        return Owner(user.pw_uid, user.pw_gid, tuple(os.getgrouplist(user.pw_name, user.pw_gid)))
