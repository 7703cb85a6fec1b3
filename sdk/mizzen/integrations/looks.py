"""Tells a look at a batch from the training, so that a look before the training does not count.

    checkpointer.restore()
    images, labels = next(iter(loader))  # A look, for example for the number of pixels.
    for images, labels in loader:
        ...

An iteration is a look if the next one begins before the training has changed anything. The next one then begins where
the look began. The number of looks is saved, because a restarted script looks again: it sees what it saw at its first
start, not the rest of the resumed epoch.
"""

from collections.abc import Callable
from typing import Any


class Looks:
    """The looks at one loader since the training was restored or begun."""

    def __init__(self, place: Callable[[], Any], go_to: Callable[[Any], None]) -> None:
        """Use `place`, which returns the loader's position in the data, and `go_to`, which sets it."""
        self._place = place
        self._go_to = go_to
        self.has_trained: Callable[[], bool] = lambda: True
        """Whether the training has changed anything. If that is not known, no iteration is a look."""
        self.before: Any = None
        """The place before the last iteration, if it may be a look."""
        self.is_repeated = False
        """Whether the last iteration repeats a look of the first start."""
        self.expect(0, None)

    @property
    def number(self) -> int:
        """Number of looks of the first start."""
        return self._done + self._expected + self.is_repeated

    def expect(self, number: int, first: Any) -> None:
        """Repeat `number` looks from the place `first` on, before the next iteration that counts."""
        self.before, self.is_repeated = None, False
        self._done, self._expected, self._first = 0, number, first

    def undo(self) -> None:
        """If the last iteration was a look, go back to the place before it."""
        before, self.before = self.before, None
        if before is not None and (self.is_repeated or not self.has_trained()):
            self._done += 1
            self._go_to(before)
        self.is_repeated = False

    def begin(self) -> None:
        """Begin an iteration, which may be a look."""
        self.undo()
        if self.has_trained():
            self._expected = 0
            return
        self.before = self._place()
        if self._expected:
            self._expected -= 1
            self.is_repeated = True
            self._go_to(self._first)
