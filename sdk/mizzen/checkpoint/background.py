"""Saves in the background: one at a time, so that a next one waits until the one before is written."""

import threading
import time
from collections.abc import Callable

from mizzen.checkpoint.errors import CheckpointError
from mizzen.checkpoint.manifest import Manifest


class Saving:
    """A save that goes on in a thread. The interpreter waits for it before it ends."""

    def __init__(self, step: int, work: Callable[[], Manifest], ended: "Callable[[Saving], None]") -> None:
        """Begin to do `work`; `ended` is called in the thread afterwards, whether it worked or not."""
        self.step = step
        """The step whose state it saves."""
        self.error: BaseException | None = None
        """Why it failed, once it has."""
        self.manifest: Manifest | None = None
        """What it committed, once it has."""
        self.told = False
        """Whether somebody has waited and got the error."""
        self.began_s = time.monotonic()
        self._work, self._ended = work, ended
        self._thread = threading.Thread(target=self._run, name="mizzen-save", daemon=False)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self, timeout_s: float | None = None) -> Manifest:
        """The committed checkpoint, once it is durable.

        Raises:
            TimeoutError: it is still being written after `timeout_s`.
            StaleAttemptError: a newer attempt has claimed the root; nothing was committed.
            CheckpointError: the save failed for another reason, which is its cause; the earlier ones are as they were.
        """
        self.join(timeout_s)
        if not self.done:
            raise TimeoutError(f"the checkpoint of step {self.step} is still being written after {timeout_s} s")
        self.told = True
        if isinstance(self.error, CheckpointError):
            raise self.error
        if self.manifest is None:
            raise CheckpointError(f"the checkpoint of step {self.step} failed: {self.error}") from self.error
        return self.manifest

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until it has ended, well or not, or until `timeout_s` have passed."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            self.manifest = self._work()
        except BaseException as error:
            self.error = error
        finally:
            self._ended(self)
            del self._work, self._ended
