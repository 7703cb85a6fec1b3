"""Messages of a bundle: workloads that were awarded together on one machine.

One workflow runs the first attempts of all of them. A workload that is not short gets a workflow of its own.
"""

from dataclasses import dataclass, field

from domain.protocol.machines import NodeOutcome, RunNode
from domain.protocol.workloads import ReleaseRequest

FIRST_ATTEMPT = 1
"""The attempt of each workload in a bundle."""


@dataclass
class Bundle:
    """Input of a bundle's workflow."""

    machine: str
    workloads: list[str]


@dataclass
class RunBundle:
    """Request to an agent to run the tasks of several attempts, each as `node.run` does.

    It returns soon after the first of them have ended. Called again, it re-attaches to the others.
    """

    machine: str
    runs: list[RunNode]
    limit_s: float
    """It returns after this many seconds, whether or not tasks have ended."""


@dataclass
class BundleRun:
    """The agent's response, by workload. A workload in neither field still runs."""

    outcomes: dict[str, NodeOutcome] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    """The workloads whose tasks could not be started or watched."""


@dataclass
class SettleBundle:
    """Request to release attempts of a bundle, and to start the workflows of workloads that leave it. Idempotent."""

    releases: list[ReleaseRequest]
    leaving: list[str]
