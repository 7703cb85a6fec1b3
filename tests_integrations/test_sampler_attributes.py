"""Weights and scores of samplers that a training changes: a resumed epoch has the order of the one that was left."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Sampler, TensorDataset, WeightedRandomSampler

from mizzen.integrations.torch import ResumableLoader


class ByScore(Sampler[int]):
    """Orders samples by scores, if there are any."""

    def __init__(self) -> None:
        self.scores: Any = None
        self.tried = 0

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Any:
        if self.scores is None:
            yield from range(12)
        else:
            yield from np.argsort(np.asarray(self.scores), kind="stable").tolist()


def replace(sampler: Any, losses: torch.Tensor, kind: str) -> None:
    """Sets what the next epoch depends on, as a script does at the start of an epoch."""
    if kind == "weights":
        sampler.weights = losses.double() + 0.01
    elif kind != "in place":
        sampler.scores = {"tensor": losses.clone(), "array": losses.numpy().copy(), "list": losses.tolist()}[kind]


def train(kind: str, loader: Any, losses: torch.Tensor, epochs: int, kill_at: int, seen: list[Any]) -> Any:
    """Trains, and returns the state after `kill_at` batches."""
    state = None
    for epoch in range(loader.epoch, epochs):
        if epoch or losses.any():
            replace(loader.sampler, losses, kind)
        for (rows,) in loader:
            seen.append(rows.tolist())
            losses[rows] += (7.0 * rows + len(seen)) % 5
            if kind == "in place":
                loader.sampler.weights[rows] = losses[rows].double() + 0.01
            if len(seen) == kill_at:
                state = copy.deepcopy((loader.state_dict(), losses))
    return state


def made(kind: str, workers: int) -> ResumableLoader:
    """Returns a new loader."""
    sampler: Any = ByScore()
    if kind in ("weights", "in place"):
        sampler = WeightedRandomSampler(torch.ones(12), 12)
    return ResumableLoader(TensorDataset(torch.arange(12)), batch_size=2, sampler=sampler, num_workers=workers)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["tensor", "array", "list", "weights", "in place"])
def test_a_resumed_epoch_has_the_order_with_which_it_began(kind: str, workers: int) -> None:
    """The script sets the scores from what it has learned by then; the next epochs are also the same."""
    for kill_at in (2, 6, 8, 12) if workers == 0 else (8,):
        seen: list[Any] = []
        state, losses = train(kind, made(kind, workers), torch.zeros(12), 4, kill_at, seen)
        loader, again = made(kind, workers), seen[:kill_at]
        loader.load_state_dict(state)
        train(kind, loader, losses, 4, -1, again)
        assert again == seen, kill_at


def test_what_a_sampler_has_at_its_start_is_not_saved() -> None:
    """Weights that do not change are no part of a checkpoint, and the script's own tensor stays in the sampler."""
    loader = made("weights", 0)
    weights = loader.sampler.weights  # type: ignore[attr-defined]
    iterator = iter(loader)
    next(iterator), next(iterator)
    state = loader.state_dict()
    assert "now" not in state and not any(isinstance(one, torch.Tensor) for each in state["attributes"] for one in each)
    again = made("weights", 0)
    held = again.sampler.weights  # type: ignore[attr-defined]
    again.load_state_dict(state)
    list(again)
    assert again.sampler.weights is held and torch.equal(held, weights)  # type: ignore[attr-defined]
