"""The phases of a workload's life and which may follow which."""

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

_STOPPED = {Phase.PENDING, Phase.PREEMPTED, Phase.FAILED, Phase.CANCELLED}

NEXT_PHASES: dict[Phase, frozenset[Phase]] = {
    Phase.PENDING: frozenset({Phase.PLACING, Phase.FAILED, Phase.CANCELLED}),
    Phase.PREEMPTED: frozenset({Phase.PLACING, Phase.FAILED, Phase.CANCELLED}),
    Phase.PLACING: frozenset({Phase.MIGRATING, Phase.PROVISIONING, *_STOPPED}),
    Phase.MIGRATING: frozenset({Phase.PROVISIONING, *_STOPPED}),
    Phase.PROVISIONING: frozenset({Phase.RUNNING, Phase.CHECKPOINTING, Phase.SUCCEEDED, *_STOPPED}),
    Phase.RUNNING: frozenset({Phase.CHECKPOINTING, Phase.SUCCEEDED, *_STOPPED}),
    Phase.CHECKPOINTING: frozenset({Phase.SUCCEEDED, *_STOPPED}),
    Phase.SUCCEEDED: frozenset(),
    Phase.FAILED: frozenset(),
    Phase.CANCELLED: frozenset(),
}
