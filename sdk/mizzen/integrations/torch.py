"""A sampler and a data loader for torch whose position is saved in checkpoints.

    loader = ResumableLoader(dataset, batch_size=32, shuffle=True)
    checkpointer.track(model=model, optimizer=optimizer, loader=loader)
    step = checkpointer.restore()
    for epoch in range(loader.epoch, epochs):
        for batch in loader:
            ...

The order of an epoch depends only on the seed and the epoch. A position counts the samples of all ranks, so a gang of
another size resumes at the same place. All ranks have the same position, so the state of one rank is enough.
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
    """Yields the indices of a dataset for one rank, in an order given by (seed, epoch), from any position on.

    An iteration yields the rest of the current epoch, from `position`. The sampler does not update `position` itself,
    because a loader requests indices long before the training uses them. The code that passes batches to the training
    must call `advance`, as `ResumableLoader` does.

    Of each `world_size` consecutive indices, every rank gets one. If the size of the dataset is not a multiple of
    `world_size`, the epoch is padded with its first indices, as in torch's `DistributedSampler`.
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
        """Create a sampler. `rank` and `world_size` default to the variables `RANK` and `WORLD_SIZE`.

        Raises:
            ValueError: the dataset is empty, or `rank` is not in 0 .. `world_size` - 1.
        """
        self.size = len(dataset)
        self.shuffle = shuffle
        self.seed = seed
        self.rank = int(os.environ.get("RANK", "0")) if rank is None else rank
        self.world_size = int(os.environ.get("WORLD_SIZE", "1")) if world_size is None else world_size
        if not self.size:
            raise ValueError("dataset: the dataset is empty; it must have at least one sample")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank={self.rank}: must be from 0 to world_size - 1, which is {self.world_size - 1}")
        self.epoch = 0
        self.position = 0
        """Number of samples of this epoch that all ranks together have used."""
        self.steps = 0
        """Number of calls of `advance`."""

    @property
    def total(self) -> int:
        """Number of samples of an epoch over all ranks, with the padding."""
        return len(self) * self.world_size

    def __len__(self) -> int:
        """Return the number of samples of a whole epoch for this rank."""
        return math.ceil(self.size / self.world_size)

    def __iter__(self) -> Iterator[int]:
        yield from self._order()[self.position + self.rank : self.total : self.world_size].tolist()

    def _order(self) -> torch.Tensor:
        order = torch.arange(self.size)
        if self.shuffle:
            order = torch.randperm(self.size, generator=self.generator("order"))
        return order.repeat(math.ceil(self.total / self.size))[: self.total]

    def generator(self, purpose: str) -> torch.Generator:
        """Return a new generator for `purpose`, seeded by seed and epoch, so that the global generator is not used."""
        digest = hashlib.sha256(f"{purpose}/{self.seed}/{self.epoch}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of `epoch`. If it is the current epoch, the position is not changed."""
        if epoch != self.epoch:
            self.epoch, self.position = epoch, 0

    def advance(self, samples: int) -> int:
        """Record that each rank has used `samples` more samples. Return the total number of such steps."""
        self.position = min(self.position + samples * self.world_size, self.total)
        self.steps += 1
        return self.steps

    def state_dict(self) -> dict[str, int]:
        """Return the seed, the size of the dataset, the epoch, the position and the number of steps."""
        return {name: getattr(self, name) for name in ("seed", "size", "epoch", "position", "steps")}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore the position from `state`.

        Raises:
            StateError: the seed or the size of the dataset has changed, so the used samples cannot be determined.
        """
        for name in ("seed", "size"):
            if state[name] != getattr(self, name):
                raise StateError(f"the saved sampler has {name} {state[name]}, but this one has {getattr(self, name)}")
        self.epoch, self.position = state["epoch"], min(state["position"], self.total)
        self.steps = state["steps"]


class ResumableLoader(DataLoader[Any]):
    """A `DataLoader` with a state: the epoch, and the number of samples that the training has received.

    Batches that workers have prefetched do not count, so a checkpoint after a step has the position after the batch of
    that step. After a load, the first iteration yields the rest of the epoch (nothing, if the epoch was complete), and
    each later one a whole epoch. The global random generator is not used.

    Workers are restarted at a load. Random transforms give the same results as without an interruption only if they run
    in the training process (`num_workers=0`), or if their randomness depends only on the sample.
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
        """Create a loader. `rank` and `world_size` are as in `ResumableSampler`; `options` are those of `DataLoader`.

        Raises:
            ValueError: the dataset is empty, a number is out of range, or an option conflicts with the sampler.
        """
        for name in ("sampler", "batch_sampler", "generator"):
            if options.get(name) is not None:
                raise ValueError(
                    f"{name}: a ResumableLoader sets this itself; use a DataLoader with a ResumableSampler instead"
                )
        if not isinstance(dataset, Sized):
            raise ValueError(f"dataset: {type(dataset).__name__} has no length, so its position cannot be saved")
        order = ResumableSampler(dataset, shuffle=shuffle, seed=seed, rank=rank, world_size=world_size)
        super().__init__(dataset, batch_size=batch_size, sampler=order, generator=torch.Generator(), **options)
        self._order = order
        self._begun = False

    @property
    def epoch(self) -> int:
        """The current epoch of the training, from 0."""
        return self._order.epoch

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of `epoch`. If it is the current epoch, nothing changes."""
        self._order.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        order = self._order
        # An epoch that was left early is over, but a loaded position is resumed.
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
        """Return the position of the training in the data."""
        return self._order.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore the position from `state`. The next iteration resumes there.

        Raises:
            StateError: the state is from a dataset of another size, or from another seed.
        """
        self._order.load_state_dict(state)
        self._begun = False
