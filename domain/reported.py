"""What tasks report of their checkpoints and of notices (`mizzen.report`), as it travels from agents to workflows.

A task may write anything into its report. These are what an agent found to be of the right kind and bounded in size
(`agent.progress`); nothing here is known to be true. So what follows from a task's word concerns its own attempt only.
"""

from dataclasses import dataclass
from enum import StrEnum


class LoadState(StrEnum):
    """How far a task got with its checkpoint."""

    STARTED = "started"
    LOADED = "loaded"
    NONE = "none"
    """There was nothing valid."""
    FAILED = "failed"


@dataclass
class LoadReport:
    """How loading the newest checkpoint went."""

    state: str
    """A `LoadState`."""
    error: str | None = None
    skipped: int = 0
    """Checkpoints that were passed over as damaged or partial."""


@dataclass
class CadenceReport:
    """How often a task saves: W, C and mu, in seconds, and who says mu."""

    interval_s: float
    cost_s: float | None = None
    mtbf_s: float | None = None
    step_s: float | None = None
    source: str | None = None


@dataclass
class NoticeReport:
    """A platform's word that a task or its machine will be stopped."""

    platform: str
    kind: str
    """A kind of `mizzen.notices.Kind`."""
    certain: bool
    """False: a recommendation to leave."""
    at_s: float
    """When it was learnt, in seconds since the epoch."""
    ends_at_s: float | None = None
    """When the machine goes, in seconds since the epoch; None: not known."""
    words: str = ""
    decision: str | None = None
    """What the task does about it."""

    @property
    def takes_machine(self) -> bool:
        """Whether the platform itself said, outside of any signal, that it will certainly take the machine.

        A signal alone (kind `stop`, and all that tasks of this agent hear) says nothing of who sent it or why: a
        launcher sends SIGTERM to the ranks that are left when one has failed, and that is a failure.
        """
        return self.certain and self.kind != "stop" and self.platform not in ("mizzen", "sigterm")

    def numbers(self) -> dict[str, object]:
        """The numbers of a reason (`ReasonCode.PLATFORM_NOTICE`)."""
        return {"platform": self.platform, "notice": self.kind, "ends_at_s": self.ends_at_s, "words": self.words}


@dataclass
class TaskProgress:
    """What a task last reported through the SDK (`report.json`), and what the agent saw."""

    job: str
    task: int
    step: int | None = None
    resumed_step: int | None = None
    """The step of the checkpoint that this attempt started from; None: from the beginning."""
    checkpoint_step: int | None = None
    checkpoint_at_s: float | None = None
    checkpoint_bytes: int | None = None
    checkpoint_s: float | None = None
    """How long the last save held the training up."""
    active_at_s: float | None = None
    """Last sign of life: a report, a checkpoint or log output."""
    checkpoint_write_s: float | None = None
    """How long the last save took until it was durable."""
    cadence: CadenceReport | None = None
    load: LoadReport | None = None
    notice: NoticeReport | None = None
