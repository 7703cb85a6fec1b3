"""Which platform this is: by the environment first, then by asking the metadata servers, all at once."""

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
"""How long the metadata servers have to answer."""

PLATFORMS = ("mizzen", "slurm", "runpod", "vast", "kubernetes", "aws", "gcp", "azure", "file", "sigterm")
"""In the order in which they are looked for: who starts the process before where it runs."""

OF_PRIORS: Mapping[str, str | None] = {
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
"""Names of `mizzen.cadence` for how often a platform interrupts: who gives notices there; None: to be looked for."""


def from_environment(environ: Mapping[str, str]) -> Watcher | None:
    """The watcher of the platform that the environment names; None: it names none. Asks no server.

    Raises:
        ValueError: `MIZZEN_PLATFORM` is none of `PLATFORMS` or `OF_PRIORS`, or another of mizzen's variables is not in
            its form.
    """
    named = environ.get("MIZZEN_PLATFORM")
    if named is not None and named in OF_PRIORS:
        # An agent tells its tasks how often the platform interrupts, and hears the platform's notices itself.
        named = None if environ.get("MIZZEN_GRACE_S") else OF_PRIORS[named]
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
    """The watchers of those with metadata servers, in order. AWS's SDKs have a variable that turns its server off."""
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
    """The watcher of this platform; plain SIGTERM where none is recognised. Takes `timeout_s` at most.

    The clouds have their metadata servers at the same address, so each must answer in its own way: AWS with a token and
    an instance's id, GCP with its header and a number, Azure with its description of a machine. Where several do, the
    first of `PLATFORMS` is taken.

    Args:
        environ: variables to look at, `os.environ` by default.
        timeout_s: for all metadata servers together.

    Raises:
        ValueError: `MIZZEN_PLATFORM`, or another of mizzen's variables, is not in its form; or an address is not.
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
        # One that still waits is left behind: it holds a socket until its own time is up, and nobody up.
        probe.join(max(0.0, deadline_s - time.monotonic()))
        if probe.positive:
            return probe.watcher
    return SigtermWatcher(environ)


class _Probe(threading.Thread):
    """Asks one metadata server whether it is its platform's."""

    def __init__(self, watcher: "AwsWatcher | GcpWatcher | AzureWatcher") -> None:
        super().__init__(name=f"mizzen-probe-{watcher.platform}", daemon=True)
        self.watcher = watcher
        self.positive = False

    def run(self) -> None:
        """Sets `positive`; whatever goes wrong is a no."""
        try:
            self.positive = self.watcher.answers()
        except Exception:
            self.positive = False
