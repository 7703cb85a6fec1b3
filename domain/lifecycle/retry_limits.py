"""How often a workload is tried again, by the cause of the end of an attempt (`limits.retries` of its document)."""

from dataclasses import dataclass

from domain.protocol.workloads import WorkloadInput
from domain.reasons import Reason, ReasonCode

PREEMPTIONS = frozenset(
    {
        ReasonCode.EVICTED,
        ReasonCode.PREEMPTED_BY_OPERATOR,
        ReasonCode.MACHINE_DRAINED,
        ReasonCode.PLATFORM_NOTICE,
    }
)
"""Reasons of attempts that count as preemptions."""


@dataclass(frozen=True)
class RetryLimit:
    """A limit on the retries after failures of the user's tasks."""

    retries: int | None
    """Maximum number of retries; None: there is no limit."""
    used: int
    """The number of earlier failures that count towards this limit."""
    status: str | None = None
    """The exit status to which the limit applies; None: all statuses that have no limit of their own."""

    @property
    def is_reached(self) -> bool:
        """Whether the failure is final."""
        return self.retries is not None and self.used >= self.retries


def exit_status(status: str) -> str:
    """Returns the exit status of a task as a shell reports it: 137 for `signal 9`. Other text stays unchanged."""
    kind, _, number = status.rpartition(" ")
    if kind == "exit code":
        return number
    return str(128 + int(number)) if kind == "signal" else status


def limit_reached(reason: Reason, state: WorkloadInput) -> Reason | None:
    """Returns why a workload is not queued again after a preemption or a lost machine; None: it is queued again.

    `reason` is why its attempt ended. The counts of `state` do not include it.
    """
    if reason.code in PREEMPTIONS:
        what, before, limit = "preempted", state.preemptions, state.max_preemptions
    elif reason.code == ReasonCode.MACHINE_LOST:
        what, before, limit = "lost", state.losses, state.max_losses
    else:
        return None
    if limit is None or before < limit:
        return None
    detail = {"words": reason.sentence, "cause": reason.code.value, "limit": what, "retries": limit}
    return Reason(ReasonCode.RESTARTS_EXHAUSTED, detail)
