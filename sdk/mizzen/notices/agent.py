"""mizzen's own agent: SIGTERM to the task, not to what it started, and SIGKILL to all after `MIZZEN_GRACE_S`."""

import os
import signal
from collections.abc import Mapping

from mizzen.notices import sigterm
from mizzen.notices.notice import Kind, Notice, Watcher, Window


class AgentWatcher(Watcher):
    """A task of mizzen's. The agent hears of the machine's end from the platform, so the task asks nobody else."""

    platform = "mizzen"

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        """Raises ValueError where `MIZZEN_GRACE_S` is no number of seconds."""
        environ = os.environ if environ is None else environ
        super().__init__(Window.of_variable(environ, "MIZZEN_GRACE_S") or sigterm.window(environ))

    def poll(self) -> Notice | None:
        """None: only the signal tells."""
        return None

    def on_signal(self, received: int) -> Notice:
        """The scheduler takes the slots, or the task is stopped."""
        return self._notice(Kind.PREEMPT, signal.Signals(received).name)
