"""Reports of tasks about checkpoints and notices (`mizzen.report`), as agents send them to workflows.

A task can write anything into its report. An agent checks only types and sizes (`agent.task_progress`), so the
values here are untrusted. Therefore a report may affect only the task's own attempt.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

OWNER = "owner"
"""The platform of a notice by which the owner of a machine takes it back."""


class LoadState(StrEnum):
    """The state of loading a checkpoint in a task."""

    STARTED = "started"
    LOADED = "loaded"
    NONE = "none"
    """There was no valid checkpoint."""
    FAILED = "failed"


@dataclass
class LoadReport:
    """The result of loading the newest checkpoint."""

    state: str
    """A `LoadState`."""
    error: str | None = None
    skipped: int = 0
    """Number of checkpoints that were skipped because they are damaged or incomplete."""


@dataclass
class FailingReport:
    """The saves of a task that have failed since its last checkpoint."""

    failures: int
    since_s: float
    """Time of the first of them, in seconds since the epoch."""
    error: str | None = None
    limit: str | None = None
    """The limit that was reached and ends the task; None: the task tries again."""


@dataclass
class CadenceReport:
    """A task's checkpoint cadence in seconds: `interval_s` is W, `cost_s` is C, `mtbf_s` is mu from `source`."""

    interval_s: float
    cost_s: float | None = None
    mtbf_s: float | None = None
    step_s: float | None = None
    source: str | None = None


@dataclass
class NoticeReport:
    """A notice from a platform that a task or its machine will be stopped."""

    platform: str
    kind: str
    """A kind of `mizzen.notices.Kind`."""
    certain: bool
    """False: a recommendation to leave."""
    at_s: float
    """When the notice was received, in seconds since the epoch."""
    ends_at_s: float | None = None
    """When the machine will be stopped, in seconds since the epoch; None: unknown."""
    words: str = ""
    decision: str | None = None
    """The task's reaction to the notice."""

    @property
    def takes_machine(self) -> bool:
        """Whether the platform announced, by other means than a signal, that it will certainly reclaim the machine.

        A signal alone (kind `stop`, and every notice that this agent sends to its tasks) does not identify the sender
        or the cause: when a rank fails, a launcher sends SIGTERM to the remaining ranks, and that is a failure.
        """
        return self.certain and self.kind != "stop" and self.platform not in ("mizzen", "sigterm")

    def numbers(self) -> dict[str, object]:
        """Returns the details for a `ReasonCode.PLATFORM_NOTICE`."""
        return {
            "platform": self.platform,
            "notice": self.kind,
            "at_s": self.at_s,
            "ends_at_s": self.ends_at_s,
            "words": self.words,
        }


MOST_BYTES_S = 1.25e12
"""No link of a machine is faster: 10 Tbit/s."""
LEAST_WRITE_S = 1e-6
"""No checkpoint is durable in less time."""


SAVES_KEPT = 5
"""Number of an attempt's last saves from which its next ones are estimated."""
LEAST_SAVE_BYTES = 65536
"""A save counts as at least this much: it also writes a record, and a payload of 0 would have no optimal interval."""


class TypicalSave(NamedTuple):
    """The bytes and the duration of a typical save of a task."""

    sent_bytes: int
    write_s: float
    """How long that takes until it is durable."""
    stall_s: float
    """For how long it stalls the training, at most `write_s`."""


def typical_save(
    saves: Sequence[Sequence[float]],
    checkpoint_bytes: int,
    write_s: float,
    most_bytes: int,
    stall_s: float | None,
) -> TypicalSave:
    """Returns the bytes that a save of a task writes, its duration, and for how long it stalls the training.

    A save sends only the parts that have changed. The result is the median of the last saves by bytes, the larger one
    of two: one save that sends all parts again changes little. Impossible saves do not count: tasks and agents can
    report anything.

    Args:
        saves: the last saves, each with its bytes and seconds.
        checkpoint_bytes: the size of the newest checkpoint, with all parts. It counts if there are no saves.
        write_s: how long the newest save took.
        most_bytes: the largest possible size.
        stall_s: for how long a save stalls the training, as the task has measured it (`stall_of`); None: not known, so
            the whole save counts.
    """
    possible = sorted((sent, s) for sent, s in saves if 0 <= sent <= checkpoint_bytes and s >= LEAST_WRITE_S)
    sent_bytes, took_s = possible[len(possible) // 2] if possible else (checkpoint_bytes, write_s)
    size_bytes = int(min(max(sent_bytes, LEAST_SAVE_BYTES), checkpoint_bytes, most_bytes))
    return TypicalSave(size_bytes, took_s, took_s if stall_s is None else min(stall_s, took_s))


def stall_of(cadence: Mapping[str, Any] | None, checkpoint_s: float | None) -> float | None:
    """Returns for how long a save stalls a task in seconds, or None if the task has reported no possible time.

    The cost C of the SDK's cadence is a median over the last saves, with the slowdown of the steps during the write.
    Without it, the newest save counts.

    Args:
        cadence: the fields of the task's `CadenceReport`.
        checkpoint_s: how long the newest save blocked the training.
    """
    for seconds in (cadence.get("cost_s") if cadence else None, checkpoint_s):
        if isinstance(seconds, int | float) and 0 <= seconds < math.inf:
            return float(seconds)
    return None


@dataclass
class BandwidthReport:
    """The bandwidth with which checkpoints can leave a machine, as its agent has measured it, in bytes on the wire."""

    at_s: float
    """When it was last measured, in seconds since the epoch."""
    bytes_s: float
    """The mean."""
    lower_bytes_s: float
    """The lower confidence bound."""

    @property
    def is_possible(self) -> bool:
        """Whether a link can have this bandwidth. An agent that is not trusted can report any numbers."""
        return self.at_s >= 0 and 0 < self.lower_bytes_s <= self.bytes_s <= MOST_BYTES_S


@dataclass
class ServingReport:
    """Where a task serves requests, and whether its probe succeeds. An agent reports this, not the task."""

    address: str
    port: int
    ready: bool
    since_s: float
    """Since when the task has been ready or not ready, in seconds since the epoch."""
    error: str | None = None
    """The result of the last probe, if it failed."""
    load: float | None = None
    """The load that the task reported in the response to the last probe; None: none."""


@dataclass
class NotReadyReport:
    """Why an agent stopped a task that serves requests: it did not become ready in time."""

    limit_s: float
    """`ProbeSpec.initial_delay_s`."""
    error: str
    """The result of the last probe."""


@dataclass
class DiskReport:
    """Why an agent stopped a task: the tasks of its attempt used more of the machine's disk than their limit."""

    used_bytes: int
    limit_bytes: int
    used_files: int
    limit_files: int


FEW_BYTES = 1_000_000
"""Files of up to this size together that a task leaves are not worth a warning."""


@dataclass
class LeftFiles:
    """The files that an ended task has left in its working directory. An agent reports this, not the task."""

    machine: str
    path: str
    bytes: int
    """The size of the files that were written since the task's start, without those in hidden folders."""
    until_s: float
    """When the agent deletes the directory, in seconds since the epoch. It may do so earlier if the disk fills."""


@dataclass
class UnstoredOutput:
    """An output of a task that its agent has not stored."""

    name: str
    why: str
    is_missing: bool = False
    """Whether the path does not exist: another task may have made it."""


@dataclass
class GpuReport:
    """A task's use of its GPUs, from its agent. Values are rounded, so that small changes cause no new report."""

    gpus: int
    percent: int
    """The share of the last seconds in which they computed, the mean over them, in percent, in steps of 5."""
    used_bytes: int
    """Memory in use on all of them, in steps of 128 MiB."""


@dataclass
class TaskProgress:
    """A task's last report through the SDK (`report.json`), and observations of the agent."""

    job: str
    task: int
    step: int | None = None
    resumed_step: int | None = None
    """The step of the checkpoint from which this attempt resumed; None: it started from the beginning."""
    checkpoint_step: int | None = None
    checkpoint_at_s: float | None = None
    checkpoint_bytes: int | None = None
    checkpoint_s: float | None = None
    """How long the last save blocked the training."""
    active_at_s: float | None = None
    """Time of the last activity: a report, a checkpoint or log output."""
    checkpoint_write_s: float | None = None
    """How long the last save took until the checkpoint was durable."""
    cadence: CadenceReport | None = None
    load: LoadReport | None = None
    notice: NoticeReport | None = None
    serving: ServingReport | None = None
    """Set if the task serves requests."""
    checkpoint_sent_bytes: int | None = None
    """How much of the last checkpoint its save has written; the other parts were there already."""
    failing: FailingReport | None = None
    """The saves that have failed since the last checkpoint; None: the last save has succeeded, or there was none."""
    pre_sync: bool = False
    """Whether the task sends parts ahead of its last checkpoint now, within a notice."""
    left: LeftFiles | None = None
    """Set if the task has ended and left files."""
    unstored: list[UnstoredOutput] = field(default_factory=list)
    """Outputs that were not stored, after the end of the task."""
    gpu: GpuReport | None = None
    """Set if the task runs, and its agent can measure its GPUs."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Values that the task has reported, such as its loss."""
