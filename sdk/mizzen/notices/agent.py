"""mizzen's agent: SIGTERM to the task, but not to its child processes; SIGKILL to all after `MIZZEN_GRACE_S`.

If the owner of the machine leaves less time, SIGKILL comes earlier. Before SIGTERM the agent writes the time to the
file at `MIZZEN_DEADLINE_FILE`, in seconds of the clock `CLOCK_BOOTTIME`: `{"deadline_boot_s": 81234.5}`.
"""

import math
import os
import time
from collections.abc import Mapping
from dataclasses import replace

from mizzen.notices.notice import Kind, Notice, Watcher, Window
from mizzen.notices.signals import SigtermWatcher


class AgentWatcher(Watcher):
    """Watcher of a mizzen task. The agent receives the platform's notices, so the task does not poll the platform."""

    platform = "mizzen"
    kind_of_signal = Kind.PREEMPT

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        """Read the window from the environment. Raises ValueError if `MIZZEN_GRACE_S` is invalid."""
        environ = os.environ if environ is None else environ
        self._deadline_file = environ.get("MIZZEN_DEADLINE_FILE")
        super().__init__(Window.of_variable(environ, "MIZZEN_GRACE_S") or SigtermWatcher.usual.or_told(environ))

    def exact(self, notice: Notice) -> Notice | None:
        """Return the notice with the agent's deadline; None: the agent has written none."""
        if not self._deadline_file:
            return None
        import json

        try:
            with open(self._deadline_file, "rb") as file:
                deadline_s = float(json.loads(file.read(4096))["deadline_boot_s"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        left_s = deadline_s - time.clock_gettime(time.CLOCK_BOOTTIME)
        return replace(notice, ends_at_s=self._clock() + left_s) if math.isfinite(left_s) else None
