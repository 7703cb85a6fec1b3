"""Positions of samplers: the progress in an epoch of a loader, and replaying a sampler of any class up to it."""

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import RandomSampler, Sampler, SubsetRandomSampler, WeightedRandomSampler

from mizzen.checkpoint.errors import StateError
from mizzen.checkpoint.tensors import loaded
from mizzen.integrations.random_numbers import RandomStream, owned, seed_of

_BLOCK = 1 << 14
"""Number of indices that `DrawnSampler` draws at once."""


class DrawnSampler(Sampler[int]):
    """Draws indices with replacement, like torch's `RandomSampler`. Each block of indices has a seed of its own.

    An iteration can therefore begin at any index without drawing those before.
    """

    def __init__(self, size: int, number: int) -> None:
        """Create a sampler that draws `number` indices of a dataset of `size` samples."""
        self._size = size
        self._number = number
        self._from = (0, 0)

    def begin(self, seed: int, start: int) -> None:
        """Make the next iteration begin with index number `start` of the order that `seed` gives."""
        self._from = (seed, start)

    def __len__(self) -> int:
        """Return the number of indices of a whole epoch."""
        return self._number

    def __iter__(self) -> Iterator[int]:
        seed, start = self._from
        for block in range(start // _BLOCK, -(-self._number // _BLOCK)):
            drawn = torch.Generator().manual_seed(seed_of("block", seed, block))
            indices = torch.randint(self._size, (min(_BLOCK, self._number - block * _BLOCK),), generator=drawn)
            yield from indices[max(0, start - block * _BLOCK) :].tolist()


_INDEPENDENT = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DrawnSampler)


class DataPosition:
    """The position of a training in the data: the epoch, and the number of its samples that were used."""

    saved: tuple[str, ...] = ("seed", "epoch", "position", "steps")
    fixed: tuple[str, ...] = ("seed",)

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.epoch = 0
        self.position = 0
        """Number of samples of this epoch that all ranks together have used; in `ReplayedSampler`, of batches."""
        self.steps = 0
        """Number of calls of `advance`."""
        self.is_saved = False
        """Whether the state of the loader is read for checkpoints."""

    def generator(self, purpose: str) -> torch.Generator:
        """Return a new generator for `purpose`, seeded by seed and epoch, so that the global generator is not used."""
        return torch.Generator().manual_seed(seed_of(purpose, self.seed, self.epoch))

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of `epoch`. If it is the current epoch, the position is not changed."""
        if epoch != self.epoch:
            self.epoch, self.position = epoch, 0

    def restart(self) -> None:
        """Go to the beginning of the epoch, as before the training."""
        self.position = self.steps = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the seed, the epoch, the position and the number of steps."""
        return {name: getattr(self, name) for name in self.saved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the position from `state`.

        Raises:
            StateError: settings that determine the order have changed, so the used samples cannot be determined.
        """
        if missing := [name for name in self.saved if name not in state]:
            raise StateError(f"the saved position lacks {', '.join(missing)}: it is that of another kind of sampler")
        for name in self.fixed:
            if state[name] != getattr(self, name):
                raise StateError(f"the saved sampler has {name} {state[name]}, but this one has {getattr(self, name)}")
        for name in self.saved:
            setattr(self, name, state[name])

    def go_to(self, state: dict[str, Any]) -> None:
        """Go to another position of this process, as before a look at a batch."""
        self.load_state_dict(state)


class ReplayedSampler(DataPosition):
    """The position in a sampler of any class: the number of batches, or of indices without batches.

    After a load the sampler is iterated again up to the position, which loads no data. It draws from a stream of its
    own, seeded by seed and epoch, so that it yields the same again: from the global generators, and from those that it
    owns. Numbers and texts among its attributes, such as an epoch, are saved; lists and arrays that its iteration
    changes, as a shuffle in place does, are put back when the iteration ends.
    """

    saved = (*DataPosition.saved, "attributes")

    def __init__(self, sampler: Iterable[Any], seed: int, rank: int) -> None:
        super().__init__(seed)
        self.sampler = sampler
        # Ranks that draw samples at random must not draw the same; other samplers divide what all ranks draw alike.
        self._rank = rank if any(isinstance(one, _INDEPENDENT) for one in _nested(sampler)) else 0
        self.attributes: list[dict[str, Any]] = []
        """The changed attributes of the sampler, and of the samplers within it, when the epoch began."""
        self._initial = [_plain(one) for one in _nested(sampler)]
        self._left: list[dict[str, Any]] | None = None
        """The plain attributes as the last iteration has left them."""

    def __iter__(self) -> Iterator[Any]:
        self.attributes = self._changed()
        lists = [held for one in _nested(self.sampler) for held in vars(one).values() if _is_list(held)]
        before = [(held, held.copy()) for held in lists]
        seed, position = seed_of("order", self.seed, self.epoch, self._rank), self.position
        stream = RandomStream(seed, owned(self.sampler))
        for one in _nested(self.sampler):
            if isinstance(one, DrawnSampler):
                one.begin(seed, position * getattr(self.sampler, "batch_size", 1))
                position = 0
        try:
            with stream:
                indices = iter(self.sampler)
                deque(islice(indices, position), maxlen=0)
            while True:
                self._left = [_plain(one) for one in _nested(self.sampler)]
                with stream:
                    try:
                        index = next(indices)
                    except StopIteration:
                        self._left = [_plain(one) for one in _nested(self.sampler)]
                        return
                yield index
        finally:
            for held, content in before:
                held[:] = content

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and the changed attributes of the sampler at the beginning of the epoch."""
        if not self.position:
            self.attributes = self._changed()
        return super().state_dict()

    def _changed(self) -> list[dict[str, Any]]:
        """Return the plain attributes that differ from those of the new sampler, which other ranks may not share."""
        return [
            {name: value for name, value in _plain(one).items() if name not in initial or value != initial[name]}
            for one, initial in zip(_nested(self.sampler), self._initial, strict=False)
        ]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the position, and the attributes of the sampler.

        Raises:
            StateError: the state is from another seed or kind of sampler.
        """
        super().load_state_dict(state)
        for one, values, initial in zip(_nested(self.sampler), self.attributes, self._initial, strict=False):
            vars(one).update(initial | values)

    def go_to(self, state: dict[str, Any]) -> None:
        """Go to another position of this process. Attributes that the script has set after the iteration stay."""
        left, now = self._left, [_plain(one) for one in _nested(self.sampler)]
        self.load_state_dict(state)
        for one, before, after in zip(_nested(self.sampler), left or (), now, strict=False):
            vars(one).update({name: value for name, value in after.items() if before.get(name) != value})

    def advance(self, samples: int) -> int:
        """Record that the training has used one more batch. Return the total number of such steps."""
        del samples
        self.position += 1
        self.steps += 1
        return self.steps


def _nested(sampler: Any) -> list[Any]:
    """Return a sampler and those that it wraps, such as the sampler in a `BatchSampler`."""
    found = [sampler] if hasattr(sampler, "__dict__") else []
    for inner in (found and vars(sampler).values()) or ():
        if isinstance(inner, Sampler) and inner is not sampler:
            found += _nested(inner)
    return found


def _plain(sampler: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(sampler).items() if isinstance(value, int | float | str | bool)}


def _is_list(value: Any) -> bool:
    numpy = loaded("numpy")
    return isinstance(value, list) or (numpy is not None and isinstance(value, numpy.ndarray) and value.ndim > 0)
