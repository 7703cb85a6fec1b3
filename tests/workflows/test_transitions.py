"""Every legal phase change is covered by a test of a workload's path."""

from itertools import pairwise

from domain.lifecycle.attempts import NEXT_PHASES
from domain.phases import Phase
from tests.workflows import (
    test_inbox,
    test_launch_refused,
    test_leaving,
    test_loading,
    test_loss,
    test_placing,
    test_replacement,
    test_retries,
    test_running,
)
from tests.workflows.stories import PATHS

TOLD_IN = (
    test_placing, test_launch_refused, test_running, test_inbox, test_loss, test_replacement, test_leaving,
    test_loading, test_retries,
)  # fmt: skip

NEVER_MADE = {
    # Only by a replacement workflow that cannot continue, if tasks failed whose start was not recorded.
    (Phase.PLACING, Phase.FAILED),
    (Phase.MIGRATING, Phase.FAILED),
    # Only by the database, for workloads that are queued for too long (`infra.db.queued_end`).
    (Phase.PREEMPTED, Phase.FAILED),
}
"""Phase changes that `NEXT_PHASES` allows and that no tested workflow makes."""


def made() -> set[tuple[Phase, Phase]]:
    """Returns the phase changes of all declared paths."""
    phases = [[Phase(step.split()[0]) for step in path] for path in PATHS.values()]
    return {pair for path in phases for pair in pairwise(path)}


def test_every_transition_is_told() -> None:
    """Each legal phase change is on a declared path, except those that no workflow makes."""
    allowed = {(phase, following) for phase, all_ in NEXT_PHASES.items() for following in all_}
    assert made() == allowed - NEVER_MADE
    assert allowed >= NEVER_MADE


def test_all_stories_are_known_here() -> None:
    """All modules with declared paths are listed in `TOLD_IN`."""
    told = {name for module in TOLD_IN for name in vars(module) if name in PATHS}
    assert told == set(PATHS)
