"""Every transition that the phases allow is in a life that some test lives through."""

from itertools import pairwise

from domain.phases import Phase
from lifecycle.attempts import NEXT_PHASES
from tests.workflows import test_leaving, test_loading, test_loss, test_mail, test_placing, test_running
from tests.workflows.stories import PATHS

TOLD_IN = (test_placing, test_running, test_mail, test_loss, test_leaving, test_loading)

NEVER_MADE = {
    # Only by a workflow that replaces another and cannot go on, after tasks failed whose start was not written down.
    (Phase.PLACING, Phase.FAILED),
    (Phase.MIGRATING, Phase.FAILED),
    # By the database alone, for workloads that wait in the queue too long (`infra.db.ending`).
    (Phase.PREEMPTED, Phase.FAILED),
}
"""Allowed by `NEXT_PHASES`, and made by no workflow."""


def made() -> set[tuple[Phase, Phase]]:
    """The transitions of all stories."""
    phases = [[Phase(step.split()[0]) for step in path] for path in PATHS.values()]
    return {pair for path in phases for pair in pairwise(path)}


def test_every_transition_is_told() -> None:
    """Each allowed transition is part of a story's path, but for those that no workflow makes."""
    allowed = {(phase, following) for phase, all_ in NEXT_PHASES.items() for following in all_}
    assert made() == allowed - NEVER_MADE
    assert allowed >= NEVER_MADE


def test_all_stories_are_known_here() -> None:
    """The modules that tell stories are those that are looked at here."""
    told = {name for module in TOLD_IN for name in vars(module) if name in PATHS}
    assert told == set(PATHS)
