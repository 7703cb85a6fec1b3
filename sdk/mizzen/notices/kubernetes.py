"""Kubernetes: SIGTERM to a container's first process, then SIGKILL at the end of the pod's grace period."""

import os
from collections.abc import Mapping

from mizzen.notices.notice import Notice, Watcher, Window

WINDOW_S = 30.0
"""The default of `terminationGracePeriodSeconds`."""


class KubernetesWatcher(Watcher):
    """Watcher of a Kubernetes pod.

    The downward API does not expose the grace period: set `MIZZEN_NOTICE_WINDOW_S` to it, directly or through an
    annotation. A `preStop` hook runs within the grace period, so subtract its duration.
    """

    platform = "kubernetes"

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        """Read the window from the environment. Raises ValueError if `MIZZEN_NOTICE_WINDOW_S` is invalid."""
        environ = os.environ if environ is None else environ
        super().__init__(Window.told(environ, WINDOW_S, "Kubernetes' default of terminationGracePeriodSeconds"))

    def poll(self) -> Notice | None:
        """Return None: the notice is a signal."""
        return None
