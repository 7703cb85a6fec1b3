"""Defines the interfaces of stores between which objects are copied, and of resumable uploads.

The target store of a copy keeps an unfinished upload under the plan's mark, so a process with the same plan finds the
parts that are already uploaded. A part counts as uploaded when the store itself has confirmed its content. The object
is not visible before `finish`.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from infra.copies.errors import CopyFailed
from infra.copies.store_digest import StoreDigest
from mizzen.objects.store import ObjectInfo, ObjectStore


class ObjectStatus(NamedTuple):
    """Size, version and origin of one object."""

    size_bytes: int
    tag: str
    """Version identifier, see `ObjectInfo.tag`."""
    mark: str
    """The id (`CopyPlan.mark`) of the copy that created the object, if it is unchanged since; else empty."""


class Content(NamedTuple):
    """The complete content of one version of an object."""

    body: bytearray
    store_digest: StoreDigest | None
    """The store's digest, not yet compared with `body`; None if there is none that this process can compute."""


Read: TypeAlias = Callable[[], bytearray]
"""Reads and returns one part of the source."""


@dataclass(frozen=True)
class CopyPlan:
    """A copy: one version of a source object, and its key at the target."""

    source: "CopyStore"
    source_key: str
    source_tag: str
    size_bytes: int
    key: str
    """Key at the target."""
    part_bytes: int
    """Size of every part except the last."""
    mark: str
    """Id of the upload. The finished object carries it as `ObjectStatus.mark`, if the store supports metadata."""

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
        where = self.describe_part(number)
        return CopyFailed(f"{where} is {found}, in {self.source.uri(self.source_key)} it is {expected}")

    def describe_part(self, number: int) -> str:
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
        durable; its name only after `CopyStore.make_durable`.

        Raises:
            CopyFailed: a part differs from what was uploaded.
        """

    def drop(self) -> None:
        """Remove all uploaded parts."""


class CopyStore(ObjectStore, Protocol):
    """A store from which and to which objects are copied."""

    def status(self, key: str) -> ObjectStatus | None:
        """Return size, tag and mark; None if there is no such object."""

    def content(self, info: ObjectInfo) -> Content:
        """Read this version of a small object in one request. A truncated response is resumed.

        Raises:
            ChangedObject: the object was replaced or removed.
        """

    def store_digest(self, info: ObjectInfo) -> StoreDigest | None:
        """Return the store's own digest of this version; None if there is none that this process can compute."""

    def upload(self, plan: CopyPlan) -> AbstractContextManager[Upload]:
        """Start an upload in parts, or resume the unfinished upload with the same `plan.mark`.

        Raises:
            CopyInUse: another process works on the same upload. Not every store can detect this.
        """

    def make_durable(self, keys: Iterable[str]) -> None:
        """Make the names of finished uploads durable. Before this call, a power loss may undo them."""

    def tidy_uploads(self, idle_s: float) -> None:
        """Remove uploads that are not in use and have received no part for `idle_s` seconds."""
