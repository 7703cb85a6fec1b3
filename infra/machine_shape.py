"""The resources of a machine, as configuration files declare them."""

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from domain.units import parse_size_bytes


class MachineShape(BaseModel):
    """Number and type of GPUs (one type per machine, or no GPUs), number of cores, and memory in bytes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    gpus: int = Field(0, ge=0, le=62)
    gpu_type: str | None = None
    cpus: float = Field(8, gt=0)
    memory: int = 32 << 30

    @field_validator("memory", mode="before")
    @classmethod
    def _size(cls, value: object) -> int:
        return parse_size_bytes(str(value))

    @model_validator(mode="after")
    def _typed(self) -> "MachineShape":
        if (self.gpus > 0) != (self.gpu_type is not None):
            raise ValueError("gpus and gpu_type go together: set gpu_type if gpus is above 0, and only then")
        return self
