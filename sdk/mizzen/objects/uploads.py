"""Objects on their way: what a copy is to do, and what each kind of store does for it part by part.

An upload is kept by the target under the plan's mark: whoever makes the same plan again finds the parts that are there.
A part counts as there when the store itself has vouched for its content. Nobody sees the object before `finish`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from mizzen.objects.store import ObjectStore

Read: TypeAlias = Callable[[], bytearray]
"""Reads one part of the source."""


class CopyFailed(Exception):
    """An object could not be brought whole to where it should be; nothing of it is to be seen there."""


class DamagedSource(CopyFailed):
    """What was read of an object is not what its store vouches for, or what its checksum says."""


class CopyInUse(CopyFailed):
    """Another process is making the same copy at this moment."""


@dataclass(frozen=True)
class Plan:
    """One version of one object, and where it goes."""

    source: "ObjectStore"
    source_key: str
    source_tag: str
    size_bytes: int
    key: str
    """At the target."""
    part_bytes: int
    """Size of all parts but the last."""
    mark: str
    """Names the upload; the finished object carries it, where the store keeps such: `ObjectStat.mark`."""

    @property
    def parts(self) -> int:
        """How many there are; none of an empty object."""
        return -(-self.size_bytes // self.part_bytes)

    def span(self, number: int) -> tuple[int, int]:
        """The bytes of part `number`, counted from 0: from, and up to but without."""
        start = number * self.part_bytes
        return start, min(start + self.part_bytes, self.size_bytes)

    def damaged(self, number: int, found: str, expected: str) -> CopyFailed:
        """The error that names both contents of a part."""
        where = self.target_words(number)
        return CopyFailed(f"{where} is {found}, in {self.source.uri(self.source_key)} it is {expected}")

    def target_words(self, number: int) -> str:
        """A part in words."""
        return f"{self.key}: part {number + 1} of {self.parts} at the target"


class Upload(Protocol):
    """An object that is coming to a store. Parts may be given by several threads at once, each part by one."""

    plan: Plan
    """What is done: a store that copies by itself may take the object as one part."""
    copies_itself: bool
    """The store fetches the parts by itself, and may `read` none."""
    proof: str
    """After `finish`: the algorithm by which a copy of the store's own was compared with what the source's store
    vouches for. Empty if it was not, or if the parts were read here."""

    def missing(self) -> list[int]:
        """Parts that are not there yet, in order."""

    def take(self, number: int, read: Read) -> None:
        """Store a part, durably, and have the store vouch for it. What the store can fetch by itself is not `read`.

        Raises:
            CopyFailed: what it says it holds is something else, or the upload was removed meanwhile.
        """

    def stored(self, number: int) -> bytearray | None:
        """The content of a part that is there; None: the store does not give it before the object is whole."""

    def finish(self) -> bool:
        """Make the object of its parts; False: nobody has vouched yet that it is the source's, and it has no mark.

        It is durable; its name is after `ObjectStore.settle`.

        Raises:
            CopyFailed: a part is not what was put.
        """

    def drop(self) -> None:
        """Forget all parts."""
