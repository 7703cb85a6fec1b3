"""Detects the platform: first from the environment, then by querying all metadata servers concurrently."""

import os
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from mizzen.notices.agent import AgentWatcher
from mizzen.notices.kubernetes import KubernetesWatcher
from mizzen.notices.notice import Watcher
from mizzen.notices.runpod import RunPodWatcher
from mizzen.notices.sigterm import SigtermWatcher
from mizzen.notices.slurm import SlurmWatcher
from mizzen.notices.vast import VastWatcher

if TYPE_CHECKING:
    from mizzen.notices.aws import AwsWatcher
    from mizzen.notices.azure import AzureWatcher
    from mizzen.notices.gcp import GcpWatcher

DETECT_S = 1.0
"""Timeout for the responses of all metadata servers together, in seconds."""

PLATFORMS = ("mizzen", "slurm", "runpod", "vast", "kubernetes", "aws", "gcp", "azure", "file", "sigterm")
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
    platform = named or _guess(environ)
    if platform == "mizzen":
        return AgentWatcher(environ)
    if platform == "slurm":
        return SlurmWatcher(environ)
    if platform == "runpod":
        return RunPodWatcher(environ)
    if platform == "vast":
        return VastWatcher()
    if platform == "kubernetes":
        return KubernetesWatcher(environ)
    if platform == "file":
        from mizzen.notices.file import FileWatcher

        return FileWatcher(environ)
    if platform == "sigterm":
        return SigtermWatcher(environ)
    if platform is None:
        return None
    return _clouds(environ, named=True)[platform]


def _clouds(environ: Mapping[str, str], named: bool = False) -> "dict[str, AwsWatcher | GcpWatcher | AzureWatcher]":
    """Return the watchers that use metadata servers, in order. Omits AWS if its SDKs' variable disables the server."""
    from mizzen.notices.aws import AwsWatcher
    from mizzen.notices.azure import AzureWatcher
    from mizzen.notices.gcp import GcpWatcher

    found: dict[str, AwsWatcher | GcpWatcher | AzureWatcher] = {}
    if named or environ.get("AWS_EC2_METADATA_DISABLED", "").lower() != "true":
        found["aws"] = AwsWatcher(environ=environ)
    found["gcp"] = GcpWatcher(environ=environ)
    found["azure"] = AzureWatcher(environ=environ)
    return found


def _guess(environ: Mapping[str, str]) -> str | None:
    given = {name for name, text in environ.items() if text}
    if "MIZZEN_GRACE_S" in given:
        return "mizzen"
    if "SLURM_JOB_ID" in given:
        return "slurm"
    if "RUNPOD_POD_ID" in given:
        return "runpod"
    if "VAST_CONTAINERLABEL" in given:
        return "vast"
    if "KUBERNETES_SERVICE_HOST" in given:
        return "kubernetes"
    if "MIZZEN_NOTICE_FILE" in given:
        return "file"
    return None


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
    probes = [_Probe(cloud) for cloud in _clouds(environ).values()]
    for probe in probes:
        probe.start()
    for probe in probes:
        # A probe that still waits is abandoned: its daemon thread holds a socket until its own timeout.
        probe.join(max(0.0, deadline_s - time.monotonic()))
        if probe.positive:
            return probe.watcher
    return SigtermWatcher(environ)


class _Probe(threading.Thread):
    """A thread that checks whether a metadata server belongs to its platform."""

    def __init__(self, watcher: "AwsWatcher | GcpWatcher | AzureWatcher") -> None:
        super().__init__(name=f"mizzen-probe-{watcher.platform}", daemon=True)
        self.watcher = watcher
        self.positive = False

    def run(self) -> None:
        """Query the server and set `positive`; any error means False."""
        try:
            self.positive = self.watcher.answers()
        except Exception:
            self.positive = False
