"""Recognises looks at the data, iterations that do not train, which must not change the position in the data.

    checkpointer.restore()
    images, labels = next(iter(loader))  # A look, for example for the number of pixels.
    for epoch in range(loader.epoch, epochs):
        shown = next(iter(loader))  # A look in each epoch.
        for images, labels in loader:
            ...
        accuracy = measure(model, loader)  # Another one.

An iteration is a look if the next one begins before the training has changed anything. The next iteration then begins
where the look began. One exception: if each step takes the first batches of new iterations, all of them count.

A restarted script takes its first looks again, and must get the batches of its first start, or of the resumed epoch,
not the rest of that epoch. So these looks are saved: the lines that took them, and whether a loop repeats them.
"""

import warnings
from collections.abc import Callable
from typing import Any, TypeAlias

from mizzen.checkpoint import loops
from mizzen.checkpoint.errors import CheckpointWarning, StateError

SavedLooks: TypeAlias = list[tuple[str, bool]]
"""The looks before the first training step: the lines that took each one, and whether each epoch takes it again."""


class Looks:
    """The looks at one loader."""

    def __init__(self, place: Callable[[], Any], go_to: Callable[[Any], None]) -> None:
        """Use `place`, which returns the loader's position in the data, and `go_to`, which sets it."""
        self._place = place
        self._go_to = go_to
        self.has_trained: Callable[[], bool | None] = lambda: True
        """Whether the training has changed anything. If that is not known (None), no iteration is a look."""
        self.mark: Callable[[], Any] = lambda: None
        """Returns a value that differs after each step of the training; None: not known."""
        self.is_repeated = False
        """Whether the last iteration repeats a look of the first start."""
        self.is_complete = False
        """Whether the last iteration has yielded all batches."""
        self.expect([], None, None)

    def expect(self, looks: SavedLooks, first: Any, epoch: Any, line: str = "") -> None:
        """Begin after a restore. `looks` will be repeated from `first`, or in each epoch, now from `epoch` on.

        `line` is that of the iteration that will be resumed, in which the training trains; "" if there is none.
        """
        self.before: Any = None
        self._mark: Any = None
        self.is_repeated = False
        self.single = False
        """Whether the restored training takes the first batches of new iterations in each step: all of them count."""
        self.trains_within = False
        """Whether the training has trained within an iteration, not only on the first batch of ended ones."""
        self._restored = loops.stack()
        self._stack: loops.Stack | None = None
        self._line = line
        self._new: list[loops.Stack] | None = None if looks else []
        self._saved = looks
        self.awaited = [(text, epoch if again else first) for text, again in looks]
        """The looks of the first start that are still to be repeated: their lines and their places."""

    def pending(self, is_within: bool) -> Any:
        """Return the place before the last iteration if that is a look so far, and is not going on; else None."""
        return self.before if self.is_repeated or (not is_within and self._is_look()) else None

    @property
    def line(self) -> str:
        """The lines that the script executed when it began the last iteration, also if that was before a restart."""
        return self._line if self._stack is None else loops.text(self._stack, self._restored)

    def saved(self, is_within: bool) -> SavedLooks:
        """Return the looks that a restart will repeat. `is_within`: an iteration is going on."""
        if self._new and self.has_trained():
            here, new, self._new = loops.stack(), self._new, None
            repeated = [loops.share_loop(one, here, self._restored) for one in new]
            single, looks = self.is_single(is_within), zip(new, repeated, strict=True)
            self._saved = [(loops.text(one, self._restored), again) for one, again in looks if not (again and single)]
        return self._saved

    def is_single(self, is_within: bool) -> bool:
        """Return whether each step takes the first batches of new iterations. `is_within`: see `saved`."""
        return self.single if self.has_trained() is False else not (is_within or self.trains_within)

    def undo(self) -> None:
        """If the last iteration was a look, go back to the place before it."""
        if self._is_look():
            if self._new is not None and self._stack and not self.is_repeated and self.has_trained() is False:
                self._new.append(self._stack)
            self._go_to(self.before)
        self.before, self.is_repeated = None, False

    def _is_look(self) -> bool:
        if self.before is None:
            return False
        if self.is_repeated or (self.has_trained() is False and not self.single):
            return True
        return bool(self._mark == self.mark()) and (self.is_complete or self.trains_within)

    def check(self) -> None:
        """Check that the training does not use a batch that only a look has fetched.

        Raises:
            StateError: it does, because this start of the script takes fewer looks than the first one.
        """
        if self.is_repeated and self.has_trained():
            raise StateError(
                f"the first start of this training looked at this loader {len(self._saved)} times after restore() and "
                "before it trained; this one has not. Take such batches at every start, or before restore()"
            )

    def go_on(self) -> None:
        """Continue the last iteration with its next batch.

        Raises:
            StateError: see `check`.
        """
        self.check()
        if not self.trains_within and self.before is not None:
            self.trains_within = bool(self._mark != self.mark())

    def begin(self, left_early: bool) -> None:
        """Begin an iteration, which may be a look. `left_early`: the last one was left before its end."""
        self.undo()
        self._stack = loops.stack()
        trained, self._mark = self.has_trained(), self.mark()
        if trained is None and left_early:
            message = (
                "an iteration of a ResumableLoader was left early before the first step(). Without tracked torch "
                "parameters, that ends an epoch; if it was only a look at a batch, take it before restore()"
            )
            warnings.warn(message, CheckpointWarning, stacklevel=3)
        if trained is not False:
            self.awaited = []
        if self._mark is None:
            return
        self.before, self.is_complete = self._place(), False
        if trained is not False:
            return
        while self.awaited and not self.is_repeated:
            text, place = self.awaited.pop(0)
            # Other looks are not repeated, as those of `if step == 0`.
            if text == self.line:
                self.is_repeated = True
                self._go_to(place)
        if not self.is_repeated and self._line == self.line:
            self.before = None  # The resumed iteration, even if the script leaves it at once.
