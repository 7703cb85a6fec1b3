"""A process that is stopped by SIGTERM and knows nothing of its platform."""

import os
from collections.abc import Mapping

from mizzen.notices.notice import Notice, Watcher, Window

WINDOW_S = 10.0
"""What container engines leave by default, the shortest of the usual ones (systemd: 90 s)."""


def window(environ: Mapping[str, str]) -> Window:
    """From a SIGTERM of unknown cause to SIGKILL."""
    return Window.told(environ, WINDOW_S, "the usual default of container engines")


class SigtermWatcher(Watcher):
    """SIGTERM, then SIGKILL after `MIZZEN_NOTICE_WINDOW_S` or 10 s."""

    platform = "sigterm"

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        """Raises ValueError where `MIZZEN_NOTICE_WINDOW_S` is no number of seconds."""
        super().__init__(window(os.environ if environ is None else environ))

    def poll(self) -> Notice | None:
        """None: only the signal tells."""
        return None
