"""What is said of a region of EC2."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from domain.ids import NAME_PATTERN
from infra.machine_shape import MachineShape

Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
Line = Annotated[str, StringConstraints(min_length=1, pattern=r"^[^\n\x00]*$")]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Zone(_Part):
    """An availability zone."""

    subnet: Line | None = None
    """None: the zone's default subnet."""


class InstanceType(MachineShape):
    """What of an instance type work may use, and what it costs where EC2 does not say it."""

    usd_per_h: float = Field(ge=0)
    """On demand."""
    spot_usd_per_h: float | None = Field(None, ge=0)
    """Where the history of spot prices has none; None: as on demand."""


class Ec2Settings(_Part):
    """A region of EC2, whose machines are in one region of mizzen's. Credentials: as boto3 finds them."""

    region: Name
    """Mizzen's."""
    aws_region: Name
    endpoint: str | None = None
    """Another address than AWS's."""
    zones: dict[Name, Zone] = Field(min_length=1)
    machine_types: dict[Annotated[str, StringConstraints(pattern=r"^[a-z0-9-]+\.[a-z0-9-]+$")], InstanceType] = Field(
        min_length=1
    )
    """By EC2's names, such as `p4d.24xlarge`."""
    kinds: tuple[Literal["on_demand", "spot"], ...] = Field(("on_demand", "spot"), min_length=1)
    image: Line | None = None
    """AMI; None: the launch template says it."""
    launch_template: Line | None = None
    """Its name. What is said here wins over what it says."""
    security_groups: tuple[Line, ...] = ()
    instance_profile: Line | None = None
    """Its name: what the machine may do, such as reading the region's bucket."""
    prepare: str = ""
    """Shell commands that install what `mizzen agent` needs, where the image does not have it."""
    agent: Line
    """The command that starts the agent, with the flags that all machines share, such as `mizzen agent --temporal
    temporal.example.com:7233 --platform aws-spot`."""
    start_s: float = Field(150.0, ge=0)
    """How long a machine is expected to take until its agent is there."""
    prices_s: float = Field(300.0, gt=0)
    """How often spot prices are asked for."""

    @model_validator(mode="after")
    def _complete(self) -> "Ec2Settings":
        if self.image is None and self.launch_template is None:
            raise ValueError("image or launch_template: give at least one of them")
        return self
