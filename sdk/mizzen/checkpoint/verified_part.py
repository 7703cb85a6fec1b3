"""A part that is verified but not loaded yet: a restore changes nothing before all parts are verified."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from mizzen.checkpoint.errors import CheckpointError
from mizzen.checkpoint.manifest import Part
from mizzen.checkpoint.module_layout import ModuleLayout
from mizzen.checkpoint.part_reader import begins_with, fetch_part, read_into, verify_part
from mizzen.checkpoint.part_stream import stream
from mizzen.objects.store import ObjectStore

IN_PLACE_BYTES = 64 << 20
"""Larger parts on a local disk are read twice, to avoid a second copy of the module in memory."""
_TRIES = 3


class VerifiedPart(NamedTuple):
    """A verified part with the layout of a live module."""

    part: Part
    layout: ModuleLayout
    content: memoryview | None
    """The whole file; None: it is read once more, directly into the module."""
    stored_at: Sequence[tuple[ObjectStore, str]]
    """Stores and keys that hold the content; the first one was verified."""

    def fill(self) -> None:
        """Load the part into the module.

        Raises:
            SystemExit: the second read has failed at all places, several times. The module is partly loaded then, so
                the process must not train on.
        """
        if self.content is not None:
            self.layout.fill(self.content)
            return
        for store, key in [*self.stored_at] * _TRIES:
            part = replace(self.part, key=key)
            try:
                if self.layout.is_in_memory:
                    read_into(store, part, len(self.layout.head), self.layout.places())
                else:
                    self.layout.fill_from(stream(store, part))
                return
            except CheckpointError as error:
                reason = str(error)
        raise SystemExit(
            f"part {self.part.name!r} was verified, but could not be read again: {reason}. The module is partly "
            "loaded, so this process ends; start it again"
        )


def verified_part(
    store: ObjectStore, part: Part, layout: ModuleLayout, others: Sequence[tuple[ObjectStore, str]]
) -> VerifiedPart | None:
    """Verify a part; None, without reading it, if it does not have this layout. `others` hold the same content.

    Raises:
        CorruptCheckpointError: the part is missing, or differs from what was committed.
        CheckpointError: the part cannot be read for another reason.
    """
    if part.size_bytes != layout.size_bytes or not begins_with(store, part, layout.head):
        return None
    if store.is_local and part.size_bytes > IN_PLACE_BYTES:
        verify_part(store, part)
        return VerifiedPart(part, layout, None, [(store, part.key), *others])
    return VerifiedPart(part, layout, fetch_part(store, part), [])
