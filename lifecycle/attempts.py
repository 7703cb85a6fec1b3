"""The way of an attempt from its award to its end: one table, which the workload's workflow follows.

A step is what the workflow does; meanwhile the workload shows the step's phase. How the step went is an event, and the
row of the step says what follows: another step, or the end of the attempt. How an attempt that ran has ended is judged
by `lifecycle.endings`. A step with nothing to do is done at once: there is no checkpoint to copy, for example.

A workflow keeps to the version of the table with which it started (`WorkloadInput.table`), also where it goes on in a
new history: another order of steps would not fit what its history says. A version stays in `TABLES` for as long as a
history that needs it may be replayed (`temporal.keep_closed_s`).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from domain.phases import QUEUED_PHASES, TERMINAL_PHASES, Phase
from lifecycle.endings import EARLY_PHASES, ENDINGS


class Step(StrEnum):
    """What is done."""

    WAIT = "wait for slots"
    """Victims still hold some of them."""
    STAGE = "stage"
    """The launch description is written into the region's bucket."""
    AWAIT_SAVES = "await saves"
    """Tasks of the attempt before may still save: nothing is done that they would notice."""
    COPY = "copy checkpoint"
    """The newest checkpoint is in another region."""
    PREPARE = "prepare"
    """Agents fetch files and reserve ports."""
    RUN = "run"
    STOP = "stop"
    """The tasks get their notice to save, and the workflow waits until they have ended."""
    LEAVE = "leave"
    """The tasks get their notice to save. Only the next attempt waits until they have ended."""
    WITHDRAW = "withdraw"
    """No task was started. But where this workflow replaces one that is gone, tasks may run, and are stopped."""
    WIND_UP = "wind up"
    """An earlier workflow has told the tasks to stop: what is left of them is stopped."""


class Event(StrEnum):
    """How a step went."""

    DONE = "done"
    TOLD = "told to stop"
    REFUSED = "refused"
    """A machine would not prepare or start the tasks."""
    STOPPED_BEFORE = "stopped before"
    """An agent has stopped the attempt at the word of an earlier workflow."""
    TIMED_OUT = "runtime used up"
    NOTICED = "noticed"
    """The platform takes a machine on which tasks still run."""


class End(StrEnum):
    """How an attempt ends."""

    TOLD_EARLY = "told early"
    """Told to stop before an agent was asked for anything."""
    NOT_STARTED = "not started"
    """Told to stop while agents prepared its tasks, or refused by them."""
    JUDGED = "judged"
    """Its tasks have ended, by themselves or stopped."""
    LEFT = "left"
    """It is in the queue again while its tasks save."""
    WOUND_UP = "wound up"
    """What an earlier workflow had told to stop has ended."""


@dataclass(frozen=True)
class Row:
    """A row of the table."""

    phase: Phase | None
    """What the workload shows during the step; None: what it showed before."""
    after: Mapping[Event, Step | End]
    may_pass: bool = False
    """The step may have nothing to do; then its phase is not shown."""


Table = Mapping[Step, Row]

TABLES: Mapping[int, Table] = {
    1: {
        Step.WAIT: Row(Phase.PLACING, {Event.DONE: Step.STAGE, Event.TOLD: End.TOLD_EARLY}),
        Step.STAGE: Row(Phase.PLACING, {Event.DONE: Step.AWAIT_SAVES, Event.TOLD: End.TOLD_EARLY}),
        Step.AWAIT_SAVES: Row(Phase.PLACING, {Event.DONE: Step.COPY, Event.TOLD: End.TOLD_EARLY}),
        Step.COPY: Row(Phase.MIGRATING, {Event.DONE: Step.PREPARE, Event.TOLD: End.TOLD_EARLY}, may_pass=True),
        Step.PREPARE: Row(
            Phase.PROVISIONING,
            {
                Event.DONE: Step.RUN,
                Event.TOLD: Step.WITHDRAW,
                Event.REFUSED: Step.WITHDRAW,
                Event.STOPPED_BEFORE: Step.WIND_UP,
            },
        ),
        Step.RUN: Row(
            Phase.RUNNING,
            {
                Event.DONE: End.JUDGED,
                Event.TOLD: Step.STOP,
                Event.TIMED_OUT: Step.STOP,
                Event.NOTICED: Step.LEAVE,
            },
        ),
        Step.STOP: Row(Phase.CHECKPOINTING, {Event.DONE: End.JUDGED}),
        Step.LEAVE: Row(Phase.CHECKPOINTING, {Event.DONE: End.LEFT}),
        Step.WITHDRAW: Row(None, {Event.DONE: End.NOT_STARTED}),
        Step.WIND_UP: Row(None, {Event.DONE: End.WOUND_UP}),
    },
}
"""By version."""

LATEST = max(TABLES)
FIRST = Step.WAIT

_JUDGED = frozenset(row.phase for row in ENDINGS)
END_PHASES: Mapping[End, frozenset[Phase]] = {
    # Tasks of an earlier workflow may have succeeded all the same.
    End.TOLD_EARLY: EARLY_PHASES | {Phase.SUCCEEDED},
    End.NOT_STARTED: _JUDGED,
    End.JUDGED: _JUDGED,
    End.LEFT: frozenset({Phase.PREEMPTED}),
    End.WOUND_UP: _JUDGED,
}
"""The phases that may follow each end."""


def _shown_by(table: Table, step: Step) -> Iterator[Phase]:
    """The phases that may be shown first from `step` on, while all goes well."""
    row = table[step]
    if row.phase is not None:
        yield row.phase
    if row.may_pass or row.phase is None:
        for target in row.after.values():
            if isinstance(target, Step):
                yield from _shown_by(table, target)


def _ends_of(table: Table, step: Step) -> Iterator[End]:
    """The ends that may follow `step` before the workload shows another phase."""
    for target in table[step].after.values():
        if isinstance(target, End):
            yield target
        elif table[target].phase is None:
            yield from _ends_of(table, target)


def next_phases(table: Table) -> dict[Phase, frozenset[Phase]]:
    """Which phase may follow which in a workload's life.

    Workflows go from step to step. One that replaces another begins with the first step again, while the workload shows
    the phase that it had come to: so any end of an earlier step may follow a later phase, too.
    """
    out = dict.fromkeys(Phase, frozenset[Phase]())
    for phase in QUEUED_PHASES:  # An award, the end of a wait that was too long, or the user's cancellation.
        out[phase] = frozenset({*_shown_by(table, FIRST), Phase.FAILED, Phase.CANCELLED})
    # A successor that cannot go on winds the attempt up, whatever phase it shows.
    earlier: set[Phase] = set(END_PHASES[End.WOUND_UP])
    for step, row in table.items():
        if row.phase is None:
            continue
        ends = {phase for end in _ends_of(table, step) for phase in END_PHASES[end]}
        if not isinstance(row.after.get(Event.DONE), End):
            earlier |= ends
        shown = {
            phase for target in row.after.values() if isinstance(target, Step) for phase in _shown_by(table, target)
        }
        out[row.phase] |= (ends | earlier | shown) - {row.phase}
    assert not any(out[phase] for phase in TERMINAL_PHASES)
    return out


def of_all_versions(tables: Iterable[Table]) -> dict[Phase, frozenset[Phase]]:
    """Which phase may follow which by one of the tables: workflows that follow an older one go its ways."""
    each = [next_phases(table) for table in tables]
    return {phase: frozenset().union(*(allowed[phase] for allowed in each)) for phase in Phase}


NEXT_PHASES = of_all_versions(TABLES.values())
"""What some version allows."""
