"""Recognises looks at a batch before the training, which must not change the position in the data.

    checkpointer.restore()
    images, labels = next(iter(loader))  # A look, for example for the number of pixels.
    for images, labels in loader:
        ...

An iteration is a look if the next one begins before the training has changed anything. The next iteration then begins
where the look began. The number of looks is saved, because a restarted script looks again: it then gets the same
batches as at its first start, not the rest of the resumed epoch.
"""

import warnings
from collections.abc import Callable
from typing import Any

from mizzen.checkpoint.errors import CheckpointWarning, StateError


class Looks:
    """The looks at one loader since the training was restored or begun."""

    def __init__(self, place: Callable[[], Any], go_to: Callable[[Any], None]) -> None:
        """Use `place`, which returns the loader's position in the data, and `go_to`, which sets it."""
        self._place = place
        self._go_to = go_to
        self.has_trained: Callable[[], bool | None] = lambda: True
        """Whether the training has changed anything. If that is not known (None), no iteration is a look."""
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
        """Repeat `number` looks from the position `first` on, before the next iteration that counts."""
        self.before, self.is_repeated = None, False
        self._done, self._expected, self._first = 0, number, first

    def undo(self) -> None:
        """If the last iteration was a look, go back to the place before it."""
        before, self.before = self.before, None
        if before is not None and (self.is_repeated or self.has_trained() is False):
            self._done += 1
            self._go_to(before)
        self.is_repeated = False

    def check(self) -> None:
        """Check that the training does not use a batch that only a look has fetched.

        Raises:
            StateError: it does, because this start of the script takes fewer looks than the first one.
        """
        if self.is_repeated and self.has_trained():
            raise StateError(
                f"the first start of this training looked at this loader {self.number} times after restore() and "
                "before it trained; this one has not. Take such batches at every start, or before restore()"
            )

    def begin(self, left_early: bool) -> None:
        """Begin an iteration, which may be a look. `left_early`: the last one was left before its end."""
        self.undo()
        trained = self.has_trained()
        if trained is not False:
            self._done, self._expected = self._done + self._expected, 0
            if trained is None and left_early:
                message = (
                    "an iteration of a ResumableLoader was left early before the first step(). Without tracked torch "
                    "parameters, that ends an epoch; if it was only a look at a batch, take it before restore()"
                )
                warnings.warn(message, CheckpointWarning, stacklevel=3)
            return
        self.before = self._place()
        if self._expected:
            self._expected -= 1
            self.is_repeated = True
            self._go_to(self._first)
