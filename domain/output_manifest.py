"""Outputs: files of tasks that agents store in the region's bucket when the tasks end.

An output of one task of one attempt is a tar archive in parts (`domain.ids.output_part_key`). Its manifest is written
after the parts, so an output without a manifest does not exist, and one that cannot be stored has a manifest that says
why. Agents write the manifests, so readers must not trust them.
"""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

PART_BYTES = 8 << 20
"""The size of all parts but the last."""
MAX_PARTS = 1 << 17
MAX_MANIFEST_BYTES = 32 << 20
"""A larger manifest is not read. One with `MAX_PARTS` is smaller."""
MOST_NAMED = 5
"""The entries that are named in a message or a manifest."""
MAX_TEXT = 2000

_Text = Annotated[str, StringConstraints(max_length=MAX_TEXT)]


class OutputPart(BaseModel):
    """One part of the archive."""

    model_config = ConfigDict(frozen=True)

    size_bytes: int = Field(gt=0, le=PART_BYTES)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class OutputManifest(BaseModel):
    """The stored parts of one output of one task of an attempt, or why it is not stored."""

    model_config = ConfigDict(frozen=True)

    path: _Text
    """The path in the working directory."""
    stored_at_s: float = Field(ge=0, lt=1e11)
    """When the manifest was written, by the clock of the machine, in seconds since the epoch."""
    files: int = Field(0, ge=0, lt=1 << 53)
    """The number of files, folders and links."""
    size_bytes: int = Field(0, ge=0, lt=1 << 53)
    """The size of the files together."""
    left_out: list[_Text] = Field(default_factory=list, max_length=MOST_NAMED)
    """Entries that were not stored, each with the reason."""
    left_out_count: int = Field(0, ge=0, lt=1 << 53)
    error: _Text = ""
    """Why the output was not stored; empty: it was."""
    parts: list[OutputPart] = Field(default_factory=list, max_length=MAX_PARTS)
