"""Kubernetes: SIGTERM to a container's first process, SIGKILL when the pod's grace period is over."""

import os
from collections.abc import Mapping

from mizzen.notices.notice import Notice, Watcher, Window

WINDOW_S = 30.0
"""The default of `terminationGracePeriodSeconds`."""


class KubernetesWatcher(Watcher):
    """A pod. The downward API has no field for the grace period: give it as a value in `MIZZEN_NOTICE_WINDOW_S`, or
    through an annotation. A `preStop` hook runs within the grace period, so take its time off.
    """

    platform = "kubernetes"

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        """Raises ValueError where `MIZZEN_NOTICE_WINDOW_S` is no number of seconds."""
        environ = os.environ if environ is None else environ
        super().__init__(Window.told(environ, WINDOW_S, "Kubernetes' default of terminationGracePeriodSeconds"))

    def poll(self) -> Notice | None:
        """None: only the signal tells."""
        return None
