"""The resources of a machine, as configuration files declare them."""

from typing import ClassVar

from pydantic import Field, model_validator

from domain.documents import DocumentPart, RuleError, SizeBytes

_TYPED = "gpus and gpu_type go together: set gpu_type if gpus is above 0, and only then"


class MachineShape(DocumentPart):
    """Number and type of GPUs (one type per machine, or no GPUs), number of cores, and memory in bytes."""

    rules: ClassVar = (_TYPED,)

    gpus: int = Field(0, ge=0, le=62)
    gpu_type: str | None = None
    cpus: float = Field(8, gt=0)
    memory: SizeBytes = 32 << 30

    @model_validator(mode="after")
    def _typed(self) -> "MachineShape":
        if (self.gpus > 0) != (self.gpu_type is not None):
            raise RuleError(_TYPED, _TYPED)
        return self
