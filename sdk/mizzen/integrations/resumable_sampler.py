"""A sampler for torch whose position is saved in checkpoints. `mizzen.integrations.torch` exports it."""

import math
import os
from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from mizzen.checkpoint import StateError, rng
from mizzen.integrations.random_numbers import SeededIndex
from mizzen.integrations.replayed_sampler import DataPosition


class ResumableSampler(DataPosition, Sampler[int]):
    """Yields the indices of a dataset for one rank, in an order given by (seed, epoch), from any position on.

    An iteration yields the rest of the current epoch, from `position`. The sampler does not update `position` itself,
    because a loader requests indices long before the training uses them. The code that passes batches to the training
    must call `advance`, as `ResumableLoader` does.

    Of each `world_size` consecutive indices, every rank gets one. If the size of the dataset is not a multiple of
    `world_size`, the epoch is padded with its first indices, as in torch's `DistributedSampler`.
    """

    saved = ("seed", "size", "length", "epoch", "position", "steps")
    fixed = ("seed", "size")

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
        super().__init__(seed)
        self._dataset = dataset
        self.size = self.length = len(dataset)
        """The sizes of the dataset when the sampler was created, and when the epoch began: it may grow."""
        self.shuffle = shuffle
        self.rank = int(os.environ.get("RANK", "0")) if rank is None else rank
        self.world_size = int(os.environ.get("WORLD_SIZE", "1")) if world_size is None else world_size
        if not self.size:
            raise ValueError("dataset: the dataset is empty; it must have at least one sample")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank={self.rank}: must be from 0 to world_size - 1, which is {self.world_size - 1}")
        self.seeds_workers = True
        """Whether each index seeds the generators of the worker that receives it. A `ResumableLoader` seeds batches."""
        self._resume: rng.HeldGenerators | None = None
        self._has_set = False
        """Whether this sampler has set the held generators."""

    @property
    def total(self) -> int:
        """Number of samples of an epoch over all ranks, with the padding."""
        return len(self) * self.world_size

    @property
    def is_unmoved(self) -> bool:
        """Whether `advance` was never called."""
        return not self.steps

    def __len__(self) -> int:
        """Return the number of samples of a whole epoch for this rank."""
        if not self.position:
            self.length = len(self._dataset)
        return math.ceil(self.length / self.world_size)

    def __iter__(self) -> Iterator[int]:
        if self.position and len(self._dataset) != self.length:
            raise StateError(
                f"the dataset has {len(self._dataset)} samples, but had {self.length} when this epoch began: set that "
                "length before the epoch is resumed"
            )
        self._restore_generators()
        rest = self._order()[self.position + self.rank : self.total : self.world_size].tolist()
        if not rest:
            self._resume = None  # The epoch was complete: its end follows, not a look.
        if not self.seeds_workers:
            yield from rest
            return
        for number, index in enumerate(rest, self.position // self.world_size):
            found = SeededIndex(index)
            found.key = (self.seed, self.epoch, number, self.rank)
            yield found

    def _order(self) -> torch.Tensor:
        total = self.total
        order = torch.arange(self.length)
        if self.shuffle:
            order = torch.randperm(self.length, generator=self.generator("order"))
        return order.repeat(math.ceil(total / max(self.length, 1)))[:total]

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of `epoch`. If it is the current epoch, the position is not changed."""
        if epoch != self.epoch:
            self._restore_generators()
            self._resume = None
        super().set_epoch(epoch)

    def advance(self, samples: int) -> int:
        """Record that each rank has used `samples` more samples. Return the number of calls so far."""
        self._resume = None
        self.position = min(self.position + samples * self.world_size, self.total)
        self.steps += 1
        return self.steps

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the position from `state`.

        Raises:
            StateError: the seed or the size of the dataset has changed, so the used samples cannot be determined.
        """
        super().load_state_dict(state)
        self.position = min(self.position, self.total)

    def resume_generators(self, held: rng.HeldGenerators) -> bool:
        """Call `held` when the iteration resumes; see `ResumableLoader.resume_generators`."""
        self._resume, self._has_set = held if self.position else None, False
        return self._resume is not None

    def _restore_generators(self) -> None:
        # Until `advance`, each iteration may be only a look at a batch, so the next one restores them again.
        if self._resume is not None:
            self._resume.is_set = self._resume.is_set and not self._has_set
            self._has_set = self._has_set or not self._resume.is_set
            self._resume()
