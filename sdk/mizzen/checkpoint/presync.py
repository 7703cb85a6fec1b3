"""Sends parts of the state ahead of the last checkpoint, within a notice (ReclaimNet's pre-sync).

The last save stalls the training while it is written. A part that has changed since the newest checkpoint, but no
longer changes, can be written earlier, while the training continues: the last save then reuses it. So after a notice,
`PreSync` compares two successive steps. If parts that are not in the newest checkpoint were equal at both, they are
saved in the background, as a checkpoint of its own, and the last save follows when that one is durable. A background
save that was running when the notice came counts as well.

If every part changes at every step, nothing is sent ahead, and the last save starts at once.

In a gang all ranks must do the same after the same step. So each rank has its own `PreSync`, and all get the same
numbers: the ranks agree on them (`mizzen.checkpoint.departure`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from mizzen.checkpoint.parts import Chunk

_SAMPLES = 16
_SAMPLE_BYTES = 4096

LEAST_SHARE = 0.1
"""Parts are sent ahead if they are at least this share of what the last save would have to write."""


class _Phase(Enum):
    NEW = 1
    LOOKED = 2
    SENDING = 3
    OVER = 4


class Turn(Enum):
    """The action of the training after a step within a notice."""

    LOOK = 1
    """Compare the state with that of the previous step (`PreSync.next_turn`)."""
    GO_ON = 2
    """Continue; a save is running in the background."""
    FLUSH = 3
    """Save for the last time."""


class Unsent(NamedTuple):
    """A part that the next save has to write: its size, and a sample of its content."""

    size_bytes: int
    sample: bytes


def offsets(size_bytes: int) -> list[int]:
    """Return where the samples of a content of this size begin."""
    return [size_bytes * n // _SAMPLES for n in range(_SAMPLES)]


def sample(chunks: Sequence[Chunk], size_bytes: int, sample_bytes: int = _SAMPLE_BYTES) -> bytes:
    """Return bytes at evenly spaced offsets of a part. If the samples of two contents differ, so do the contents."""
    wanted = offsets(size_bytes)
    found = []
    start = 0
    for chunk in chunks:
        view = memoryview(chunk).cast("B")
        while wanted and wanted[0] < start + view.nbytes:
            offset = wanted.pop(0) - start
            found.append(bytes(view[offset : offset + sample_bytes]))
        start += view.nbytes
    return b"".join(found)


@dataclass
class PreSync:
    """The actions of one process, or of one rank of a gang, from the notice to the last save."""

    _phase: _Phase = _Phase.NEW
    _save_s: float | None = None
    _before: Mapping[str, Unsent] = field(default_factory=dict)

    def turn(
        self, left_s: float | None, longest_step_s: float | None, save_s: float | None, margin: float, saving: bool
    ) -> Turn:
        """Return the action after a step.

        Until the last save begins, there must always be time for another step, the rest of the save in the background
        and the last save.

        Args:
            left_s: seconds until the end; None: the end is not known exactly.
            longest_step_s: seconds of the longest step so far, because any step may be an evaluation or wait for data;
                None: not known.
            save_s: seconds of a save until it is durable; None: not known.
            margin: safety factor for the saves.
            saving: whether a save is running in the background, on any rank.
        """
        if self._phase is _Phase.NEW:
            self._save_s = save_s
            if saving:
                self._phase = _Phase.SENDING
        if self._phase is _Phase.OVER or left_s is None or longest_step_s is None or self._save_s is None:
            return self._flush()
        if left_s - longest_step_s < 2 * margin * self._save_s:
            return self._flush()
        if self._phase is _Phase.SENDING:
            return Turn.GO_ON if saving else self._flush()
        return Turn.LOOK

    def compare(self, unsent: Mapping[str, Unsent]) -> tuple[int, int]:
        """Return how many bytes can be sent ahead, and how many a save would have to write now, on this rank.

        Args:
            unsent: the parts that a save would have to write now. Those that were equal at the previous call can be
                sent ahead.
        """
        before, self._before = self._before, unsent
        ahead_bytes = sum(part.size_bytes for name, part in unsent.items() if before.get(name) == part)
        return ahead_bytes, sum(part.size_bytes for part in unsent.values())

    def next_turn(self, ahead_bytes: int, unsent_bytes: int) -> Turn:
        """Return the action, from the numbers of `compare`, in a gang the greatest of all ranks.

        `GO_ON`: save in the background.
        """
        if self._phase is _Phase.NEW:
            self._phase = _Phase.LOOKED
            return Turn.LOOK
        if ahead_bytes == 0 or ahead_bytes < LEAST_SHARE * unsent_bytes:
            return self._flush()
        self._phase = _Phase.SENDING
        return Turn.GO_ON

    def _flush(self) -> Turn:
        self._phase = _Phase.OVER
        return Turn.FLUSH
