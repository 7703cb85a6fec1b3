"""RunPod: SIGTERM to the container, SIGKILL five seconds later."""

import os
import signal
from collections.abc import Mapping

from mizzen.notices.notice import Kind, Notice, Watcher, Window

WINDOW_S = 5.0


class RunPodWatcher(Watcher):
    """A spot pod of RunPod: five seconds are enough for small checkpoints only."""

    platform = "runpod"

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        """Raises ValueError where `MIZZEN_NOTICE_WINDOW_S` is no number of seconds."""
        environ = os.environ if environ is None else environ
        super().__init__(Window.told(environ, WINDOW_S, "RunPod's time from SIGTERM to SIGKILL"))

    def poll(self) -> Notice | None:
        """None: only the signal tells."""
        return None

    def on_signal(self, received: int) -> Notice:
        """The pod was outbid, or is being stopped."""
        return self._notice(Kind.PREEMPT, signal.Signals(received).name)
