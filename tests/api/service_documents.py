"""What the tests of service documents share."""

from pathlib import Path
from typing import Any

from api.documents.service import ServiceDraft, read_service
from api.documents.syntax import load_yaml
from domain.service import ServiceSpec

GIB = 1 << 30
PAGE = Path(__file__).parents[2] / "docs/services.md"


def read(text: bytes, name: str | None = None) -> ServiceDraft:
    """Returns the draft of a document that is read with the key of tenant `vision`."""
    return read_service(load_yaml(text), "vision", name)


def spec_of(value: Any) -> ServiceSpec:
    """Returns the specification of a document without errors."""
    draft = read_service(value, "vision", "chat")
    assert draft.problems == []
    return draft.spec()
