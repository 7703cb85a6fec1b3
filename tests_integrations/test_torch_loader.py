"""Tests of the resumable sampler and loader: each sample is used once, and a position can be resumed."""

import gc
import pickle
import random
import warnings
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from mizzen.checkpoint import Checkpointer, CheckpointWarning, StateError, Tracked, rng
from mizzen.integrations.torch import ResumableLoader, ResumableSampler


def dataset(size: int = 30) -> TensorDataset:
    """Returns a dataset whose samples are their indices."""
    return TensorDataset(torch.arange(size))


GOING_ON: list[Any] = []
"""Iterations that were not left: the last one of `batches` with a limit."""


@pytest.fixture(autouse=True)
def all_left() -> Iterator[None]:
    """Iterations end with their test. Otherwise trainings of later tests would be within them."""
    yield
    GOING_ON.clear()


def batches(loader: Any, limit: int | None = None) -> list[list[int]]:
    """Returns the batches of one iteration: all, or the first `limit`; then the iteration goes on."""
    iteration = iter(loader)
    GOING_ON[:] = [iteration]
    return [batch.tolist() for (batch,) in islice(iteration, limit)]


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
    used, states = [], []
    for loader in three:
        used += chain.from_iterable(batches(loader, 3))
        states.append(loader.state_dict())
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
    with pytest.raises(StateError, match="the saved position lacks attributes"):
        ResumableLoader(DataLoader(dataset(), sampler=Shuffled(30))).load_state_dict(state)

    class Endless(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(int, 1)

    with pytest.raises(ValueError, match=r"dataset: Endless has no state_dict\(\)"):
        ResumableLoader(Endless())


class Shuffled(Sampler[int]):
    """Shuffles in place, and counts its epochs."""

    def __init__(self, size: int) -> None:
        self.order = list(range(size))
        self.epoch = 0
        self.own = np.random.default_rng(3)

    def __iter__(self) -> Iterator[int]:
        random.Random(self.epoch).shuffle(self.order)
        self.own.shuffle(self.order)
        random.shuffle(self.order)
        self.epoch += 1
        for index in self.order:
            yield (index + int(torch.randint(30, ()))) % 30

    def __len__(self) -> int:
        return len(self.order)


def wrapped(kind: str, workers: int) -> ResumableLoader:
    """Returns a new loader of a kind, as a restarted script creates it."""
    torch.manual_seed(1)
    samplers: dict[str, Any] = {
        "weighted": WeightedRandomSampler(torch.arange(30.0), 30),
        "shuffled": Shuffled(30),
        "distributed": DistributedSampler(dataset(30), num_replicas=2, rank=1),
    }
    if kind == "batches":
        batched = torch.utils.data.BatchSampler(Shuffled(30), 4, True)
        return ResumableLoader(DataLoader(dataset(), batch_sampler=batched, num_workers=workers))
    return ResumableLoader(DataLoader(dataset(), batch_size=4, sampler=samplers[kind], num_workers=workers))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["weighted", "shuffled", "distributed", "batches"])
def test_a_sampler_of_any_class_goes_on(kind: str, workers: int) -> None:
    """A sampler that draws from each kind of generator, shuffles in place and counts yields the same after a load."""
    whole = wrapped(kind, workers)
    epochs = [batches(whole) for _ in range(3)]
    assert epochs[0] != epochs[1] or kind == "distributed"  # Its epoch is not set here.
    for cut in (0, 3, len(epochs[1])):
        loader = wrapped(kind, workers)
        batches(loader)
        torch.rand(5)
        if cut:
            batches(loader, cut)
        state = loader.state_dict()
        again = wrapped(kind, workers)
        random.random()
        again.load_state_dict(state)
        assert batches(again) == epochs[1][cut:]
        assert batches(again) == epochs[2]


class Random(Dataset[Any]):
    """Samples of random numbers: of each global generator, and of one that it owns."""

    def __init__(self) -> None:
        self.own = np.random.default_rng(5)

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> list[float]:
        return [index, random.random(), float(np.random.rand()), float(torch.rand(())), float(self.own.random())]


collating = np.random.default_rng(9)


def noisy(samples: list[Any]) -> torch.Tensor:
    """Adds random numbers of a generator that is a global variable."""
    return torch.stack(default_collate(samples), 1) + torch.rand(()) + float(collating.random())


def seeded(workers: int, **options: Any) -> ResumableLoader:
    """Returns a loader of random samples, after the generators were seeded as at a start."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    collating.bit_generator.state = np.random.default_rng(9).bit_generator.state
    return ResumableLoader(Random(), batch_size=4, shuffle=True, collate_fn=noisy, num_workers=workers, **options)


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("cut", [1, 4, 6])
def test_random_numbers_in_dataset_and_collator_go_on(workers: int, cut: int) -> None:
    """After a restart within an epoch the samples are the same, although other code has drawn before the first batch.

    In between, the training draws, and it draws the same afterwards.
    """
    loader = seeded(workers)
    seen = []
    for number, batch in enumerate(loader, 1):
        seen.append([batch, torch.rand(3), random.random()])
        if number == cut:
            state = Tracked({"loader": loader}).capture(number)
    again = seeded(workers, persistent_workers=workers > 0)
    tracked = Tracked({"loader": again})
    tracked.restore(state)
    assert not torch.equal(torch.get_rng_state(), state["rng"]["torch"])
    assert torch.equal(tracked.capture(cut)["rng"]["torch"], state["rng"]["torch"])
    for _ in DataLoader(dataset(), batch_size=5, shuffle=True):
        random.random()
    found = [[batch, torch.rand(3), random.random()] for batch in again]
    assert len(found) == 6 - cut
    for (batch, drawn, number), (expected, *others) in zip(found, seen[cut:], strict=True):
        assert torch.equal(batch, expected) and torch.equal(drawn, others[0]) and number == others[1]
    if cut == 6:
        assert torch.equal(rng.capture_shared()["torch"], state["rng"]["torch"])


@pytest.mark.parametrize("workers", [0, 2])
def test_the_sampler_alone_seeds_workers(workers: int) -> None:
    """With a plain loader, samples of workers are the same after a restart, and the generators go on."""

    def started() -> tuple[ResumableSampler, Any]:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        sampler = ResumableSampler(TensorDataset(torch.arange(24)))
        return sampler, DataLoader(Noise(), batch_size=4, sampler=sampler, num_workers=workers)

    sampler, loader = started()
    seen = []
    for number, batch in enumerate(loader, 1):
        seen.append((batch, torch.rand(3)))
        sampler.advance(4)
        if number == 3:
            state = Tracked({"sampler": sampler}).capture(number)
    again, loader = started()
    Tracked({"sampler": again}).restore(state)
    torch.rand(7)
    found = [(batch, torch.rand(3), again.advance(4)) for batch in loader]
    assert len(found) == 3 and again.position == 24
    for (batch, drawn, _), (expected, other) in zip(found, seen[3:], strict=True):
        assert torch.equal(batch, expected) and torch.equal(drawn, other)


class Noise(Dataset[Any]):
    """Samples of random numbers of the global generators."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(2) + random.random() + float(np.random.rand()) + index


def test_another_epoch_ends_the_wait_for_the_first_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the training goes to another epoch, the generators are restored before its iterator draws."""
    sampler = ResumableSampler(dataset())
    sampler.advance(4)
    calls: list[Any] = []
    monkeypatch.setattr(rng, "restore_shared", calls.append)
    assert sampler.resume_generators(rng.HeldGenerators({}))
    sampler.set_epoch(0)
    assert not calls
    sampler.set_epoch(1)
    list(sampler)
    assert calls == [{}]


def test_the_end_of_a_resumed_epoch_is_no_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a kill at the end of an epoch, what is drawn between its end and the next epoch stays drawn."""
    sampler = ResumableSampler(dataset())
    sampler.advance(len(sampler))
    calls: list[Any] = []
    monkeypatch.setattr(rng, "restore_shared", calls.append)
    assert sampler.resume_generators(rng.HeldGenerators({}))
    assert list(sampler) == []
    sampler.set_epoch(1)
    assert len(list(sampler)) > 0 and calls == [{}]


def test_a_loader_in_another_process_keeps_plain_indices() -> None:
    """The indices are integers for datasets, and a copy of one is a plain integer."""
    first = next(iter(ResumableSampler(dataset(), shuffle=False)))
    assert isinstance(first, int) and [5, 6][first] == 5 and torch.arange(3)[first] == 0
    assert type(pickle.loads(pickle.dumps(first))) is int


LOST = "loader = ResumableLoader(loader)"
PLAIN = "the epoch would begin again"


@pytest.mark.parametrize(
    ("kind", "told"),
    [("shuffled", LOST), ("weighted", LOST), ("not advanced", r"advance()"), ("in order", PLAIN), ("resumable", "")],
)
def test_a_position_that_is_lost_is_told_before_the_first_save(kind: str, told: str, tmp_path: Path) -> None:
    """A save within an epoch of a loader that is not tracked warns once; a save between epochs does not."""
    loaders: dict[str, Any] = {
        "shuffled": DataLoader(dataset(), batch_size=4, shuffle=True),
        "weighted": DataLoader(dataset(), batch_size=4, sampler=WeightedRandomSampler([1.0] * 30, 30)),
        "not advanced": DataLoader(dataset(), batch_size=4, sampler=ResumableSampler(dataset())),
        "in order": DataLoader(dataset(), batch_size=4),
        "resumable": ResumableLoader(DataLoader(dataset(), batch_size=4, shuffle=True)),
    }
    for within in (True, False):
        loader = loaders[kind]
        checkpointer = Checkpointer(tmp_path / str(within), interval_s=0, attempt=1)
        followed = {"resumable": {"loader": loader}, "not advanced": {"sampler": loader.sampler}}
        checkpointer.track(**followed.get(kind, {}))
        step = checkpointer.restore()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(step // 8, 2):
                for _ in loader:
                    step += 1
                    if within and step % 8 == 3:
                        checkpointer.step(step)
                checkpointer.step(step)
        seen = [str(one.message) for one in caught if issubclass(one.category, CheckpointWarning)]
        assert len(seen) == int(bool(told) and within), seen
        assert all(told in message for message in seen)


def test_an_iteration_that_nobody_holds_is_not_told(tmp_path: Path) -> None:
    """An earlier training of the process has left an iteration in a cycle of objects, which is not collected yet."""
    gc.disable()
    try:
        iteration = iter(DataLoader(dataset(), batch_size=4, shuffle=True))
        next(iteration)
        iteration.own = iteration  # type: ignore[attr-defined]
        del iteration
        checkpointer = Checkpointer(tmp_path, interval_s=0)
        checkpointer.restore()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            checkpointer.step(1)
    finally:
        gc.enable()
    assert [str(one.message) for one in caught if issubclass(one.category, CheckpointWarning)] == []


def every_batch(loader: Any, checkpointer: Checkpointer) -> None:
    """Takes all batches, so a resumed epoch begins again."""
    for step, _ in enumerate(loader, 1):
        checkpointer.step(step)


def unused_batches(loader: Any, checkpointer: Checkpointer, used: int = 0) -> None:
    """Passes over the batches that were used before a restart."""
    for step, _ in enumerate(loader, 1):
        if step <= used:
            continue
        checkpointer.step(step)


@pytest.mark.parametrize("loop", [every_batch, unused_batches])
def test_a_loop_that_begins_an_epoch_again_is_told(loop: Any, tmp_path: Path) -> None:
    """An untracked loader in order is told before the first save, unless the loop can pass over used batches."""
    checkpointer = Checkpointer(tmp_path, interval_s=0)
    checkpointer.restore()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loop(DataLoader(dataset(), batch_size=4), checkpointer)
    seen = [str(one.message) for one in caught if issubclass(one.category, CheckpointWarning)]
    assert len(seen) == int(loop is every_batch) and all(LOST in message for message in seen)
