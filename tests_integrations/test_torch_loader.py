"""Tests of the resumable sampler and loader: each sample is used once, and a position can be resumed."""

from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from mizzen.checkpoint import StateError
from mizzen.integrations.torch import ResumableLoader, ResumableSampler


def dataset(size: int = 30) -> TensorDataset:
    """Returns a dataset whose samples are their indices."""
    return TensorDataset(torch.arange(size))


def batches(loader: Any, limit: int | None = None) -> list[list[int]]:
    """Returns the batches of one iteration: all, or the first `limit`."""
    found: list[list[int]] = []
    for (batch,) in loader:
        found.append(batch.tolist())
        if len(found) == limit:
            break
    return found


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("cut", [0, 1, 3, 7, 8])
def test_it_goes_on_where_the_training_was(workers: int, cut: int) -> None:
    """After `cut` batches of the second epoch, a new loader yields the rest, although workers have prefetched more."""
    options = {"batch_size": 4, "shuffle": True, "num_workers": workers}
    whole = ResumableLoader(dataset(), **options)
    epochs = [batches(whole) for _ in range(3)]
    assert [len(epoch) for epoch in epochs] == [8, 8, 8] and epochs[0] != epochs[1]
    assert all(sorted(chain.from_iterable(epoch)) == list(range(30)) for epoch in epochs)
    loader = ResumableLoader(dataset(), **options)
    batches(loader)
    if cut:
        batches(loader, cut)
    state = loader.state_dict()
    again = ResumableLoader(dataset(), **options)
    again.load_state_dict(state)
    assert (again.epoch, len(again)) == (1, 8)
    assert batches(again) == epochs[1][cut:]
    assert again.epoch == 2
    assert batches(again) == epochs[2]


def test_persistent_workers_and_a_left_epoch() -> None:
    """With persistent workers, an epoch that was left early is over, and the next one is complete."""
    options = {"batch_size": 4, "shuffle": True}
    expected = ResumableLoader(dataset(), **options)
    loader = ResumableLoader(dataset(), num_workers=1, persistent_workers=True, **options)
    batches(expected)
    batches(loader, 2)
    assert batches(loader) == batches(expected)
    assert loader.epoch == 2


def test_the_shared_generator_is_left_alone() -> None:
    """Neither the order nor the workers draw from torch's global generator."""
    before = torch.get_rng_state()
    batches(ResumableLoader(dataset(), batch_size=4, shuffle=True, num_workers=1))
    assert torch.equal(torch.get_rng_state(), before)


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    """The order is determined by seed and epoch. Without shuffling it is the order of the dataset."""

    def order(seed: int, epoch: int) -> list[int]:
        sampler = ResumableSampler(dataset(), seed=seed)
        sampler.set_epoch(epoch)
        return list(sampler)

    orders = [order(seed, epoch) for seed in range(3) for epoch in range(3)]
    assert len({tuple(one) for one in orders}) == 9
    assert orders == [order(seed, epoch) for seed in range(3) for epoch in range(3)]
    assert list(ResumableSampler(dataset(), shuffle=False)) == list(range(30))


@pytest.mark.parametrize(("size", "world_size"), [(30, 3), (31, 3), (2, 5), (30, 1)])
def test_ranks_share_an_epoch(size: int, world_size: int) -> None:
    """Each sample goes to one rank, all ranks have equally many, and the padding is the beginning of the epoch."""
    ranks = [ResumableSampler(dataset(size), rank=rank, world_size=world_size) for rank in range(world_size)]
    shares = [list(rank) for rank in ranks]
    assert {len(share) for share in shares} == {len(ranks[0])} == {-(-size // world_size)}
    flat = [share[i] for i in range(len(ranks[0])) for share in shares]
    assert sorted(flat[:size]) == list(range(size))
    assert flat[size:] == (flat[:size] * world_size)[: len(flat) - size]


def test_a_gang_of_another_size_goes_on() -> None:
    """If two ranks resume an epoch of three ranks, no sample is used twice and none is left out."""
    three = [ResumableLoader(dataset(), 2, True, rank=rank, world_size=3) for rank in range(3)]
    used = [number for loader in three for batch in batches(loader, 3) for number in batch]
    states = [loader.state_dict() for loader in three]
    assert states[0] == states[1] == states[2]
    two = [ResumableLoader(dataset(), 3, True, rank=rank, world_size=2) for rank in range(2)]
    for loader in two:
        loader.load_state_dict(states[0])
    rest = [number for loader in two for batch in batches(loader) for number in batch]
    assert sorted(used + rest) == list(range(30))


def test_the_sampler_counts_what_it_is_told() -> None:
    """With a plain `DataLoader`, `advance` counts the used samples and returns the number of steps."""
    sampler = ResumableSampler(dataset())
    loader = DataLoader(dataset(), batch_size=4, sampler=sampler, num_workers=1)
    expected = batches(loader)
    steps = [sampler.advance(len(batch)) for batch in expected[:5]]
    assert steps == [1, 2, 3, 4, 5]
    again = ResumableSampler(dataset())
    again.load_state_dict(sampler.state_dict())
    assert batches(DataLoader(dataset(), batch_size=4, sampler=again)) == expected[5:]
    assert again.advance(2) == 6


def test_what_does_not_fit_is_refused() -> None:
    """A state with another seed or size, a dataset that is empty or has no length, and another sampler are errors."""
    state = ResumableLoader(dataset(), seed=1).state_dict()
    with pytest.raises(StateError, match="the saved sampler has seed 1, but this one has 0"):
        ResumableLoader(dataset()).load_state_dict(state)
    with pytest.raises(StateError, match="the saved sampler has size 30, but this one has 31"):
        ResumableLoader(dataset(31), seed=1).load_state_dict(state)
    with pytest.raises(ValueError, match="the dataset is empty"):
        ResumableSampler([])
    with pytest.raises(ValueError, match=r"rank=2: must be from 0 to world_size - 1, which is 1"):
        ResumableSampler(dataset(), rank=2, world_size=2)
    with pytest.raises(ValueError, match="sampler: a ResumableLoader sets this itself"):
        ResumableLoader(dataset(), sampler=ResumableSampler(dataset()))

    class Endless(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(int, 1)

    with pytest.raises(ValueError, match="dataset: Endless has no length"):
        ResumableLoader(Endless())
