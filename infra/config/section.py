"""What all sections of the configuration have in common."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Unknown keys are errors, and settings do not change once they are read."""

    model_config = ConfigDict(extra="forbid", frozen=True)
