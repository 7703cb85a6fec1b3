"""Messages to workload workflows, delivered by the outbox as the Temporal signal `mail`."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class MessageKind(StrEnum):
    """Kinds of messages to a workload's workflow. They are written to the outbox and then sent as a Temporal signal."""

    AWARDED = "awarded"
    SLOTS_READY = "slots_ready"
    EVICT = "evict"
    CANCEL = "cancel"
    PREEMPT = "preempt"
    MACHINE_LOST = "machine_lost"
    HUNG = "hung"
    CANCEL_ELEMENT = "cancel_element"
    """To a runner: an element that it has leased is cancelled."""
    IDLE = "idle"
    """To a workload that serves and is about to end: its requests in progress have ended, so its drain may end."""
    FINISHED = "finished"
    """Sent by the workflow to itself: all tasks of an attempt that was released before have ended with exit code 0."""


@dataclass
class WorkloadMessage:
    """One message to a workload's workflow. It is delivered at least once; `id` identifies duplicates."""

    id: int
    kind: str
    attempt: int
    """The attempt that the message concerns; messages for an older attempt are ignored. 0: the current attempt."""
    detail: dict[str, Any] = field(default_factory=dict)
