"""The base class of all sections of the configuration."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A section of the configuration. It rejects unknown keys and is immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True)
