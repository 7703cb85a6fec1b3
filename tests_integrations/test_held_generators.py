"""Random generators of a checkpoint wait for the loader whose iteration goes on."""

from typing import Any

import pytest

from mizzen.checkpoint import rng
from mizzen.integrations.torch import ResumableLoader
from tests_integrations.test_torch_loader import GOING_ON, batches, dataset


def test_generators_wait_only_for_an_iteration_that_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a `break` the next iteration may never come, so the generators are restored at once."""
    loader = ResumableLoader(dataset(), batch_size=4)
    batches(loader, 3)
    GOING_ON.clear()
    again = ResumableLoader(dataset(), batch_size=4)
    again.load_state_dict(loader.state_dict())
    calls: list[Any] = []
    monkeypatch.setattr(rng, "restore_shared", calls.append)
    assert not again.resume_generators(rng.HeldGenerators({}))
    iteration = iter(loader)
    next(iteration)
    again.load_state_dict(loader.state_dict())
    assert again.resume_generators(rng.HeldGenerators({})) and not calls
    batches(again)
    assert calls == [{}]


@pytest.mark.parametrize("trained", [True, False])
def test_the_first_batch_may_be_of_a_loader_between_epochs(trained: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It restores the generators; if it was only a look, the loader that resumes restores them again."""
    calls: list[Any] = []
    monkeypatch.setattr(rng, "restore_shared", calls.append)
    within, between = (ResumableLoader(dataset(), batch_size=4) for _ in range(2))
    iteration = iter(within)
    next(iteration)
    within.load_state_dict(within.state_dict())
    held = rng.HeldGenerators({})
    assert within.resume_generators(held) and not between.resume_generators(held)
    has_trained = False
    for loader in (within, between):
        loader.watch_training(lambda: has_trained, lambda: None)
    next(iter(between))
    assert calls == [{}]
    has_trained = trained
    next(iter(within))
    assert len(calls) == (1 if trained else 2)
