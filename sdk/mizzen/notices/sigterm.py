"""Notices by SIGTERM on an unknown platform."""

import os
from collections.abc import Mapping

from mizzen.notices.notice import Notice, Watcher, Window

WINDOW_S = 10.0
"""The default of container engines, the shortest usual time from SIGTERM to SIGKILL (systemd: 90 s)."""


def window(environ: Mapping[str, str]) -> Window:
    """Return the time from a SIGTERM of unknown origin to SIGKILL."""
    return Window.told(environ, WINDOW_S, "the usual default of container engines")


class SigtermWatcher(Watcher):
    """Watcher of an unknown platform: SIGTERM, then SIGKILL after `MIZZEN_NOTICE_WINDOW_S` or 10 s."""

    platform = "sigterm"

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        """Read the window from the environment. Raises ValueError if `MIZZEN_NOTICE_WINDOW_S` is invalid."""
        super().__init__(window(os.environ if environ is None else environ))

    def poll(self) -> Notice | None:
        """Return None: the notice is a signal."""
        return None
