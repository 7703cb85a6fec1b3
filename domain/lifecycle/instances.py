"""The lifecycle of an instance from its request to its end: a table of steps that the instance's workflow follows.

An instance is one machine that was requested from a provider. The table works like that of attempts
(`domain.lifecycle.attempts`): a step is an action of the workflow, the instance shows the step's phase during the step,
and the outcome of the step is an event that selects the next step.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class InstancePhase(StrEnum):
    """The phase of an instance."""

    REQUESTED = "requested"
    """The instance is in the ledger. The provider has not received a request."""
    LAUNCHING = "launching"
    """The launch request is sent to the provider until the provider answers."""
    JOINING = "joining"
    """The provider has accepted the launch. The machine waits there, or its agent is not ready."""
    READY = "ready"
    """The machine is in the fleet."""
    DRAINING = "draining"
    """The machine takes no new work. Once its tasks have saved and left, the provider terminates it."""
    GONE = "gone"


class InstanceStep(StrEnum):
    """An action of the instance's workflow."""

    LAUNCH = "launch"
    """Sends the launch request to the provider until the provider answers."""
    AWAIT_AGENT = "await agent"
    SERVE = "serve"
    """Waits until the instance is to end or is lost, while its machine works."""
    DRAIN = "drain"
    """Drains the machine, in the same way as an operator would."""
    TERMINATE = "terminate"
    """Asks the provider to terminate the machine, until the provider's list no longer contains it."""


class InstanceEvent(StrEnum):
    """The outcome of a step."""

    DONE = "done"
    REFUSED = "refused"
    TOLD = "told to end"
    """The pool shrinks, or an operator ends the instance."""
    LOST = "lost"
    """The provider no longer has the machine, or its agent was away for too long."""
    TIMED_OUT = "timed out"


@dataclass(frozen=True)
class InstanceFields:
    """A row of the table of steps."""

    phase: InstancePhase
    """The phase that the instance shows during the step."""
    after: Mapping[InstanceEvent, InstanceStep | None]
    """The next step for each event; None: the instance is gone."""


InstanceTable = Mapping[InstanceStep, InstanceFields]

INSTANCE_TABLES: Mapping[int, InstanceTable] = {
    1: {
        InstanceStep.LAUNCH: InstanceFields(
            InstancePhase.LAUNCHING,
            {
                InstanceEvent.DONE: InstanceStep.AWAIT_AGENT,
                InstanceEvent.REFUSED: None,
                # The provider may have launched the machine.
                InstanceEvent.TOLD: InstanceStep.TERMINATE,
            },
        ),
        InstanceStep.AWAIT_AGENT: InstanceFields(
            InstancePhase.JOINING,
            {
                InstanceEvent.DONE: InstanceStep.SERVE,
                InstanceEvent.TOLD: InstanceStep.DRAIN,
                InstanceEvent.LOST: InstanceStep.TERMINATE,
                InstanceEvent.TIMED_OUT: InstanceStep.TERMINATE,
            },
        ),
        InstanceStep.SERVE: InstanceFields(
            InstancePhase.READY,
            {InstanceEvent.TOLD: InstanceStep.DRAIN, InstanceEvent.LOST: InstanceStep.TERMINATE},
        ),
        InstanceStep.DRAIN: InstanceFields(
            InstancePhase.DRAINING,
            {
                InstanceEvent.DONE: InstanceStep.TERMINATE,
                InstanceEvent.LOST: InstanceStep.TERMINATE,
                InstanceEvent.TIMED_OUT: InstanceStep.TERMINATE,
            },
        ),
        InstanceStep.TERMINATE: InstanceFields(InstancePhase.DRAINING, {InstanceEvent.DONE: None}),
    },
}
"""The tables of steps, by version, like `domain.lifecycle.attempts.TABLES`."""

LATEST_INSTANCES = max(INSTANCE_TABLES)

FIRST_STEPS: Mapping[InstancePhase, InstanceStep] = {
    InstancePhase.REQUESTED: InstanceStep.LAUNCH,
    InstancePhase.LAUNCHING: InstanceStep.LAUNCH,
    InstancePhase.JOINING: InstanceStep.AWAIT_AGENT,
    InstancePhase.READY: InstanceStep.SERVE,
    InstancePhase.DRAINING: InstanceStep.DRAIN,
}
"""The first step of a workflow by the instance's phase. A workflow that replaces a lost one starts in a later phase."""


def next_instance_phases(table: InstanceTable) -> dict[InstancePhase, frozenset[InstancePhase]]:
    """Returns, for each phase of an instance, the phases that may follow it."""
    first = table[FIRST_STEPS[InstancePhase.REQUESTED]].phase
    out: dict[InstancePhase, set[InstancePhase]] = {phase: set() for phase in InstancePhase}
    out[InstancePhase.REQUESTED].add(first)
    for row in table.values():
        for step in row.after.values():
            out[row.phase].add(InstancePhase.GONE if step is None else table[step].phase)
    return {phase: frozenset(following - {phase}) for phase, following in out.items()}


_EACH = [next_instance_phases(table) for table in INSTANCE_TABLES.values()]
NEXT_INSTANCE_PHASES = {phase: frozenset().union(*(each[phase] for each in _EACH)) for phase in InstancePhase}
"""The transitions that at least one version of the table allows: a workflow may follow an older version."""
