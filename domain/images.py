"""References of container images, such as `ghcr.io/lab/train:1.2` or `ubuntu@sha256:...`."""

import re
from dataclasses import dataclass

_HUB = "docker.io"
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_HOST = r"(?:[a-zA-Z0-9](?:[a-zA-Z0-9.-]{0,251}[a-zA-Z0-9])?|\[[0-9a-fA-F:]+\])(?::[0-9]{1,5})?"
_DIGEST = r"sha256:[0-9a-f]{64}"
IMAGE_PATTERN = rf"^(?:{_HOST}/)?{_PART}(?:/{_PART})*(?::[A-Za-z0-9_][A-Za-z0-9_.-]{{0,127}})?(?:@{_DIGEST})?$"
"""Regular expression of a reference: `[HOST/]NAME[:TAG][@sha256:DIGEST]`."""
IMAGE_RULE = "[HOST/]NAME[:TAG][@sha256:DIGEST] in lower case, such as ghcr.io/lab/train:1.2"
PULL_LOGIN = "MIZZEN_IMAGE_LOGIN"
"""Name under which the sealed secrets of a job have the login for its registry. No variable of a task has it."""
MAX_IMAGE = 512
"""Maximum number of characters of a reference."""


@dataclass(frozen=True)
class ImageReference:
    """The parts of a reference."""

    registry: str
    repository: str
    tag: str
    digest: str | None
    """`sha256:` and 64 hexadecimal digits; None: the tag says which image."""

    @property
    def name(self) -> str:
        """Registry and repository, without tag and digest."""
        return f"{self.registry}/{self.repository}"

    def pinned(self, digest: str) -> str:
        """Returns the reference of the image with this digest."""
        return f"{self.name}@{digest}"


def parse_image(text: str) -> ImageReference:
    """Returns the parts of a reference. The first part of the name is a host if it has a dot or a port, as in Docker.

    Raises:
        ValueError: `text` is no reference.
    """
    if len(text) > MAX_IMAGE or re.fullmatch(IMAGE_PATTERN, text) is None:
        raise ValueError(f"image {text[:MAX_IMAGE]!r}: must be {IMAGE_RULE}")
    rest, _, digest = text.partition("@")
    first, slash, path = rest.partition("/")
    is_host = bool(slash) and (first == "localhost" or any(mark in first for mark in ".:[") or first != first.lower())
    registry, path = (first, path) if is_host else (_HUB, rest)
    path, _, tag = path.partition(":")
    if registry == _HUB and "/" not in path:
        path = f"library/{path}"
    return ImageReference(registry, path, tag or "latest", digest or None)
