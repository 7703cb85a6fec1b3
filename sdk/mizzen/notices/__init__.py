"""Receives preemption notices from the platform, and decides whether a last save fits.

A notice is an opportunity for one last save. Do not rely on it: a machine can also fail without a notice, so save
regularly (`Checkpointer.should_save`).

    from mizzen import notices

    notices.watch()                                  # once, in the main thread
    while step < steps:
        step = train_one_step()
        if notices.preempted():
            if notices.decide(notices.current(), save_s=12.0).flush:
                save(step)
            notices.exit_preempted()

`preempted` returns True only if the end is certain. `current` also returns recommendations (`Notice.certain` is False);
save once for a recommendation and continue the training.

| platform | module | notice | window |
| --- | --- | --- | --- |
| mizzen's agent | `signals` | SIGTERM | `MIZZEN_GRACE_S` |
| Slurm | `slurm` | SIGTERM, the signal of `--signal`, the job's end time | 30 s, or the lead time |
| RunPod | `signals` | SIGTERM | 5 s |
| vast.ai | `signals` | none | 0 s |
| Kubernetes | `signals` | SIGTERM | 30 s |
| AWS | `aws` | instance metadata | 120 s |
| GCP | `gcp` | instance metadata, SIGTERM, the age of a preemptible machine | 30 s |
| Azure | `azure` | scheduled events | 30 s |
| a custom platform | `file` | a file at `MIZZEN_NOTICE_FILE` | the time in the file, or 30 s |
| any other | `signals` | SIGTERM | 10 s |

`MIZZEN_NOTICE_WINDOW_S` overrides the window, except the agent's. `MIZZEN_PLATFORM` names the platform; without it the
platform is detected. The package uses only the standard library, and imports the HTTP client when it is first needed.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mizzen.notices.current_notice import (
    PREEMPTED_EXIT_CODE,
    acknowledge,
    current,
    exit_preempted,
    preempted,
    unwatch,
    watch,
    watch_sigterm,
    watcher,
    watching,
)
from mizzen.notices.notice import DEFAULT_MARGIN, Decision, Kind, Notice, Watcher, Window, decide

if TYPE_CHECKING:
    from mizzen.notices.aws import AwsWatcher
    from mizzen.notices.azure import AzureWatcher
    from mizzen.notices.detection import detect
    from mizzen.notices.file import FileWatcher
    from mizzen.notices.gcp import GcpWatcher
    from mizzen.notices.metadata import MetadataError
    from mizzen.notices.signals import AgentWatcher, KubernetesWatcher, RunPodWatcher, SigtermWatcher, VastWatcher
    from mizzen.notices.slurm import SlurmWatcher

__all__ = [
    "DEFAULT_MARGIN",
    "PREEMPTED_EXIT_CODE",
    "AgentWatcher",
    "AwsWatcher",
    "AzureWatcher",
    "Decision",
    "FileWatcher",
    "GcpWatcher",
    "Kind",
    "KubernetesWatcher",
    "MetadataError",
    "Notice",
    "RunPodWatcher",
    "SigtermWatcher",
    "SlurmWatcher",
    "VastWatcher",
    "Watcher",
    "Window",
    "acknowledge",
    "current",
    "decide",
    "detect",
    "exit_preempted",
    "preempted",
    "unwatch",
    "watch",
    "watch_sigterm",
    "watcher",
    "watching",
]

_HOMES = {
    "AgentWatcher": "signals",
    "AwsWatcher": "aws",
    "AzureWatcher": "azure",
    "FileWatcher": "file",
    "GcpWatcher": "gcp",
    "KubernetesWatcher": "signals",
    "MetadataError": "metadata",
    "RunPodWatcher": "signals",
    "SigtermWatcher": "signals",
    "SlurmWatcher": "slurm",
    "VastWatcher": "signals",
    "detect": "detection",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
