"""The evidence of an attempt's work on machines that owners lend: the time that others can confirm counts as given.

Only the agent of such a machine says what it does, so that time alone earns nothing. Evidence is a checkpoint of the
attempt that is in the store, for all its machines, or a step that the tasks on another machine of the gang report, too.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

EVIDENCE_S = 3600.0
"""How long after the end of an attempt its evidence can change, in seconds."""


@dataclass(frozen=True)
class Earned:
    """The evidence of an attempt's work. Times are in seconds since the epoch."""

    checkpoint: tuple[int, float] | None = None
    """The newest checkpoint of the attempt that was found in the store: its step, and when it was committed."""
    steps: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    """For each machine: the last step that tasks on another machine report, too, and when both had reported it."""
    answered: tuple[str, ...] = ()
    """The machines that have reported a task of the attempt, sorted. This earns nothing: it ends their launch."""

    @classmethod
    def of(cls, body: Mapping[str, Any] | None) -> "Earned":
        """Returns the evidence from the result of `to_json`; None: there is none."""
        if body is None:
            return cls()
        found = body["checkpoint"]
        steps = {m: tuple(one) for m, one in body["steps"].items()}
        return cls(None if found is None else tuple(found), steps, tuple(body.get("answered", ())))

    def to_json(self) -> dict[str, Any]:
        """Returns the evidence as values of JSON. SQL reads it too (`infra.db.lent_machines`)."""
        return asdict(self)

    def with_steps(self, reported: Mapping[str, int], resumed_step: int | None, now_s: float) -> "Earned":
        """Returns what the attempt has earned after its machines have reported their last steps, at the time `now_s`.

        `resumed_step` is the step of the checkpoint from which the attempt resumed: earlier steps are not its work.
        """
        steps = dict(self.steps)
        for machine, own in reported.items():
            others = [step for other, step in reported.items() if other != machine]
            before = steps[machine][0] if machine in steps else resumed_step or 0
            if others and (both := min(own, max(others))) > before:
                steps[machine] = (both, now_s)
        return replace(self, steps=steps)

    def with_answers(self, machines: Iterable[str]) -> "Earned":
        """Returns the evidence after `machines` have reported their tasks."""
        return replace(self, answered=tuple(sorted({*self.answered, *machines})))

    def with_checkpoint(self, step: int, committed_at_s: float) -> "Earned":
        """Returns the evidence after a checkpoint of the attempt was found in the store."""
        if self.checkpoint is not None and self.checkpoint[0] >= step:
            return self
        return replace(self, checkpoint=(step, committed_at_s))
