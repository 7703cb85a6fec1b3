"""The way of an instance from its request to its end: one table, which its workflow follows.

An instance is one machine that was asked of a provider. As for attempts (`lifecycle.attempts`), a step is what the
workflow does, the instance shows the step's phase meanwhile, and how the step went is an event that says what follows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class InstancePhase(StrEnum):
    """What an instance is doing."""

    REQUESTED = "requested"
    """It is in the ledger; nothing was asked of the provider."""
    LAUNCHING = "launching"
    """The provider is being asked."""
    JOINING = "joining"
    """The provider has launched it; its agent has not announced itself, or is not ready."""
    READY = "ready"
    """Its machine is in the fleet."""
    DRAINING = "draining"
    """It takes no new work, what runs there saves and goes, and then the provider ends it."""
    GONE = "gone"


class InstanceStep(StrEnum):
    """What is done."""

    LAUNCH = "launch"
    """The provider is asked, until it answers."""
    AWAIT_AGENT = "await agent"
    SERVE = "serve"
    """Its machine works, until somebody says that it shall end, or that it is gone."""
    DRAIN = "drain"
    """Its machine is drained, as an operator would do it."""
    TERMINATE = "terminate"
    """The provider is asked to end it, until its list does not have it."""


class InstanceEvent(StrEnum):
    """How a step went."""

    DONE = "done"
    REFUSED = "refused"
    TOLD = "told to end"
    """Its pool shrinks, or an operator said so."""
    LOST = "lost"
    """The provider does not have it any more, or its agent was away for too long."""
    TIMED_OUT = "timed out"


@dataclass(frozen=True)
class Row:
    """A row of the table."""

    phase: InstancePhase
    """What the instance shows during the step."""
    after: Mapping[InstanceEvent, InstanceStep | None]
    """None: it is gone."""


InstanceTable = Mapping[InstanceStep, Row]

INSTANCE_TABLES: Mapping[int, InstanceTable] = {
    1: {
        InstanceStep.LAUNCH: Row(
            InstancePhase.LAUNCHING,
            {
                InstanceEvent.DONE: InstanceStep.AWAIT_AGENT,
                InstanceEvent.REFUSED: None,
                # What was asked may have been done.
                InstanceEvent.TOLD: InstanceStep.TERMINATE,
            },
        ),
        InstanceStep.AWAIT_AGENT: Row(
            InstancePhase.JOINING,
            {
                InstanceEvent.DONE: InstanceStep.SERVE,
                InstanceEvent.TOLD: InstanceStep.DRAIN,
                InstanceEvent.LOST: InstanceStep.TERMINATE,
                InstanceEvent.TIMED_OUT: InstanceStep.TERMINATE,
            },
        ),
        InstanceStep.SERVE: Row(
            InstancePhase.READY,
            {InstanceEvent.TOLD: InstanceStep.DRAIN, InstanceEvent.LOST: InstanceStep.TERMINATE},
        ),
        InstanceStep.DRAIN: Row(
            InstancePhase.DRAINING,
            {
                InstanceEvent.DONE: InstanceStep.TERMINATE,
                InstanceEvent.LOST: InstanceStep.TERMINATE,
                InstanceEvent.TIMED_OUT: InstanceStep.TERMINATE,
            },
        ),
        InstanceStep.TERMINATE: Row(InstancePhase.DRAINING, {InstanceEvent.DONE: None}),
    },
}
"""By version, as `lifecycle.attempts.TABLES`."""

LATEST_INSTANCES = max(INSTANCE_TABLES)

FIRST_STEPS: Mapping[InstancePhase, InstanceStep] = {
    InstancePhase.REQUESTED: InstanceStep.LAUNCH,
    InstancePhase.LAUNCHING: InstanceStep.LAUNCH,
    InstancePhase.JOINING: InstanceStep.AWAIT_AGENT,
    InstancePhase.READY: InstanceStep.SERVE,
    InstancePhase.DRAINING: InstanceStep.DRAIN,
}
"""Where a workflow begins that is new, or takes the place of one that is gone."""


def next_instance_phases(table: InstanceTable) -> dict[InstancePhase, frozenset[InstancePhase]]:
    """Which phase may follow which in an instance's life."""
    first = table[FIRST_STEPS[InstancePhase.REQUESTED]].phase
    out: dict[InstancePhase, set[InstancePhase]] = {phase: set() for phase in InstancePhase}
    out[InstancePhase.REQUESTED].add(first)
    for row in table.values():
        for step in row.after.values():
            out[row.phase].add(InstancePhase.GONE if step is None else table[step].phase)
    return {phase: frozenset(following - {phase}) for phase, following in out.items()}


_EACH = [next_instance_phases(table) for table in INSTANCE_TABLES.values()]
NEXT_INSTANCE_PHASES = {phase: frozenset().union(*(each[phase] for each in _EACH)) for phase in InstancePhase}
"""What some version allows: workflows that follow an older one go its ways."""
