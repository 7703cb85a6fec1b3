"""The lifecycle of an attempt from its award to its end: a table of steps that the workload's workflow follows.

A step is an action of the workflow. During a step, the workload shows the step's phase. The outcome of a step is an
event. The row of the step maps each event to the next step, or to the end of the attempt. `domain.lifecycle.endings`
decides what follows from the end of an attempt that ran. A step that has nothing to do, such as a copy without a
checkpoint, completes immediately.

A workflow follows the table version with which it started (`WorkloadInput.table`), even after it continues as new:
a different order of steps would not match its recorded history. A version stays in `TABLES` as long as a history that
uses it may be replayed (`temporal.keep_closed_s`).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from domain.lifecycle.endings import EARLY_PHASES, ENDINGS
from domain.phases import QUEUED_PHASES, TERMINAL_PHASES, Phase


class Step(StrEnum):
    """An action of the workflow during an attempt."""

    WAIT = "wait for slots"
    """Waits until the victims have released the attempt's slots."""
    STAGE = "stage"
    """Writes the launch description into the region's bucket."""
    AWAIT_SAVES = "await saves"
    """Waits until tasks of the previous attempt have saved. Until then, nothing is done that would disturb the save."""
    COPY = "copy checkpoint"
    """Copies the newest checkpoint to the attempt's region, if it is in another region."""
    PREPARE = "prepare"
    """Agents fetch files and reserve ports."""
    RUN = "run"
    STOP = "stop"
    """Sends the tasks their notice to save, and waits until they have ended."""
    LEAVE = "leave"
    """Sends the tasks their notice to save, without waiting. The next attempt waits until they have ended."""
    WITHDRAW = "withdraw"
    """Stops the tasks of an attempt that never ran. Tasks exist only if an earlier workflow of the workload started
    them."""
    WIND_UP = "wind up"
    """Stops the tasks that an earlier workflow of the workload has left running."""


class StepOutcome(StrEnum):
    """The outcome of a step."""

    DONE = "done"
    TOLD = "told to stop"
    REFUSED = "refused"
    """A machine refused to prepare or start the tasks."""
    STOPPED_BEFORE = "stopped before"
    """An agent refuses the attempt because an earlier workflow of the workload has already stopped it."""
    TIMED_OUT = "runtime used up"
    NOTICED = "noticed"
    """The platform reclaims a machine on which tasks still run."""


class End(StrEnum):
    """How an attempt ends."""

    TOLD_EARLY = "told early"
    """A message stopped the attempt before any agent received a request."""
    NOT_STARTED = "not started"
    """A message stopped it while agents prepared its tasks, or an agent refused them."""
    JUDGED = "judged"
    """All tasks of the attempt have ended by themselves, or were stopped."""
    LEFT = "left"
    """It is back in the queue while its tasks still save."""
    WOUND_UP = "wound up"
    """The tasks that an earlier workflow had started have ended."""


@dataclass(frozen=True)
class AttemptFields:
    """A row of the table of steps."""

    phase: Phase | None
    """The phase that the workload shows during the step; None: unchanged."""
    after: Mapping[StepOutcome, Step | End]
    may_pass: bool = False
    """Whether the step may have nothing to do. In that case its phase is not shown."""


Table = Mapping[Step, AttemptFields]

TABLES: Mapping[int, Table] = {
    1: {
        Step.WAIT: AttemptFields(Phase.PLACING, {StepOutcome.DONE: Step.STAGE, StepOutcome.TOLD: End.TOLD_EARLY}),
        Step.STAGE: AttemptFields(
            Phase.PLACING, {StepOutcome.DONE: Step.AWAIT_SAVES, StepOutcome.TOLD: End.TOLD_EARLY}
        ),
        Step.AWAIT_SAVES: AttemptFields(Phase.PLACING, {StepOutcome.DONE: Step.COPY, StepOutcome.TOLD: End.TOLD_EARLY}),
        Step.COPY: AttemptFields(
            Phase.MIGRATING, {StepOutcome.DONE: Step.PREPARE, StepOutcome.TOLD: End.TOLD_EARLY}, may_pass=True
        ),
        Step.PREPARE: AttemptFields(
            Phase.PROVISIONING,
            {
                StepOutcome.DONE: Step.RUN,
                StepOutcome.TOLD: Step.WITHDRAW,
                StepOutcome.REFUSED: Step.WITHDRAW,
                StepOutcome.STOPPED_BEFORE: Step.WIND_UP,
            },
        ),
        Step.RUN: AttemptFields(
            Phase.RUNNING,
            {
                StepOutcome.DONE: End.JUDGED,
                StepOutcome.TOLD: Step.STOP,
                StepOutcome.TIMED_OUT: Step.STOP,
                StepOutcome.NOTICED: Step.LEAVE,
            },
        ),
        Step.STOP: AttemptFields(Phase.CHECKPOINTING, {StepOutcome.DONE: End.JUDGED}),
        Step.LEAVE: AttemptFields(Phase.CHECKPOINTING, {StepOutcome.DONE: End.LEFT}),
        Step.WITHDRAW: AttemptFields(None, {StepOutcome.DONE: End.NOT_STARTED}),
        Step.WIND_UP: AttemptFields(None, {StepOutcome.DONE: End.WOUND_UP}),
    },
}
"""The tables of steps, by version."""

LATEST = max(TABLES)
FIRST = Step.WAIT

_JUDGED = frozenset(row.phase for row in ENDINGS)
END_PHASES: Mapping[End, frozenset[Phase]] = {
    # Tasks that an earlier workflow started may have succeeded. A workload of one attempt fails instead of waiting.
    End.TOLD_EARLY: EARLY_PHASES | {Phase.SUCCEEDED, Phase.FAILED},
    End.NOT_STARTED: _JUDGED,
    End.JUDGED: _JUDGED,
    End.LEFT: frozenset({Phase.PREEMPTED}),
    End.WOUND_UP: _JUDGED,
}
"""The phases that may follow each end."""


def _shown_by(table: Table, step: Step) -> Iterator[Phase]:
    """Yields the phases that the workload may show next when the workflow begins `step`."""
    row = table[step]
    if row.phase is not None:
        yield row.phase
    if row.may_pass or row.phase is None:
        for target in row.after.values():
            if isinstance(target, Step):
                yield from _shown_by(table, target)


def _ends_of(table: Table, step: Step) -> Iterator[End]:
    """Yields the ends that may follow `step` before the workload shows another phase."""
    for target in table[step].after.values():
        if isinstance(target, End):
            yield target
        elif table[target].phase is None:
            yield from _ends_of(table, target)


def next_phases(table: Table) -> dict[Phase, frozenset[Phase]]:
    """Returns, for each phase of a workload, the phases that may follow it.

    A workflow goes from step to step. A workflow that replaces another one starts with the first step, while the
    workload still shows the phase that the earlier workflow reached. So the ends of earlier steps may also follow a
    later phase.
    """
    out = dict.fromkeys(Phase, frozenset[Phase]())
    for phase in QUEUED_PHASES:  # An award, an expired wait, or a cancellation by the user.
        out[phase] = frozenset({*_shown_by(table, FIRST), Phase.FAILED, Phase.CANCELLED})
    out[Phase.PREEMPTED] |= {Phase.SUCCEEDED}  # Tasks that were left to save had already finished.
    # A replacement workflow that cannot continue the attempt stops its tasks (`Step.WIND_UP`), in any phase.
    earlier: set[Phase] = set(END_PHASES[End.WOUND_UP])
    for step, row in table.items():
        if row.phase is None:
            continue
        ends = {phase for end in _ends_of(table, step) for phase in END_PHASES[end]}
        if not isinstance(row.after.get(StepOutcome.DONE), End):
            earlier |= ends
        shown = {
            phase for target in row.after.values() if isinstance(target, Step) for phase in _shown_by(table, target)
        }
        out[row.phase] |= (ends | earlier | shown) - {row.phase}
    assert not any(out[phase] for phase in TERMINAL_PHASES)
    return out


def of_all_versions(tables: Iterable[Table]) -> dict[Phase, frozenset[Phase]]:
    """Returns, for each phase, the phases that may follow it in at least one of the tables.

    Workflows that started with an older version still follow it.
    """
    each = [next_phases(table) for table in tables]
    return {phase: frozenset().union(*(allowed[phase] for allowed in each)) for phase in Phase}


NEXT_PHASES = of_all_versions(TABLES.values())
"""The transitions that at least one version of the table allows."""
