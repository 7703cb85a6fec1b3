"""Instances: machines that were asked of providers."""

from dataclasses import dataclass


@dataclass
class InstanceInput:
    """What an instance's workflow starts from: its row in the ledger, and the times that it keeps to."""

    instance: str
    phase: str
    """`lifecycle.instances.InstancePhase`."""
    table: int
    """Version of the table of steps that it follows, from its start on."""
    join_s: float
    """How long its agent may take to be ready."""
    drain_s: float
    """How long what runs on its machine may take to leave."""


@dataclass
class InstanceRef:
    """Names an instance."""

    instance: str


@dataclass
class InstanceFacts:
    """What the ledger says of an instance now."""

    told: bool
    """It is to end."""
    lost: bool
    """The provider does not have it any more, or its agent was away for too long."""
    ready: bool
    """Its machine takes work, or would if it were not drained."""
    held: bool
    """Something is held on its machine, was promised it, or may still be saved there."""


@dataclass
class InstanceMove:
    """Asks for the next phase of an instance, with its event. Idempotent."""

    instance: str
    phase: str
    because: str
    """`lifecycle.instances.InstanceEvent` of the step before; empty for the first."""
