"""Detects the platform: first from the environment, then by querying all metadata servers concurrently."""

import os
import threading
import time
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from mizzen.notices.notice import Watcher

if TYPE_CHECKING:
    from mizzen.notices.metadata import CloudWatcher

DETECT_S = 1.0
"""Timeout for the responses of all metadata servers together, in seconds."""

_WATCHERS = {
    "mizzen": ("MIZZEN_GRACE_S", "signals", "AgentWatcher"),
    "slurm": ("SLURM_JOB_ID", "slurm", "SlurmWatcher"),
    "runpod": ("RUNPOD_POD_ID", "signals", "RunPodWatcher"),
    "vast": ("VAST_CONTAINERLABEL", "signals", "VastWatcher"),
    "kubernetes": ("KUBERNETES_SERVICE_HOST", "signals", "KubernetesWatcher"),
    "aws": ("", "aws", "AwsWatcher"),
    "gcp": ("", "gcp", "GcpWatcher"),
    "azure": ("", "azure", "AzureWatcher"),
    "file": ("MIZZEN_NOTICE_FILE", "file", "FileWatcher"),
    "sigterm": ("", "signals", "SigtermWatcher"),
}
"""Platform to the variable that shows it (empty: none does), and the module and class of its watcher."""

PLATFORMS = tuple(_WATCHERS)
"""Platforms in the order of detection: launchers of the process before the clouds it runs on."""

PLATFORM_OF_PRIOR: Mapping[str, str | None] = {
    "on-demand": None,
    "spot": None,
    "aws-spot": "aws",
    "gcp-spot": "gcp",
    "gcp-preemptible": "gcp",
    "azure-spot": "azure",
    "runpod-spot": "runpod",
    "vast-interruptible": "vast",
    "unknown": None,
}
"""Name of an interruption prior (`mizzen.cadence`) to the platform that gives the notices; None: detect it."""


def from_environment(environ: Mapping[str, str]) -> Watcher | None:
    """Return the watcher of the platform that the environment names; None if it names none. Sends no requests.

    Raises:
        ValueError: `MIZZEN_PLATFORM` is not in `PLATFORMS` or `PLATFORM_OF_PRIOR`, or another variable of mizzen is
        invalid.
    """
    named = environ.get("MIZZEN_PLATFORM")
    if named is not None and named in PLATFORM_OF_PRIOR:
        # An agent passes the interruption prior to its tasks, and receives the platform's notices itself.
        named = None if environ.get("MIZZEN_GRACE_S") else PLATFORM_OF_PRIOR[named]
    if named and named not in PLATFORMS:
        raise ValueError(f"MIZZEN_PLATFORM={named!r}: must be one of {', '.join(PLATFORMS)}")
    shown = (platform for platform, (variable, _, _) in _WATCHERS.items() if environ.get(variable))
    platform = named or next(shown, None)
    return None if platform is None else _watcher(platform, environ)


def _watcher(platform: str, environ: Mapping[str, str]) -> Any:
    """Return a new watcher of a platform. Only its module is imported: those of clouds import the HTTP client."""
    _, module, name = _WATCHERS[platform]
    return getattr(import_module(f"mizzen.notices.{module}"), name)(environ=environ)


def detect(environ: Mapping[str, str] | None = None, timeout_s: float = DETECT_S) -> Watcher:
    """Return the watcher of this platform; a `SigtermWatcher` if none is recognised. Takes at most `timeout_s`.

    All clouds use the same metadata address, so each is recognised by its response: AWS by a token and an instance id,
    GCP by its header and a numeric id, Azure by its description of the machine. If several match, the first in
    `PLATFORMS` is used.

    Args:
        environ: variables to read; `os.environ` by default.
        timeout_s: timeout for all metadata servers together.

    Raises:
        ValueError: `MIZZEN_PLATFORM`, another variable of mizzen, or a metadata address is invalid.
    """
    environ = os.environ if environ is None else environ
    found = from_environment(environ)
    if found is not None:
        return found
    deadline_s = time.monotonic() + timeout_s
    clouds = ["aws", "gcp", "azure"]
    if environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        clouds.remove("aws")
    probes = [_Probe(_watcher(cloud, environ)) for cloud in clouds]
    for probe in probes:
        probe.start()
    for probe in probes:
        # A probe that still waits is abandoned: its daemon thread holds a socket until its own timeout.
        probe.join(max(0.0, deadline_s - time.monotonic()))
        if probe.positive:
            return probe.watcher
    return _watcher("sigterm", environ)  # type: ignore[no-any-return]


class _Probe(threading.Thread):
    """A thread that checks whether a metadata server belongs to its platform."""

    def __init__(self, watcher: "CloudWatcher") -> None:
        super().__init__(name=f"mizzen-probe-{watcher.platform}", daemon=True)
        self.watcher = watcher
        self.positive = False

    def run(self) -> None:
        """Query the server and set `positive`; any error means False."""
        try:
            self.positive = self.watcher.answers()
        except Exception:
            self.positive = False
