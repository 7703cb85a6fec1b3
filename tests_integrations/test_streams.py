"""Tests of streams in a `ResumableLoader`: a position within an epoch is resumed, and nothing is read twice."""

import random
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from mizzen.checkpoint import Checkpointer, StateError
from mizzen.integrations.streams import ShardedStream
from mizzen.integrations.torch import ResumableLoader

SIZES = [5, 0, 9, 3, 7, 8, 1, 6]


def read(shard: int, start: int) -> Iterator[torch.Tensor]:
    """Yields the samples of a shard: the shard, the number of the sample, and random numbers."""
    for number in range(start, SIZES[shard]):
        yield torch.tensor([shard, number, torch.rand(1).item(), random.random()], dtype=torch.float64)


def loader(workers: int, size: int | None = 4, **options: Any) -> ResumableLoader:
    stream = ShardedStream(range(len(SIZES)), read, shuffle=True, seed=3)
    return ResumableLoader(stream, batch_size=size, num_workers=workers, **options)


class Counting(IterableDataset):
    """A stream with a state, as its author wrote it: it counts what it has yielded, over all epochs."""

    def __init__(self) -> None:
        self.number = self.total = 0

    def __iter__(self) -> Iterator[int]:
        while self.number < 10:
            self.number += 1
            self.total += 1
            yield self.total
        self.number = 0

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number, "total": self.total}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number, self.total = state["number"], state["total"]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(("workers", "size"), [(0, 4), (0, None), (2, 4), (3, None)])
def test_it_goes_on_where_the_training_was(workers: int, size: int | None) -> None:
    """After each number of batches a new loader yields the rest of the epoch and the next one, with the same noise."""
    torch.manual_seed(1)
    random.seed(1)
    whole = loader(workers, size)
    first = [batch.tolist() for batch in whole]
    generators = torch.get_rng_state(), random.getstate()
    expected = [batch.tolist() for batch in whole]
    after = [batch.tolist() for batch in whole]
    samples = first if size is None else list(chain.from_iterable(first))
    assert sorted(tuple(one[:2]) for one in samples) == [(s, n) for s, count in enumerate(SIZES) for n in range(count)]
    assert first != expected
    for cut in range(0, len(expected) + 1, 3 if workers else 1):
        torch.set_rng_state(generators[0])
        random.setstate(generators[1])
        cutting = loader(workers, size)
        cutting.set_epoch(1)
        iteration = iter(cutting)
        seen = [batch.tolist() for batch in islice(iteration, cut)]
        state = cutting.state_dict()
        again = loader(workers, size)
        again.load_state_dict(state)
        again.set_epoch(1)
        rest = [batch.tolist() for batch in again]
        assert seen + rest == expected, cut
        assert again.epoch == 2
        assert [batch.tolist() for batch in again] == after, cut


def test_a_state_that_is_kept_does_not_change() -> None:
    """A position stays where it was while the loader goes on, and while another loader goes on from it."""
    whole = loader(0)
    iteration = iter(whole)
    next(iteration)
    state = whole.state_dict()
    expected = [batch[:, :2].tolist() for batch in iteration]
    for _ in range(2):
        again = loader(0)
        again.load_state_dict(state)
        assert [batch[:, :2].tolist() for batch in again] == expected


def test_nothing_is_read_twice() -> None:
    """A resumed worker begins to read at the first sample that the training has not used."""
    starts: list[tuple[int, int]] = []

    def noted(shard: int, start: int) -> Iterator[Any]:
        starts.append((shard, start))
        return read(shard, start)

    def made() -> ResumableLoader:
        return ResumableLoader(ShardedStream(range(len(SIZES)), noted), batch_size=4)

    cut = made()
    iteration = iter(cut)
    next(iteration)
    next(iteration)
    state = cut.state_dict()
    starts.clear()
    again = made()
    again.load_state_dict(state)
    next(iter(again))
    assert starts == [(2, 3), (3, 0)] or starts == [(2, 3)]


@pytest.mark.parametrize(
    ("left", "drop_last", "cuts"), [(0, True, (1, 2, 2, 4, 3)), (2, True, (1, 2, 2, 4, 3)), (0, False, (1, 3, 4, 4))]
)
def test_a_stream_of_another_author(left: int, drop_last: bool, cuts: tuple[int, ...], tmp_path: Path) -> None:
    """A dataset with `state_dict` is enough; its state between epochs is saved, and an epoch left early is over.

    Without `drop_last`, an epoch has four batches, the last one of them short: cuts at 4 and 8 are after it.
    """

    def trained(root: Path, steps: int) -> list[int]:
        made = ResumableLoader(Counting(), batch_size=3, drop_last=drop_last)
        checkpointer = Checkpointer(root, interval_s=0)
        checkpointer.track(loader=made)
        first = step = checkpointer.restore()
        found = []
        while True:
            for batch in made:
                found += batch.tolist()
                step += 1
                checkpointer.step(step)
                if step == first + steps:
                    return found
                if left and step % left == 0:
                    break

    whole = trained(tmp_path / "whole", 12)
    # A batch after which the loop is left is not the last of a part.
    parts = [trained(tmp_path / "cut", steps) for steps in cuts]
    assert list(chain.from_iterable(parts)) == whole


def test_the_second_form_takes_over_a_loader() -> None:
    """Options of a plain loader are kept, also its collator."""
    stream = ShardedStream(range(len(SIZES)), read)
    plain = DataLoader(stream, batch_size=4, collate_fn=lambda batch: len(batch), drop_last=True)
    assert list(ResumableLoader(plain)) == [4] * 9


def test_what_cannot_be_resumed_is_refused() -> None:
    """Streams without a state, persistent workers, another number of workers within an epoch, another stream."""
    with pytest.raises(ValueError, match=r"dataset: Plain has no state_dict\(\) and load_state_dict\(\)"):
        ResumableLoader(type("Plain", (IterableDataset,), {"__iter__": iter})())
    with pytest.raises(ValueError, match="persistent_workers=True: must be False for a stream"):
        loader(2, persistent_workers=True)
    with pytest.raises(ValueError, match="shards: is empty"):
        ShardedStream([], read)
    cut = loader(2)
    next(iter(cut))
    state = cut.state_dict()
    with pytest.raises(StateError, match="was read by 2 workers; set num_workers=2 until it ends"):
        loader(3).load_state_dict(state)
    with pytest.raises(StateError, match="saved stream has shards 8, but this one has 2"):
        ShardedStream([1, 2], read).load_state_dict(ShardedStream(range(8), read).state_dict())
