"""Runs saves in a background thread, one at a time."""

import threading
import time
from collections.abc import Callable

from mizzen.checkpoint.errors import CheckpointError, StaleAttemptError
from mizzen.checkpoint.manifest import Manifest


class Saving:
    """A save that runs in a background thread. The interpreter waits for the thread before it exits."""

    def __init__(self, step: int, work: Callable[[], Manifest], ended: "Callable[[Saving], None]") -> None:
        """Start `work` in a thread. `ended` is called in that thread afterwards, on success and on failure."""
        self.step = step
        """The step whose state is saved."""
        self.error: BaseException | None = None
        """The error, if the save has failed."""
        self.manifest: Manifest | None = None
        """The committed checkpoint, if the save has succeeded."""
        self.told = False
        """Whether `wait` has already raised the error or returned the manifest."""
        self.began_s = time.monotonic()
        self._work, self._ended = work, ended
        self._thread = threading.Thread(target=self._run, name="mizzen-save", daemon=False)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether the save has ended, with success or failure."""
        return not self._thread.is_alive()

    def wait(self, timeout_s: float | None = None) -> Manifest:
        """Wait until the checkpoint is durable, and return its manifest.

        Raises:
            TimeoutError: the save is still running after `timeout_s` seconds.
            StaleAttemptError: a newer attempt has claimed the root; nothing was committed.
            CheckpointError: the save failed for another reason, given as `__cause__`; earlier checkpoints are
                unchanged.
        """
        self.join(timeout_s)
        if not self.done:
            raise TimeoutError(f"the checkpoint of step {self.step} is still being written after {timeout_s} s")
        self.told = True
        if isinstance(self.error, CheckpointError):
            raise self.error
        if self.manifest is None:
            raise CheckpointError(f"the checkpoint of step {self.step} was not saved: {self.error}") from self.error
        return self.manifest

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until the save has ended, with success or failure, or until `timeout_s` seconds have passed."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            self.manifest = self._work()
        except BaseException as error:
            self.error = error
        finally:
            self._ended(self)
            del self._work, self._ended


class BackgroundSave:
    """The newest background save of one process, until its result has been handled."""

    def __init__(self, tolerate: Callable[[int, BaseException], object]) -> None:
        """`tolerate` reports the step and the error of a failed save, or raises an error."""
        self._tolerate = tolerate
        self._saving: Saving | None = None
        self._failed = False

    @property
    def has_failed(self) -> bool:
        """Whether the newest save has failed, even if its result was handled by `wait` or `wait_tolerating`."""
        return self._failed if self._saving is None else self._saving.done and self._saving.error is not None

    @property
    def step(self) -> int | None:
        """The step of the newest save until its result was handled; None: there is no such save."""
        return None if self._saving is None else self._saving.step

    @property
    def is_running(self) -> bool:
        """Whether the save is running."""
        return self._saving is not None and not self._saving.done

    def start(self, step: int, work: Callable[[], Manifest], ended: Callable[[Saving], None]) -> Saving:
        """Start a save; see `Saving`. The result of the previous one must have been handled."""
        self._saving = Saving(step, work, ended)
        return self._saving

    def holds(self, step: int) -> bool:
        """Return whether the newest save is the one of `step`, even if it has ended."""
        return self._saving is not None and self._saving.step == step

    def wait_tolerating(self) -> None:
        """Wait for the save. Raise `StaleAttemptError` if it was fenced; call `tolerate` if it failed otherwise."""
        saving = self._ended()
        if saving is None:
            return
        if isinstance(saving.error, StaleAttemptError):
            raise saving.error
        if saving.error is not None and not saving.told:
            self._tolerate(saving.step, saving.error)

    def wait(self) -> None:
        """Wait for the save, and raise its error if it failed; see `Saving.wait`."""
        saving = self._ended()
        if saving is not None:
            saving.wait()

    def join(self, timeout_s: float | None) -> None:
        """Wait until the save has ended, with success or failure, or until `timeout_s` seconds have passed."""
        if self._saving is not None:
            self._saving.join(timeout_s)

    def _ended(self) -> Saving | None:
        """Wait for the save, and return it; None: its result was handled before."""
        if self._saving is None:
            return None
        self._saving.join()
        self._failed = self.has_failed
        saving, self._saving = self._saving, None
        return saving
