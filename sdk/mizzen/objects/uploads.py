"""Plans of copies, and the interface of resumable uploads in parts.

The target store keeps an unfinished upload under the plan's mark, so a process with the same plan finds the parts that
are already uploaded. A part counts as uploaded when the store itself has confirmed its content. The object is not
visible before `finish`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from mizzen.objects.store import ObjectStore

Read: TypeAlias = Callable[[], bytearray]
"""Reads and returns one part of the source."""


class CopyFailed(Exception):
    """An object could not be copied. No part of it is visible at the target."""


class DamagedSource(CopyFailed):
    """The bytes read from an object do not match its store's digest or its checksum."""


class CopyInUse(CopyFailed):
    """Another process is making the same copy."""


@dataclass(frozen=True)
class CopyPlan:
    """A copy: one version of a source object, and its key at the target."""

    source: "ObjectStore"
    source_key: str
    source_tag: str
    size_bytes: int
    key: str
    """Key at the target."""
    part_bytes: int
    """Size of every part except the last."""
    mark: str
    """Id of the upload. The finished object carries it as `ObjectStat.mark`, if the store supports metadata."""

    @property
    def parts(self) -> int:
        """Number of parts; 0 for an empty object."""
        return -(-self.size_bytes // self.part_bytes)

    def span(self, number: int) -> tuple[int, int]:
        """Return start and end offset of part `number`, counted from 0. The end is exclusive."""
        start = number * self.part_bytes
        return start, min(start + self.part_bytes, self.size_bytes)

    def damaged(self, number: int, found: str, expected: str) -> CopyFailed:
        """Return the error for a part whose digest at the target differs from the one in the source."""
        where = self.target_words(number)
        return CopyFailed(f"{where} is {found}, in {self.source.uri(self.source_key)} it is {expected}")

    def target_words(self, number: int) -> str:
        """Return a description of a part for messages."""
        return f"{self.key}: part {number + 1} of {self.parts} at the target"


class Upload(Protocol):
    """A resumable upload of one object. Several threads may upload different parts concurrently."""

    plan: CopyPlan
    """The plan, which may have other parts than the caller's: a server-side copy may treat the object as one part."""
    copies_itself: bool = False
    """Whether the store copies the parts server-side, so that they need not be read here."""
    proof: str = ""
    """After `finish`: the algorithm by which the store compared a server-side copy with the digest of the source store.
    Empty if it did not, or if the parts were read here."""

    def missing(self) -> list[int]:
        """Return the numbers of the parts that are not uploaded yet, in order."""

    def take(self, number: int, read: Read) -> None:
        """Upload a part, durably, and let the store confirm its content. Calls `read` unless the store copies the part.

        Raises:
            CopyFailed: the store reports another content, or the upload was removed.
        """

    def stored(self, number: int) -> bytearray | None:
        """Return the content of an uploaded part; None if the store cannot read it before the object is finished."""
        return None

    def finish(self) -> bool:
        """Assemble the object from its parts. Return whether it is verified to equal the source.

        If it returns False, the object has no mark, and the caller must compare it with the source. The content is
        durable; its name only after `ObjectStore.make_durable`.

        Raises:
            CopyFailed: a part differs from what was uploaded.
        """

    def drop(self) -> None:
        """Remove all uploaded parts."""
