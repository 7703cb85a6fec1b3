"""Runs a save in a background thread."""

import threading
import time
from collections.abc import Callable

from mizzen.checkpoint.errors import CheckpointError
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
