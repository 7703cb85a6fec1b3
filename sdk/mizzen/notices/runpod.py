"""RunPod: SIGTERM to the container, SIGKILL five seconds later."""

import os
import signal
from collections.abc import Mapping

from mizzen.notices.notice import Kind, Notice, Watcher, Window

WINDOW_S = 5.0


class RunPodWatcher(Watcher):
    """Watcher of a RunPod spot pod. Its five seconds are enough only for small checkpoints."""

    platform = "runpod"

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        """Read the window from the environment. Raises ValueError if `MIZZEN_NOTICE_WINDOW_S` is invalid."""
        environ = os.environ if environ is None else environ
        super().__init__(Window.told(environ, WINDOW_S, "RunPod's time from SIGTERM to SIGKILL"))

    def poll(self) -> Notice | None:
        """Return None: the notice is a signal."""
        return None

    def on_signal(self, received: int) -> Notice:
        """Return the notice of a signal: the pod was outbid, or is being stopped."""
        return self._notice(Kind.PREEMPT, signal.Signals(received).name)
