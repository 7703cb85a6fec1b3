"""The phases of a workload. `domain.lifecycle.attempts` defines the allowed transitions."""

from enum import StrEnum


class Phase(StrEnum):
    """The phase of a workload. Every transition emits an event and updates a Temporal search attribute."""

    PENDING = "pending"
    """In the queue: never awarded yet, or queued again after a machine loss, a hang or a failed task."""
    PLACING = "placing"
    """Awarded; its victims still hold some of its slots."""
    MIGRATING = "migrating"
    """Awarded in a region that does not have its checkpoint; the checkpoint is being copied there."""
    PROVISIONING = "provisioning"
    """Holds all its slots; files are being staged and tasks are being started."""
    RUNNING = "running"
    CHECKPOINTING = "checkpointing"
    """Has received the notice to save a checkpoint and stop, within its grace."""
    PREEMPTED = "preempted"
    """Queued again after an eviction, a drain or a preemption by an operator."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


QUEUED_PHASES = frozenset({Phase.PENDING, Phase.PREEMPTED})
PLACED_PHASES = frozenset({Phase.PLACING, Phase.MIGRATING, Phase.PROVISIONING, Phase.RUNNING, Phase.CHECKPOINTING})
TERMINAL_PHASES = frozenset({Phase.SUCCEEDED, Phase.FAILED, Phase.CANCELLED})
