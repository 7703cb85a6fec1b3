"""mizzen's agent: SIGTERM to the task, but not to its child processes; SIGKILL to all after `MIZZEN_GRACE_S`."""

import os
import signal
from collections.abc import Mapping

from mizzen.notices import sigterm
from mizzen.notices.notice import Kind, Notice, Watcher, Window


class AgentWatcher(Watcher):
    """Watcher of a mizzen task. The agent receives the platform's notices, so the task does not poll the platform."""

    platform = "mizzen"

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        """Read the window from the environment. Raises ValueError if `MIZZEN_GRACE_S` is invalid."""
        environ = os.environ if environ is None else environ
        super().__init__(Window.of_variable(environ, "MIZZEN_GRACE_S") or sigterm.window(environ))

    def poll(self) -> Notice | None:
        """Return None: the notice is a signal."""
        return None

    def on_signal(self, received: int) -> Notice:
        """Return the notice of a signal: the workload is preempted, or the task is stopped."""
        return self._notice(Kind.PREEMPT, signal.Signals(received).name)
