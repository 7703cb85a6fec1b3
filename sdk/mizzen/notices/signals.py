"""mizzen's agent and platforms that only send SIGTERM, followed by SIGKILL; and vast.ai, which gives no notice."""

import math
import os
import time
from collections.abc import Mapping
from dataclasses import replace
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


class AgentWatcher(Watcher):
    """Watcher of a mizzen task. The agent receives the platform's notices, so the task does not poll the platform.

    The agent sends SIGTERM to the task, but not to its child processes; SIGKILL to all after `MIZZEN_GRACE_S`. If the
    owner of the machine leaves less time, SIGKILL comes earlier. Before SIGTERM the agent writes the time to the file
    at `MIZZEN_DEADLINE_FILE`, in seconds of the clock `CLOCK_BOOTTIME`: `{"deadline_boot_s": 81234.5}`.
    """

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
