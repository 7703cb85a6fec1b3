"""Decides whether a failure on machines that owners lend is the workload's, or may be the fault of one of them.

Only the owner's machine says how a task or a launch ended there, and a damaged or hostile one can say anything. It can
also make the tasks of its gang on other machines fail. So a failure counts against the workload only if no single lent
machine took part in all attempts that failed: then at least two machines, usually of two owners, agree. Until then the
attempt is repeated: the first time without one of the suspects, from then on without all of them, because the reporter
may be an honest machine whose peer makes its task fail. `MOST_ATTEMPTS` bounds the repetitions.
"""

from collections.abc import Collection
from dataclasses import dataclass

MOST_ATTEMPTS = 3
"""This many failed attempts in a row count against the workload even if one machine took part in all of them. Before
the last one, the workload avoided all suspects, so it was placed on one only after the time of avoidance
(`activities.scheduling.avoided_machines.AVOIDED`)."""


@dataclass(frozen=True)
class Suspicion:
    """The failed attempts of a workload that were not confirmed, since the last one that was."""

    machines: tuple[str, ...] = ()
    """The suspects: the lent machines that took part in all these attempts, sorted."""
    attempts: int = 0


NONE = Suspicion()
"""No failure is unconfirmed."""


@dataclass(frozen=True)
class Doubt:
    """A failure that does not count against the workload, because it is not confirmed."""

    avoided: tuple[str, ...]
    """The suspects without which the workload is tried again, sorted."""
    after: Suspicion


def doubt(before: Suspicion, lent: Collection[str], reporter: str | None) -> Doubt | None:
    """Returns the doubt about a failed attempt; None: the failure is confirmed, and counts against the workload.

    Args:
        before: the failures that were not confirmed.
        lent: the lent machines that can have caused this failure: all those of the gang, or, for a launch, the machine
            that refused it.
        reporter: the machine that reported the failure, if known. It is avoided after the first failure if it is a
            suspect. After further ones, all suspects are avoided.
    """
    suspects = sorted(set(lent).intersection(before.machines) if before.attempts else lent)
    if not suspects or before.attempts + 1 >= MOST_ATTEMPTS:
        return None
    one = reporter if reporter in suspects else suspects[0]
    avoided = suspects if before.attempts else [one]
    return Doubt(tuple(avoided), Suspicion(tuple(suspects), before.attempts + 1))
