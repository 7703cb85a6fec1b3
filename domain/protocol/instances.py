"""Messages about instances, the machines that are launched by providers."""

from dataclasses import dataclass


@dataclass
class InstanceInput:
    """Input of an instance's workflow: data of the instance's row in the ledger, and timeouts."""

    instance: str
    phase: str
    """`domain.lifecycle.instances.InstancePhase`."""
    table: int
    """Version of the table of steps that the workflow follows from its start to its end."""
    join_s: float
    """Timeout for the agent to become ready."""
    drain_s: float
    """Timeout for the workloads on the machine to leave."""


@dataclass
class InstanceRef:
    """Reference to an instance."""

    instance: str


@dataclass
class InstanceFacts:
    """The current state of an instance in the ledger."""

    told: bool
    """The instance has been requested to end."""
    lost: bool
    """The provider no longer has the instance, or its agent has not responded for too long."""
    ready: bool
    """The machine accepts work, or would accept it if it were not drained."""
    held: bool
    """A workload holds resources of the machine, or is promised some, or may still be saving a checkpoint there."""
    waits: bool = False
    """The provider has accepted the launch, but has not started the machine."""


@dataclass
class InstanceMove:
    """Request to move an instance to its next phase and record the event. Idempotent."""

    instance: str
    phase: str
    because: str
    """`domain.lifecycle.instances.InstanceEvent` that ended the previous step; empty for the first."""
