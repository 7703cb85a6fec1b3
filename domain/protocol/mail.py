"""Mail: messages to the workflows of workloads, delivered by the outbox."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class MailKind(StrEnum):
    """What can be told to a workload's workflow. Each is an outbox row first and a Temporal signal after."""

    AWARDED = "awarded"
    SLOTS_READY = "slots_ready"
    EVICT = "evict"
    CANCEL = "cancel"
    PREEMPT = "preempt"
    MACHINE_LOST = "machine_lost"
    HUNG = "hung"


@dataclass
class Mail:
    """One message to a workload's workflow. Delivered at least once; `id` tells a repetition."""

    id: int
    kind: str
    attempt: int
    """The attempt that it is about; an older one is ignored. 0: whichever it is now."""
    detail: dict[str, Any] = field(default_factory=dict)
