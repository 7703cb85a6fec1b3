"""The phases of a workload's life. Which may follow which, `lifecycle.attempts` says."""

from enum import StrEnum


class Phase(StrEnum):
    """Where a workload is in its life. Every transition is an event and a Temporal search attribute."""

    PENDING = "pending"
    """In the queue: never awarded yet, or back after a machine loss, a hang or a failure of its own."""
    PLACING = "placing"
    """Awarded; some of its slots are still being given up by its victims."""
    MIGRATING = "migrating"
    """Awarded in another region than its checkpoint's, which is being copied there."""
    PROVISIONING = "provisioning"
    """Holds all its slots; files are staged and tasks are being started."""
    RUNNING = "running"
    CHECKPOINTING = "checkpointing"
    """Asked to save and stop, within its grace."""
    PREEMPTED = "preempted"
    """In the queue again after an eviction, a drain or an operator's preemption."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


QUEUED_PHASES = frozenset({Phase.PENDING, Phase.PREEMPTED})
PLACED_PHASES = frozenset({Phase.PLACING, Phase.MIGRATING, Phase.PROVISIONING, Phase.RUNNING, Phase.CHECKPOINTING})
TERMINAL_PHASES = frozenset({Phase.SUCCEEDED, Phase.FAILED, Phase.CANCELLED})
