"""The settings of a Slurm cluster."""

import re
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from capacity.providers.offered_zones import PricedShape
from domain.capacity import CapacityKind
from domain.documents import DocumentPart, Name, RuleError

_HINT = "leave_s is shorter than time_s of every partition"
Word = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.,:;@=+*&|()\[\]/-]+$")]
"""The value of an option of sbatch."""
Line = Annotated[str, StringConstraints(min_length=1, pattern=r"^[^\n\x00]*$")]


def _plain(path: Path) -> Path:
    if re.fullmatch(r"/[A-Za-z0-9_./@+-]*", str(path)) is None:
        raise ValueError(f"must be an absolute path of letters, digits and _./@+-; it is {path}")
    return path


Folder = Annotated[Path, AfterValidator(_plain)]


class SlurmMachineType(PricedShape):
    """The resources of a pilot job, all of which its machine offers, and the price of such a machine."""

    gres: Word | None = None
    """The value of `--gres`; None: `gpu:N` with the number of GPUs."""
    constraint: Word | None = None
    """Node features, in addition to the partition's."""
    exclusive: bool = False
    """Whether the job gets whole nodes."""


class SlurmPartition(DocumentPart):
    """A partition of the cluster, which is a zone of pools, and the options of its jobs."""

    partition: Word | None = None
    """Slurm's name of the partition; None: that of the zone."""
    kind: CapacityKind = CapacityKind.RESERVED
    """`spot`, if Slurm may preempt the jobs."""
    time_s: float = Field(4 * 3600.0, ge=120, le=365 * 86400)
    """The time limit of a job; whole minutes, rounded up. A job without a limit would be held by reservations."""
    price_factor: float = Field(1.0, ge=0)
    account: Word | None = None
    qos: Word | None = None
    constraint: Word | None = None
    licenses: Word | None = None
    reservation: Word | None = None
    exclude: Word | None = None
    """Nodes that are not used, such as `n[3-5]`."""

    @property
    def minutes(self) -> int:
        """The time limit in minutes."""
        return -int(-self.time_s // 60)


class SlurmRest(DocumentPart):
    """A slurmrestd with JWT, which is used instead of Slurm's commands."""

    url: Annotated[str, StringConstraints(pattern=r"^https?://[^/?#\s]+/slurm/v0\.0\.[0-9]+$")]
    """With the version of its API, as `http://slurm.example.org:6820/slurm/v0.0.38`."""
    user: Word
    """The user of the token, who owns the pilots."""
    token_file: Folder
    """The file with the token, or with what `scontrol token` prints. It is read again for each request."""

    @property
    def version(self) -> int:
        """The last number of the version."""
        return int(self.url.rpartition(".")[2])


class SlurmSettings(DocumentPart):
    """A Slurm cluster whose pilots belong to one region."""

    rules: ClassVar = (_HINT,)

    region: Name
    """The mizzen region."""
    partitions: dict[Name, SlurmPartition] = Field(min_length=1)
    machine_types: dict[Name, SlurmMachineType] = Field(min_length=1)
    folder: Folder
    """A folder of this user that the nodes can read: the secrets of pilots that wait, and the logs of pilots."""
    state_dir: Folder = Path("/tmp")
    """A local folder of the nodes, for the agent's state."""
    agent: Line
    """The command that starts the agent, with the flags that all machines share, such as `/shared/mizzen/bin/mizzen
    agent --temporal temporal.example.com:7233`."""
    address: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9.:-]+$|^\$\([a-z -]+\)$")] = "$(hostname -f)"
    """The address at which other nodes reach a node, or a command that prints it, as `$(hostname -f)`."""
    prepare: str = ""
    """Shell commands before the agent is started, such as `module load python`."""
    config: Folder | None = None
    """The value of `SLURM_CONF`; None: that of the worker's environment."""
    rest: SlurmRest | None = None
    """None: Slurm's commands are used."""
    leave_s: float = Field(120.0, ge=60, le=65535)
    """Slurm sends the agent a signal at least this long before the end of its job."""
    kill_wait_s: float = Field(30.0, ge=0)
    """The time from SIGTERM to SIGKILL in this cluster, `KillWait` of its slurm.conf."""
    start_s: float = Field(60.0, ge=0)
    """The expected time from the start of a job until its agent announces itself."""
    timeout_s: float = Field(20.0, gt=0, le=100)
    """The timeout of a command of Slurm."""

    @model_validator(mode="after")
    def _hinted(self) -> "SlurmSettings":
        for name, of in self.partitions.items():
            if of.time_s <= self.leave_s:
                raise RuleError(
                    _HINT, f"leave_s: must be less than partitions.{name}.time_s, {of.time_s:g}; it is {self.leave_s:g}"
                )
        return self
