"""What of a machine work may use, as files of settings say it."""

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from domain.units import parse_size_bytes


class MachineShape(BaseModel):
    """GPUs of one type or none, cores, memory."""

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
            raise ValueError("gpus and gpu_type go together: a machine with GPUs has a type, one without has none")
        return self
