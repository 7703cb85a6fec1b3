"""Platforms that only send SIGTERM, followed by SIGKILL; and vast.ai, which gives no notice at all."""

import os
from collections.abc import Mapping
from typing import ClassVar

from mizzen.notices.notice import Kind, Notice, Watcher, Window


class SigtermWatcher(Watcher):
    """Watcher of an unknown platform: SIGTERM, then SIGKILL after `MIZZEN_NOTICE_WINDOW_S` or 10 s.

    Ten seconds are the shortest usual time from SIGTERM to SIGKILL (systemd: 90 s).
    """

    platform = "sigterm"
    usual: ClassVar[Window] = Window(10.0, "the usual default of container engines")
    """The window if the environment names none."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        """Read the window from the environment. Raises ValueError if `MIZZEN_NOTICE_WINDOW_S` is invalid."""
        super().__init__(self.usual.or_told(os.environ if environ is None else environ))


class KubernetesWatcher(SigtermWatcher):
    """Watcher of a Kubernetes pod: SIGTERM to a container's first process, SIGKILL after the pod's grace period.

    The downward API does not expose the grace period: set `MIZZEN_NOTICE_WINDOW_S` to it, directly or through an
    annotation. A `preStop` hook runs within the grace period, so subtract its duration.
    """

    platform = "kubernetes"
    usual = Window(30.0, "Kubernetes' default of terminationGracePeriodSeconds")


class RunPodWatcher(SigtermWatcher):
    """Watcher of a RunPod spot pod, which was outbid or is being stopped. Five seconds fit small checkpoints."""

    platform = "runpod"
    usual = Window(5.0, "RunPod's time from SIGTERM to SIGKILL")
    kind_of_signal = Kind.PREEMPT


class VastWatcher(Watcher):
    """Watcher of vast.ai, which pauses an interruptible instance without a notice: only regular saves protect it.

    A SIGTERM is not from vast.ai: a user or a supervisor stops the container. It is handled by `SigtermWatcher`.
    """

    platform = "vast"

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        super().__init__(Window(0.0, "vast.ai pauses an instance at once"))

    def on_signal(self, received: int) -> Notice:
        """Return the notice of a signal. It is not from vast.ai."""
        return SigtermWatcher({}).on_signal(received)
