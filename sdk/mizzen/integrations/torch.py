"""A sampler and a loader for torch whose position is part of the checkpoint.

    loader = ResumableLoader(dataset, batch_size=32, shuffle=True)
    checkpointer.track(model=model, optimizer=optimizer, loader=loader)
    step = checkpointer.restore()
    for epoch in range(loader.epoch, epochs):
        for batch in loader:
            ...

The order of an epoch follows from the seed and the epoch alone. A position counts samples of all ranks, so a gang of
another size goes on at the same place; every rank's is the same, and one rank's will do for all.
"""

import hashlib
import math
import os
from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from mizzen.checkpoint.errors import StateError


class ResumableSampler(Sampler[int]):
    """Indices of a dataset for one rank, in an order that follows from (seed, epoch), from any position on.

    Each iteration gives the rest of the present epoch from `position`. It does not count by itself, since a loader
    asks for indices long before the training uses them: whoever feeds the training calls `advance`
    (`ResumableLoader` does).

    Of each `world_size` indices in a row, every rank gets one. Where the dataset does not divide evenly, the epoch is
    filled up with its first indices, as torch's `DistributedSampler` does.
    """

    def __init__(
        self,
        dataset: Sized,
        *,
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        """`rank` and `world_size` come from the environment (`RANK`, `WORLD_SIZE`) by default.

        Raises:
            ValueError: the dataset is empty, or `rank` is not one of `world_size`.
        """
        self.size = len(dataset)
        self.shuffle = shuffle
        self.seed = seed
        self.rank = int(os.environ.get("RANK", "0")) if rank is None else rank
        self.world_size = int(os.environ.get("WORLD_SIZE", "1")) if world_size is None else world_size
        if not self.size:
            raise ValueError("the dataset is empty: nothing can be sampled from it")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank={self.rank}: must be from 0 to world_size - 1, which is {self.world_size - 1}")
        self.epoch = 0
        self.position = 0
        """Samples of this epoch that all ranks together have used."""
        self.steps = 0
        """How often `advance` was called."""

    @property
    def total(self) -> int:
        """Samples of an epoch over all ranks, those that fill it up included."""
        return len(self) * self.world_size

    def __len__(self) -> int:
        """Samples of a whole epoch for this rank."""
        return math.ceil(self.size / self.world_size)

    def __iter__(self) -> Iterator[int]:
        yield from self._order()[self.position + self.rank : self.total : self.world_size].tolist()

    def _order(self) -> torch.Tensor:
        order = torch.arange(self.size)
        if self.shuffle:
            order = torch.randperm(self.size, generator=self.generator("order"))
        return order.repeat(math.ceil(self.total / self.size))[: self.total]

    def generator(self, purpose: str) -> torch.Generator:
        """A generator of its own for something of this epoch, so that the shared one stays as it is."""
        digest = hashlib.sha256(f"{purpose}/{self.seed}/{self.epoch}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch; the position stays where it is the present one."""
        if epoch != self.epoch:
            self.epoch, self.position = epoch, 0

    def advance(self, samples: int) -> int:
        """Each rank has used so many samples more; gives the number of such steps from the very beginning."""
        self.position = min(self.position + samples * self.world_size, self.total)
        self.steps += 1
        return self.steps

    def state_dict(self) -> dict[str, int]:
        """Seed, size of the dataset, epoch, position and steps."""
        return {name: getattr(self, name) for name in ("seed", "size", "epoch", "position", "steps")}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go to where `state` was.

        Raises:
            StateError: the seed was another one, or the dataset of another size: what was used cannot be known then.
        """
        for name in ("seed", "size"):
            if state[name] != getattr(self, name):
                raise StateError(f"the sampler had {name} {state[name]} and has {getattr(self, name)} now")
        self.epoch, self.position = state["epoch"], min(state["position"], self.total)
        self.steps = state["steps"]


class ResumableLoader(DataLoader[Any]):
    """A `DataLoader` with a state: epoch, and how many samples the training was given.

    Batches that workers have made ahead do not count, so a checkpoint after a step has the position after that step's
    batch. After a load the first iteration gives the rest of the epoch (nothing, if the epoch was through) and each
    later one a whole epoch. The generator that all share is not drawn from.

    Workers begin anew at a load. Random transforms come out as without the interruption if they run in the training's
    process (`num_workers=0`), or if their randomness follows from the sample.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int = 1,
        shuffle: bool = False,
        *,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        **options: Any,
    ) -> None:
        """`rank` and `world_size` as in `ResumableSampler`; `options` are those of `DataLoader`.

        Raises:
            ValueError: the dataset is empty, a number is out of range, or an option cannot go with the sampler.
        """
        for name in ("sampler", "batch_sampler", "generator"):
            if options.get(name) is not None:
                raise ValueError(f"{name}: a ResumableLoader has its own; use ResumableSampler with a DataLoader")
        if not isinstance(dataset, Sized):
            raise ValueError(f"dataset: {type(dataset).__name__} has no length, so no position in it can be kept")
        order = ResumableSampler(dataset, shuffle=shuffle, seed=seed, rank=rank, world_size=world_size)
        super().__init__(dataset, batch_size=batch_size, sampler=order, generator=torch.Generator(), **options)
        self._order = order
        self._begun = False

    @property
    def epoch(self) -> int:
        """The epoch that the training is in, from 0."""
        return self._order.epoch

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch, unless it is the present one."""
        self._order.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        order = self._order
        # What was left early is over; what was loaded goes on.
        if self._begun and order.position:
            order.set_epoch(order.epoch + 1)
        self._begun = True
        self.generator.set_state(order.generator("workers").get_state())
        assert self.batch_size is not None
        if order.position < order.total:
            for batch in super().__iter__():
                order.advance(self.batch_size)
                yield batch
        order.set_epoch(order.epoch + 1)

    def state_dict(self) -> dict[str, int]:
        """Where the training is in the data."""
        return self._order.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Let the next iteration go on at `state`.

        Raises:
            StateError: it is of another dataset or seed.
        """
        self._order.load_state_dict(state)
        self._begun = False
