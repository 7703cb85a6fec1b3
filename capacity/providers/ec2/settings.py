"""The settings of an EC2 provider."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from domain.documents import DocumentPart, Name
from infra.machine_shape import MachineShape

Line = Annotated[str, StringConstraints(min_length=1, pattern=r"^[^\n\x00]*$")]


class Ec2Zone(DocumentPart):
    """An availability zone."""

    subnet: Line | None = None
    """None: the zone's default subnet."""


class InstanceType(MachineShape):
    """The resources of an instance type that workloads may use, and its prices."""

    usd_per_h: float = Field(ge=0)
    """The on-demand price."""
    spot_usd_per_h: float | None = Field(None, ge=0)
    """The spot price if EC2's price history has none; None: the on-demand price."""


class Ec2Settings(DocumentPart):
    """An EC2 region whose machines belong to one mizzen region. Credentials are found by boto3."""

    region: Name
    """The mizzen region."""
    aws_region: Name
    endpoint: str | None = None
    """The endpoint URL, if not that of AWS."""
    zones: dict[Name, Ec2Zone] = Field(min_length=1)
    machine_types: dict[Annotated[str, StringConstraints(pattern=r"^[a-z0-9-]+\.[a-z0-9-]+$")], InstanceType] = Field(
        min_length=1
    )
    """The instance types by EC2's names, such as `p4d.24xlarge`."""
    kinds: tuple[Literal["on_demand", "spot"], ...] = Field(("on_demand", "spot"), min_length=1)
    image: Line | None = None
    """The AMI; None: that of the launch template."""
    launch_template: Line | None = None
    """The name of the launch template. These settings override the template."""
    security_groups: tuple[Line, ...] = ()
    instance_profile: Line | None = None
    """The name of the instance profile, which grants permissions such as reading the region's bucket."""
    prepare: str = ""
    """Shell commands that install what `mizzen agent` needs, if the image does not contain it."""
    agent: Line
    """The command that starts the agent, with the flags that all machines share, such as `mizzen agent --temporal
    temporal.example.com:7233 --platform aws-spot`."""
    start_s: float = Field(150.0, ge=0)
    """The expected time from the launch until the machine's agent announces itself."""
    prices_s: float = Field(300.0, gt=0)
    """The interval at which spot prices are refreshed."""

    @model_validator(mode="after")
    def _complete(self) -> "Ec2Settings":
        if self.image is None and self.launch_template is None:
            raise ValueError("image or launch_template: set at least one of them")
        return self
